from __future__ import annotations

from codecs import getincrementaldecoder

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import tiny_tokenizers
from tokservice.detokenizer import vocabulary
from tokservice.detokenizer.choice import ChoiceText
from tokservice.detokenizer.stop import StopStrings
from tokservice.detokenizer.text_stream import TextStream
from tokservice.wire.messages import FinishReason

TOKENIZER = tiny_tokenizers.byte_level()
TABLE = vocabulary.build(tiny_tokenizers.parsed(TOKENIZER)).visible_bytes
SENTENCE = "The capital of France is Paris. 日本語のテキスト 😀🎉 one two"

sequences = st.lists(
    st.sampled_from([SENTENCE, "日本", "😀", "hello world\n", "Paris"]).map(lambda text: TOKENIZER.encode(text).ids)
    | st.integers(0, len(TABLE) - 1).map(lambda token_id: [token_id]),
    max_size=8,
).map(lambda parts: [token_id for part in parts for token_id in part])
stops_of_the_text = st.tuples(st.integers(0, 50), st.integers(1, 6)).map(lambda cut: SENTENCE[cut[0] : cut[0] + cut[1]])
stop_lists = st.lists(stops_of_the_text | st.sampled_from(["\ufffd", "😀", "語", "\n"]), min_size=1, max_size=3)


def reference(token_ids: list[int], stops: list[str], *, include_stop: bool) -> tuple[str, int, bool]:
    """Decode token by token, look for the first stop in the text so far: (text, tokens consumed, stopped)."""
    decoder = getincrementaldecoder("utf-8")("replace")
    text = ""
    for num_tokens, token_id in enumerate(token_ids, start=1):
        text += decoder.decode(TABLE[token_id])
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
        if ends:
            end, negative_length = min(ends)
            return text[: end if include_stop else end + negative_length], num_tokens, True
    text += decoder.decode(b"", final=True)
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if ends:
        end, negative_length = min(ends)
        return text[: end if include_stop else end + negative_length], len(token_ids), True
    return text, len(token_ids), False


@given(sequences, stop_lists, st.lists(st.integers(1, 5), max_size=30), st.booleans())
def test_text_and_count_end_at_the_first_stop_for_any_pieces(
    token_ids: list[int], stops: list[str], sizes: list[int], include_stop: bool
) -> None:
    choice = ChoiceText(
        TextStream(TABLE, strip_leading_space=False),
        StopStrings(tuple(stops)),
        include_stop=include_stop,
        min_tokens=0,
    )
    shown, place = "", 0
    for size in [*sizes, *[1] * len(token_ids)]:
        if choice.finish_reason or place >= len(token_ids):
            break
        shown += choice.push(token_ids[place : place + size], FinishReason.RUNNING)
        place += size
    if not choice.finish_reason:
        shown += choice.push([], FinishReason.LENGTH)
    stopped = choice.finish_reason == FinishReason.STOP
    assert (shown, choice.num_tokens, stopped) == reference(token_ids, stops, include_stop=include_stop)
