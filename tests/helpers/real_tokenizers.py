"""The real tokenizers that tests compare back ends on, and chat templates for those that come without one."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import npm_tokenizers
from tokservice.models.default_model import ensure_default_model

SMOLLM2 = "smollm2"
NAMES = (SMOLLM2, *npm_tokenizers.DIGESTS)
_SMOLLM2_DIR = ensure_default_model()  # before any test moves the cache elsewhere

TEMPLATES = {
    "gptoss": (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "llama2": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
        "{% else %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
}


def model_dir(name: str) -> Path:
    """The folder with a tokenizer's files. Skips the test where it cannot be had."""
    if name != SMOLLM2:
        return npm_tokenizers.model_dir(name)
    return _SMOLLM2_DIR
