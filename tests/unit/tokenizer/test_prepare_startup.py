"""Models that cannot be served, and requests before the engine is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_tokenizers
from tests.helpers.preparers import NOW, TOKENIZER
from tokservice.runtime.config import TokenizerConfig
from tokservice.tokenizer.prepare import Preparer
from tokservice.wire.errors import RequestError, StartupError
from tokservice.wire.messages import Route


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


def test_before_the_engine_is_known_nothing_is_prepared(tmp_path: Path) -> None:
    tiny_tokenizers.write_model(tmp_path, TOKENIZER)
    early = Preparer(model_dir=tmp_path, model_name="tiny", chat_template_file="", settings=TokenizerConfig())
    with pytest.raises(RequestError) as caught:
        early.prepare(Route.COMPLETIONS, [b"{}"], NOW)
    assert caught.value.status == 503
