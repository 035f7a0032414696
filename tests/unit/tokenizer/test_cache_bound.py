from __future__ import annotations

import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from tests.helpers import tiny_tokenizers
from tokservice.tokenizer.backends import AddedToken
from tokservice.tokenizer.cache_bound import MAX_GROWTH_BYTES, CacheBound
from tokservice.tokenizer.fastokens_backend import FastokensBackend
from tokservice.tokenizer.hf_backend import HuggingFaceBackend

MIB = 1 << 20


class CountingBackend(HuggingFaceBackend):
    num_forgotten = 0

    def __init__(self) -> None:
        """Nothing to load."""

    def forget(self) -> None:
        self.num_forgotten += 1


def test_a_process_that_grows_too_much_forgets() -> None:
    backend = CountingBackend()
    size = 100 * MIB
    bound = CacheBound(backend, lambda: size)
    bound.check()
    size += MAX_GROWTH_BYTES
    bound.check()
    assert backend.num_forgotten == 0
    size += 1
    bound.check()
    assert backend.num_forgotten == 1
    for _ in range(5):
        bound.check()
    assert backend.num_forgotten == 1, "where forgetting does not help, it is not repeated at once"
    size += MAX_GROWTH_BYTES // 4 + 1
    bound.check()
    assert backend.num_forgotten == 2


def test_after_forgetting_everything_is_as_before(tmp_path: Path) -> None:
    backend = FastokensBackend(tiny_tokenizers.write_model(tmp_path, tiny_tokenizers.byte_level()) / "tokenizer.json")
    backend.add_tokens([AddedToken("<new>", special=False), AddedToken("<think>", special=True, normalized=True)])
    text = "hello <think> <new> world <|im_end|>"

    def ids() -> list[array[int]]:
        return [backend.encode(text, add_special_tokens=True, special_as_text=flag) for flag in (False, True)]

    before, added = ids(), backend.added_tokens()
    backend.forget()
    assert ids() == before
    assert backend.added_tokens() == added


# Distinct long words; the resident memory every so many texts, in MiB. Own process: that of pytest has other things.
GROW = """
import json, random, string, sys
from pathlib import Path
from tokservice.runtime.config import TokenizerConfig
from tokservice.runtime.memory import resident_bytes
from tokservice.tokenizer import cache_bound
from tokservice.tokenizer.encode import Encoder
from tokservice.wire.messages import EngineLimits

random.seed(1)
cache_bound.MAX_GROWTH_BYTES = int(sys.argv[3]) << 20
encoder = Encoder(Path(sys.argv[1]), TokenizerConfig(backend=sys.argv[2]), random.getrandbits)
limits = EngineLimits(max_model_len=10**6, vocab_size=10**6, kv_cache_tokens=10**6, eos_token_ids=())
sizes = []
for i in range(int(sys.argv[4])):
    text = "".join(random.choices(string.ascii_letters, k=20_000))
    encoder.encode(text, add_special_tokens=False, limits=limits, param="prompt")
    if i % 10 == 0:
        encoder.cache_bound.check()
    if i % 20 == 19:
        sizes.append(resident_bytes() >> 20)
print(json.dumps(sizes))
"""


def grow(model: Path, backend: str, max_growth_mib: int, num_texts: int) -> list[int]:
    command = [sys.executable, "-c", GROW, str(model), backend, str(max_growth_mib), str(num_texts)]
    sizes: list[int] = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=600).stdout)
    return sizes


@pytest.mark.parametrize("backend", ["hf", "fastokens"])
def test_memory_levels_off(tmp_path: Path, backend: str) -> None:
    """Distinct prompts without blanks made a worker grow for ever: huggingface/tokenizers#1539."""
    model = tiny_tokenizers.write_model(tmp_path, tiny_tokenizers.byte_level_with_digits())
    sizes = grow(model, backend, 32, 800)
    assert max(sizes) - sizes[0] < 80, sizes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["hf", "fastokens"])
def test_memory_levels_off_over_thousands_of_prompts(tmp_path: Path, backend: str) -> None:
    model = tiny_tokenizers.write_model(tmp_path, tiny_tokenizers.byte_level_with_digits())
    sizes = grow(model, backend, 512, 12_000)
    assert max(sizes) - sizes[0] < 800, sizes
