from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_tokenizers
from tokservice.protocol import context as contexts
from tokservice.runtime.config import TokenizerConfig
from tokservice.tokenizer.prepare import Answer, Prepared, Preparer
from tokservice.wire.errors import RequestError, StartupError
from tokservice.wire.messages import EngineLimits, Route

TOKENIZER = tiny_tokenizers.byte_level()
VOCAB_SIZE = TOKENIZER.get_vocab_size() + 10  # ten padding rows
LIMITS = EngineLimits(max_model_len=64, vocab_size=VOCAB_SIZE, kv_cache_tokens=1000, eos_token_ids=(2,))
NOW = 1700000000.9
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"prompt": "hello world"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def counting_bits(num_bits: int) -> int:
    return 2**num_bits - 1


def make(folder: Path, tokenizer: Any = TOKENIZER, settings: TokenizerConfig | None = None, **files: Any) -> Preparer:
    tiny_tokenizers.write_model(folder, tokenizer, **files)
    preparer = Preparer(
        model_dir=folder,
        model_name="tiny",
        chat_template_file="",
        settings=settings or TokenizerConfig(),
        randbits=counting_bits,
    )
    preparer.set_limits(LIMITS)
    return preparer


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    return make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    return make(
        tmp_path_factory.mktemp("model"),
        tiny_tokenizers.byte_fallback(),
        chat_template="{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}",
        special_tokens={"bos_token": "<s>"},
    )


def prepared(preparer: Preparer, **body: Any) -> Prepared:
    route = Route.CHAT_COMPLETIONS if "messages" in body else Route.COMPLETIONS
    result = preparer.prepare(route, [json.dumps(body).encode()], NOW)
    assert isinstance(result, Prepared)
    return result


def answer(preparer: Preparer, route: Route, **body: Any) -> Any:
    result = preparer.prepare(route, [json.dumps(body).encode()], NOW)
    assert isinstance(result, Answer)
    return json.loads(result.body)


def refused(preparer: Preparer, body: dict[str, Any] | bytes, route: Route | None = None) -> RequestError:
    if isinstance(body, dict):
        route = route or (Route.CHAT_COMPLETIONS if "messages" in body else Route.COMPLETIONS)
        body = json.dumps(body).encode()
    with pytest.raises(RequestError) as caught:
        preparer.prepare(route or Route.COMPLETIONS, [body], NOW)
    assert 400 <= caught.value.status < 500
    return caught.value


def ids(result: Prepared) -> list[list[int]]:
    return [list(struct.unpack(f"<{len(prompt) // 4}I", prompt)) for prompt in result.prompts]


# --- what a valid request becomes -----------------------------------------------------------------------------


def test_completion(preparer: Preparer) -> None:
    result = prepared(preparer, **PROMPT)
    token_ids = TOKENIZER.encode("hello world").ids
    assert ids(result) == [token_ids]
    assert (result.stream, result.num_choices, result.num_prompt_tokens) == (False, 1, len(token_ids))
    assert (result.sampling.max_tokens, result.sampling.n, result.sampling.seed) == (16, 1, 2**63 - 1)
    context = contexts.decode(result.context)
    assert (context.route, context.created, context.model) == (Route.COMPLETIONS, 1700000000, "tiny")
    assert context.response_id == "cmpl-" + "f" * 32


def test_chat(preparer: Preparer) -> None:
    result = prepared(preparer, **CHAT, stream=True, stream_options={"include_usage": True})
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids(result) == [TOKENIZER.encode(text, add_special_tokens=False).ids]
    assert result.sampling.max_tokens == LIMITS.max_model_len - result.num_prompt_tokens
    context = contexts.decode(result.context)
    assert (context.stream, context.include_usage, context.continuous_usage) == (True, True, False)
    assert context.response_id.startswith("chatcmpl-")


def test_a_body_in_pieces(preparer: Preparer) -> None:
    raw = json.dumps(PROMPT).encode()
    pieces = [raw[:7], memoryview(raw)[7:9], bytearray(raw[9:])]
    assert preparer.prepare(Route.COMPLETIONS, pieces, NOW) == preparer.prepare(Route.COMPLETIONS, [raw], NOW)


def test_all_prompt_forms(preparer: Preparer) -> None:
    """Lists got 422 though evaluation tools always send lists: tt-inference-server#3532."""
    one, two = TOKENIZER.encode("hello").ids, TOKENIZER.encode("world").ids
    assert ids(prepared(preparer, prompt="hello")) == [one]
    assert ids(prepared(preparer, prompt=["hello", "world"])) == [one, two]
    assert ids(prepared(preparer, prompt=one)) == [one]
    result = prepared(preparer, prompt=[one, two, one], n=2, best_of=2)
    assert (ids(result), result.num_choices) == ([one, two, one], 6)
    assert contexts.decode(result.context).num_prompt_tokens == (len(one), len(two), len(one))


def test_sampling_fields(preparer: Preparer) -> None:
    fields = {
        "n": 3,
        "max_tokens": 5,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "seed": 42,
        "ignore_eos": True,
        "priority": -3,
    }
    sampling = prepared(
        preparer, **PROMPT, **fields, stop_token_ids=[5, 5, 6], logit_bias={"7": -100, "8": 1.5}, user="u"
    ).sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.stop_token_ids == (5, 6)
    assert (sampling.logit_bias_ids, sampling.logit_bias_values) == ((7, 8), (-100.0, 1.5))


def test_output_fields(preparer: Preparer) -> None:
    context = contexts.decode(
        prepared(
            preparer,
            **PROMPT,
            stop=["a", "b", "a"],
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            min_tokens=3,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False},
        ).context
    )
    assert (context.stop, context.include_stop, context.skip_special_tokens) == (("a", "b"), True, False)
    assert (context.min_tokens, context.continuous_usage) == (3, True)


def test_every_field_may_be_null(preparer: Preparer) -> None:
    """Explicit null for an optional field failed an assertion: vllm#19862."""
    for route, body in ((Route.COMPLETIONS, PROMPT), (Route.CHAT_COMPLETIONS, CHAT)):
        readers = {Route.COMPLETIONS: preparer._completions, Route.CHAT_COMPLETIONS: preparer._chats}
        names = [name for name in readers[route]._decoder.type.__struct_fields__ if name not in body]
        expected = preparer.prepare(route, [json.dumps(body).encode()], NOW)
        for nulls in (names, *([name] for name in names)):
            raw = json.dumps(body | dict.fromkeys(nulls)).encode()
            assert preparer.prepare(route, [raw], NOW) == expected


def test_bookkeeping_of_the_client_is_accepted(preparer: Preparer) -> None:
    prepared(preparer, **CHAT, user="u", metadata={"a": ["b"]}, store=False, service_tier="auto", model="tiny")


def test_neutral_values_of_unsupported_fields_are_accepted(preparer: Preparer) -> None:
    prepared(preparer, **PROMPT, echo=False, suffix="", logprobs=None, response_format={"type": "text"}, bad_words=[])
    prepared(preparer, **CHAT, logprobs=False, top_logprobs=0, tools=[], tool_choice="none", parallel_tool_calls=True)


def test_nul_is_kept(preparer: Preparer) -> None:
    """A NUL silently cut the prompt: llama.cpp#25543."""
    text = "one\x00two"
    assert ids(prepared(preparer, prompt=text)) == [TOKENIZER.encode(text).ids]
    assert len(ids(prepared(preparer, prompt=text))[0]) > len(ids(prepared(preparer, prompt="one"))[0])


def test_one_bos_in_chat_and_the_tokenizers_default_in_completions(with_bos: Preparer) -> None:
    """The template wrote a BOS and encoding added another: vllm#2012."""
    assert ids(prepared(with_bos, **CHAT))[0].count(1) == 1
    assert ids(prepared(with_bos, **PROMPT))[0].count(1) == 1
    assert ids(prepared(with_bos, **PROMPT, add_special_tokens=False))[0].count(1) == 0
    assert ids(prepared(with_bos, **CHAT, add_special_tokens=True))[0].count(1) == 2


def test_prompts_without_text_are_marked(with_bos: Preparer) -> None:
    assert contexts.decode(prepared(with_bos, prompt=["", "hello"]).context).bare_prompts == (0,)


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB_SIZE, 2147483648, 9999999, -5])
def test_top_k_beyond_the_vocabulary_is_off(preparer: Preparer, top_k: int) -> None:
    """Large values crashed the scheduler: sglang#17788."""
    assert prepared(preparer, **PROMPT, top_k=top_k).sampling.top_k == 0


def test_tiny_temperatures_are_greedy(preparer: Preparer) -> None:
    assert prepared(preparer, **PROMPT, temperature=1e-300).sampling.temperature == 0
    assert prepared(preparer, **PROMPT, temperature=0).sampling.temperature == 0


@pytest.mark.parametrize("seed", [-1, 0, -(2**63), 2**63 - 1])
def test_seeds_are_63_bits(preparer: Preparer, seed: int) -> None:
    assert 0 <= prepared(preparer, **PROMPT, seed=seed).sampling.seed < 2**63


def test_the_models_own_defaults(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}
    own = make(tmp_path, generation_config=config)
    sampling = prepared(own, **PROMPT).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.6, 0.95, 20, 1.1)
    assert prepared(own, **PROMPT, temperature=0, top_k=-1).sampling.temperature == 0
    assert prepared(own, **PROMPT, top_k=-1).sampling.top_k == 0


# --- lengths --------------------------------------------------------------------------------------------------


def test_prompts_around_the_context_length(preparer: Preparer) -> None:
    """The message spoke of a negative max_tokens: vllm#4667."""
    limit = LIMITS.max_model_len
    assert prepared(preparer, prompt=[5] * (limit - 1)).sampling.max_tokens == 1
    for length in (limit, limit + 1):
        error = refused(preparer, {"prompt": [5] * length})
        assert (error.code, error.param) == ("context_length_exceeded", "prompt")
        assert str(limit) in error.message
        assert str(length) in error.message


def test_too_large_max_tokens_is_cut_to_the_remainder(preparer: Preparer) -> None:
    assert prepared(preparer, prompt=[5] * 60, max_tokens=10**6).sampling.max_tokens == 4
    assert prepared(preparer, prompt=[[5] * 60, [5]], max_tokens=30, min_tokens=20).sampling.max_tokens == 4
    assert prepared(preparer, prompt=[[5] * 60, [5]], max_tokens=30, min_tokens=20).sampling.min_tokens == 4


def test_a_hopeless_text_is_refused_unencoded(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparer._encoder, "_backend", None)
    error = refused(preparer, {"messages": [{"role": "user", "content": "a " * 100_000}]})
    assert (error.code, error.param) == ("context_length_exceeded", "messages")


def test_truncation_keeps_the_end_of_the_prompt(preparer: Preparer) -> None:
    text = "one two three " * 1000
    token_ids = TOKENIZER.encode(text).ids
    assert ids(prepared(preparer, prompt=text, truncate_prompt_tokens=5)) == [token_ids[-5:]]
    assert ids(prepared(preparer, prompt=text, truncate_prompt_tokens=-1, max_tokens=4)) == [token_ids[-60:]]
    assert ids(prepared(preparer, prompt=token_ids, truncate_prompt_tokens=5)) == [token_ids[-5:]]
    assert refused(preparer, {"prompt": text, "truncate_prompt_tokens": 1000}).code == "context_length_exceeded"


def test_a_prompt_never_needs_more_than_the_cache_holds(tmp_path: Path) -> None:
    small = make(tmp_path)
    small.set_limits(EngineLimits(max_model_len=64, vocab_size=VOCAB_SIZE, kv_cache_tokens=10))
    assert prepared(small, prompt=[5] * 9).sampling.max_tokens == 1
    assert refused(small, {"prompt": [5] * 10}).code == "context_length_exceeded"


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[5], []], ["a", ""]])
def test_empty_prompts_are_refused(preparer: Preparer, prompt: Any) -> None:
    """They killed the engine's loop: vllm#7283."""
    error = refused(preparer, {"prompt": prompt})
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", "prompt")


@pytest.mark.parametrize("wrong", [VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**63, 2**64, 2**200, -1, -(2**63)])
def test_token_ids_outside_the_vocabulary_are_refused(preparer: Preparer, wrong: int) -> None:
    """vllm#9634, vllm#51795, vllm#54195"""
    assert refused(preparer, {"prompt": [5, wrong]}).param == "prompt"
    assert refused(preparer, {"prompt": [[5], [5, wrong]]}).param == "prompt"
    assert refused(preparer, PROMPT | {"stop_token_ids": [wrong]}).param == "stop_token_ids"
    assert refused(preparer, PROMPT | {"logit_bias": {str(wrong): -100}, "min_tokens": 2}).param == "logit_bias"
    assert refused(preparer, {"tokens": [wrong]}, Route.DETOKENIZE).param == "tokens"


def test_padding_rows_of_the_embedding_are_valid_prompt_ids(preparer: Preparer) -> None:
    """vllm#44682"""
    assert ids(prepared(preparer, prompt=[VOCAB_SIZE - 1])) == [[VOCAB_SIZE - 1]]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("prompt", [None, 5, {}, ["a", 5], [5, [5]], [5.0], [True], [["a"]], [[[5]]], [None]]),
        ("n", [0, -1, 129, 1_000_000, 1.5, "1", True]),
        ("best_of", [2, 0]),
        ("max_tokens", [0, -1, 1.0, "5", [], True]),
        ("min_tokens", [-1, 17]),
        ("temperature", [-0.1, "hot", [], True]),
        ("top_p", [0, -1, 1.01]),
        ("top_k", [0.5, 1e3, "5"]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [2.1, -2.1]),
        ("frequency_penalty", [2.1, -2.1]),
        ("repetition_penalty", [0, -1]),
        ("seed", [2**63, -(2**63) - 1, 1.5]),
        ("priority", [2**31]),
        ("stop", ["", ["", "END"], ["END", ""], [None], 5, [["a"]], ["a"] * 0 + list("abcdefghijklmnopq"), "x" * 257]),
        ("logit_bias", [{"a": 1}, {"1.5": 1}, {"5": 101}, {"5": None}, []]),
        ("stop_token_ids", [[1.5], ["a"], 5, [None]]),
        ("truncate_prompt_tokens", [0, -2]),
        ("stream", [1, "true"]),
        ("stream_options", [{"include_usage": True}, {}, {"unknown": 1}, 5]),
        ("ignore_eos", [1]),
        ("user", [5]),
        ("store", [True]),
        ("model", [5]),
        ("echo", [1, "true"]),
        ("suffix", ["x"]),
        ("logprobs", [-1, 21, True, 1.5]),
        ("prompt_logprobs", [-1, 21, False]),
        ("bad_words", [[""], [" "], [5], "a", ["x" * 257], ["a"] * 129]),
        ("response_format", ["json", {"type": "xml"}, {"type": "json_schema"}, {"type": "text", "json_schema": {}}]),
        ("response_format", [{"type": "json_schema", "json_schema": {"name": "x"}}]),
        ("guided_json", [[], 5, "x", "[1]", {"type": "objec"}, {"$ref": "#/x"}, {"enum": ["x" * 40_000]}]),
        ("guided_regex", ["a(", "(?=a)b", 5, "x" * 40_000]),
        ("guided_choice", [[], [""], "a", ["a"] * 1025]),
        ("guided_grammar", ["start: b", "root ::= (", "x" * 40_000]),
        ("structured_outputs", [{}, {"json": {}, "regex": "a"}, {"regex": "("}, {"x": 1}, {"structural_tag": "a"}]),
        ("return_token_ids", [1]),
        ("allowed_token_ids", [[5]]),
        ("spaces_between_special_tokens", [False]),
        ("use_beam_search", [True]),
        ("no_such_field", [None, 1]),
        ("tools", [None]),  # a field of chat alone
    ],
)
def test_wrong_values_are_refused_and_named(preparer: Preparer, field: str, values: list[Any]) -> None:
    for value in values:
        error = refused(preparer, PROMPT | {field: value})
        assert (error.status, error.param) == (400, field), (value, error)
        json.loads(error.body())


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("messages", [None, [], "hi", [{}], [{"role": "bot", "content": "x"}], [{"role": "user", "content": 5}]]),
        ("messages", [[{"role": "user", "content": "x", "mood": "good"}], [{"role": "user", "content": ["x"]}]]),
        ("max_completion_tokens", [0, -1]),
        ("tools", [[{"type": "custom", "function": {"name": "f"}}], [{"type": "function"}], [TOOL, TOOL], {}]),
        ("tools", [[{"function": {"name": "a b"}}], [{"function": {"name": "f", "parameters": 5}}]]),
        ("tool_choice", ["required", "any", {"type": "function", "function": {"name": "f"}}]),
        ("parallel_tool_calls", ["no"]),
        ("logprobs", [1, "true"]),
        ("top_logprobs", [2, -1, 21]),
        ("max_tokens", [0]),
        ("echo", [True]),
        ("chat_template", ["{{ 1 }}"]),
        ("chat_template_kwargs", [{"messages": []}, 5, {"bos_token": "x", "strftime_now": 1}]),
        ("modalities", [["text", "audio"]]),
        ("prompt", ["x"]),
        ("best_of", [1]),
    ],
)
def test_wrong_values_in_chat_are_refused_and_named(preparer: Preparer, field: str, values: list[Any]) -> None:
    for value in values:
        error = refused(preparer, CHAT | {field: value}, Route.CHAT_COMPLETIONS)
        assert (error.status, error.param) == (400, field), (value, error)


def test_both_names_of_max_tokens(preparer: Preparer) -> None:
    assert prepared(preparer, **CHAT, max_completion_tokens=3).sampling.max_tokens == 3
    assert prepared(preparer, **CHAT, max_completion_tokens=3, max_tokens=3).sampling.max_tokens == 3
    assert refused(preparer, CHAT | {"max_completion_tokens": 3, "max_tokens": 4}).param == "max_completion_tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"not json",
        b"\xef\xbb\xbf{}",
        b'{"prompt":"\xff\xfe"}',
        b'{"prompt":"\xed\xa0\x80"}',
        rb'{"prompt":"\ud800"}',
        rb'{"prompt":"\ud800 text"}',
        rb'{"prompt":"\udc00\ud800"}',
        b'{"prompt":"a\nb"}',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":Infinity}',
        b'{"prompt":"a"} {}',
        b"[" * 20_000,
        b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"prompt":"a","metadata":' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}",
    ],
)
def test_bodies_that_are_not_valid_json_are_refused(preparer: Preparer, body: bytes) -> None:
    """Deep nesting raised RecursionError: Rapid-MLX#798."""
    assert refused(preparer, body).status == 400


def test_numbers_out_of_range_are_named(preparer: Preparer) -> None:
    assert refused(preparer, b'{"prompt":"a","temperature":1e999}').param == "temperature"
    for field in ("n", "seed", "max_tokens", "stop_token_ids", "prompt"):
        for num_digits in (30, 4300, 5000):
            number = (b"-1" if field == "max_tokens" else b"1") + b"0" * (num_digits - 1)
            value = number if field in ("n", "seed", "max_tokens") else b"[" + number + b"]"
            body = b'{"prompt":["a","b"],"%b":%b}' % (field.encode(), value)
            assert refused(preparer, body).param == field


def test_another_model_is_not_found(preparer: Preparer) -> None:
    """Any model name was accepted and echoed: sglang#31404."""
    for route, body in (
        (Route.COMPLETIONS, PROMPT),
        (Route.CHAT_COMPLETIONS, CHAT),
        (Route.TOKENIZE, PROMPT),
        (Route.DETOKENIZE, {"tokens": [5]}),
    ):
        error = refused(preparer, body | {"model": "no-such-model"}, route)
        assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


def test_too_many_choices_are_refused_before_fan_out(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request could exhaust memory: gpt4all#3635."""
    monkeypatch.setattr(preparer._encoder, "_backend", None)
    assert refused(preparer, {"prompt": ["a"] * 100_000}).param == "prompt"
    assert refused(preparer, {"prompt": ["a"] * 65, "n": 2}).param == "n"
    assert refused(preparer, CHAT | {"n": 1_000_000}).param == "n"


def test_a_model_without_template_refuses_chat(tmp_path: Path) -> None:
    bare = make(tmp_path, chat_template=None)
    assert refused(bare, CHAT).code == "no_chat_template"


def test_before_the_engine_is_known_nothing_is_prepared(tmp_path: Path) -> None:
    tiny_tokenizers.write_model(tmp_path, TOKENIZER)
    early = Preparer(model_dir=tmp_path, model_name="tiny", chat_template_file="", settings=TokenizerConfig())
    with pytest.raises(RequestError) as caught:
        early.prepare(Route.COMPLETIONS, [b"{}"], NOW)
    assert caught.value.status == 503


def test_tokens_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    small = make(tmp_path)
    small.set_limits(EngineLimits(max_model_len=64, vocab_size=300))
    assert refused(small, {"prompt": "<think>"}).param == "prompt"


# --- /tokenize and /detokenize --------------------------------------------------------------------------------


def test_tokenize(preparer: Preparer, with_bos: Preparer) -> None:
    token_ids = TOKENIZER.encode("hello world").ids
    expected = {"count": len(token_ids), "max_model_len": 64, "tokens": token_ids, "token_strs": None}
    assert answer(preparer, Route.TOKENIZE, **PROMPT) == expected
    strings = answer(preparer, Route.TOKENIZE, **PROMPT, return_token_strs=True)["token_strs"]
    assert strings == TOKENIZER.encode("hello world").tokens
    assert answer(preparer, Route.TOKENIZE, prompt="")["tokens"] == []
    assert answer(with_bos, Route.TOKENIZE, prompt="")["tokens"] == [1]
    assert answer(with_bos, Route.TOKENIZE, prompt="", add_special_tokens=False)["tokens"] == []
    assert answer(preparer, Route.TOKENIZE, **CHAT)["tokens"] == ids(prepared(preparer, **CHAT))[0]
    assert answer(preparer, Route.TOKENIZE, prompt="a " * 1000)["count"] > LIMITS.max_model_len


def test_detokenize(preparer: Preparer) -> None:
    text = "<|im_start|>Grüße 😀"
    assert answer(preparer, Route.DETOKENIZE, tokens=TOKENIZER.encode(text).ids) == {"prompt": text}
    assert answer(preparer, Route.DETOKENIZE, tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize("body", [{}, PROMPT | CHAT, {"messages": []}, PROMPT | {"n": 1}, PROMPT | {"tools": [1]}])
def test_tokenize_refuses(preparer: Preparer, body: dict[str, Any]) -> None:
    assert refused(preparer, body, Route.TOKENIZE).status == 400


# --- start-up -------------------------------------------------------------------------------------------------


def test_unusable_models_are_startup_errors(tmp_path: Path) -> None:
    def start(**options: Any) -> None:
        settings = TokenizerConfig(allow_special_in_content=options.pop("allow", True))
        Preparer(model_dir=tmp_path, model_name="m", chat_template_file=options.pop("template", ""), settings=settings)

    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        start()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StartupError, match=r"cannot read .*tokenizer\.json"):
        start()
    tiny_tokenizers.write_model(tmp_path, TOKENIZER, generation_config={"temperature": "hot"})
    with pytest.raises(StartupError, match=r"generation_config\.json: temperature"):
        start()
    tiny_tokenizers.write_model(tmp_path, TOKENIZER, chat_template="{% if %}", generation_config={})
    with pytest.raises(StartupError, match="chat template"):
        start()
    tiny_tokenizers.write_model(tmp_path, TOKENIZER)
    with pytest.raises(StartupError, match="cannot read"):
        start(template=str(tmp_path / "missing.jinja"))
    start()
    start(allow=False)


# --- logprobs, echo, ids, guides, tools -----------------------------------------------------------------------


def test_logprobs(preparer: Preparer) -> None:
    def counts(**fields: Any) -> tuple[int, int]:
        sampling = prepared(preparer, **fields).sampling
        return sampling.num_logprobs, sampling.num_prompt_logprobs

    assert counts(**PROMPT) == counts(**CHAT) == counts(**CHAT, top_logprobs=0) == (-1, -1)
    assert counts(**PROMPT, logprobs=0) == (0, -1)
    assert counts(**PROMPT, logprobs=5) == (5, -1)
    assert counts(**PROMPT, logprobs=5, echo=True) == (5, 5)
    assert counts(**PROMPT, logprobs=1, prompt_logprobs=3, echo=True) == (1, 3)
    assert counts(**CHAT, logprobs=True) == (0, -1)
    assert counts(**CHAT, logprobs=True, top_logprobs=20) == (20, -1)
    assert counts(**CHAT, prompt_logprobs=0) == (-1, 0)


def test_echo_without_output(preparer: Preparer) -> None:
    """max_tokens 0 with echo crashed the server: vllm#6521."""
    result = prepared(preparer, prompt=["hello", "world"], max_tokens=0, echo=True)
    assert result.sampling.max_tokens == 0
    context = contexts.decode(result.context)
    assert (context.prompt_texts, context.prompt_ids) == (("hello", "world"), result.prompts)
    assert contexts.decode(prepared(preparer, prompt=[5, 6], echo=True).context).prompt_texts == (None,)
    truncated = prepared(preparer, prompt="one two three", echo=True, truncate_prompt_tokens=1)
    assert contexts.decode(truncated.context).prompt_texts == (None,)


def test_prompts_travel_to_the_detokenizer_only_where_they_are_told(preparer: Preparer) -> None:
    assert contexts.decode(prepared(preparer, **PROMPT, logprobs=2).context).prompt_ids == ()
    for fields in ({"echo": True}, {"return_token_ids": True}, {"prompt_logprobs": 0}):
        assert contexts.decode(prepared(preparer, **PROMPT, **fields).context).prompt_ids


def test_bad_words(preparer: Preparer) -> None:
    found = prepared(preparer, **PROMPT, bad_words=["hello", "hello"]).sampling.bad_words_ids
    assert set(found) == {tuple(TOKENIZER.encode("hello").ids), tuple(TOKENIZER.encode(" hello").ids)}


def test_guides_reach_the_engine(preparer: Preparer) -> None:
    sampling = prepared(preparer, **CHAT, response_format={"type": "json_object"}).sampling
    assert (sampling.guide_kind, sampling.guide) == ("json_schema", '{"type":"object"}')
    assert prepared(preparer, **PROMPT, guided_regex="[0-9]+").sampling.guide_kind == "regex"


def test_tools_are_shown_even_where_the_template_knows_none(tmp_path: Path) -> None:
    preparer = make(tmp_path)
    preparer.set_limits(EngineLimits(max_model_len=4096, vocab_size=VOCAB_SIZE))
    result = prepared(preparer, **CHAT, tools=[TOOL])
    assert '"name": "f"' in TOKENIZER.decode(ids(result)[0])
    context = contexts.decode(result.context)
    assert (context.tool_format, context.tool_names) == ("hermes", ("f",))
    assert prepared(preparer, **CHAT, tools=[TOOL], tool_choice="none").prompts == prepared(preparer, **CHAT).prompts


def test_a_demanded_call_and_a_response_format_exclude_each_other(preparer: Preparer) -> None:
    body = CHAT | {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}
    assert refused(preparer, body).param == "response_format"


def test_reasoning_by_option(tmp_path: Path) -> None:
    tiny_tokenizers.write_model(
        tmp_path, TOKENIZER, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}{{ opened }}"
    )
    thinking = Preparer(
        model_dir=tmp_path,
        model_name="tiny",
        chat_template_file="",
        settings=TokenizerConfig(),
        reasoning_parser="think",
    )
    thinking.set_limits(LIMITS)
    assert contexts.decode(prepared(thinking, **CHAT).context).reasoning == "tagged"
    opened = CHAT | {"chat_template_kwargs": {"opened": "<think>\n"}}
    assert contexts.decode(prepared(thinking, **opened).context).reasoning == "open"
    guided = opened | {"response_format": {"type": "json_object"}}
    assert contexts.decode(prepared(thinking, **guided).context).reasoning == ""


def test_token_ids_in_and_out(preparer: Preparer) -> None:
    body = {"prompt_token_ids": [[5, 6], [7]], "sampling_params": {"n": 2, "max_tokens": 3, "logprobs": 1}}
    result = preparer.prepare(Route.GENERATE, [json.dumps(body).encode()], NOW)
    assert isinstance(result, Prepared)
    assert (ids(result), result.num_choices, result.num_pretokenized) == ([[5, 6], [7]], 4, 2)
    assert (result.sampling.max_tokens, result.sampling.num_logprobs) == (3, 1)
    assert prepared(preparer, prompt=["a", "b"]).num_pretokenized == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt_token_ids"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [[]]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, [5]]}, "prompt_token_ids"),
        ({"prompt_token_ids": [VOCAB_SIZE]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5], "prompt": "a"}, "prompt"),
        ({"prompt_token_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"prompt_token_ids": [5], "sampling_params": {"echo": True}}, "sampling_params"),
        ({"prompt_token_ids": [5], "stream_options": {}}, "stream_options"),
    ],
)
def test_wrong_values_with_token_ids(preparer: Preparer, body: dict[str, Any], param: str) -> None:
    assert refused(preparer, body, Route.GENERATE).param == param


def test_a_template_that_loops_for_ever_costs_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokservice.tokenizer.chat_template.MAX_RENDER_S", 0.05)
    monkeypatch.setattr("tokservice.tokenizer.chat_template.MAX_RENDERED_CHARS", 5000)
    loop = "{% for i in range(90000) %}"
    silent_loops = f"{loop}{loop}{{% endfor %}}{{% endfor %}}"
    endless = f"{{% if messages[0].content == 'silent' %}}{silent_loops}{{% endif %}}"
    loud = "{% if messages[0].content == 'loud' %}{% for i in range(90000) %}xxxxxxxx{% endfor %}{% endif %}fine"
    looping = make(tmp_path, chat_template=endless + loud)
    silent = refused(looping, {"messages": [{"role": "user", "content": "silent"}]})
    assert (silent.code, silent.param) == ("template_timeout", "messages")
    assert "characters" in refused(looping, {"messages": [{"role": "user", "content": "loud"}]}).message
    assert ids(prepared(looping, **CHAT)) == [TOKENIZER.encode("fine").ids]
