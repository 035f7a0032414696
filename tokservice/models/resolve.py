"""What ``--model`` names -> a folder on this machine.

Runs in the launcher, which imports it: so nothing heavy here before it is needed.
"""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

from tokservice.models import default_model
from tokservice.runtime.config import DEFAULT_MODEL
from tokservice.wire.errors import ConfigError, StartupError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # org/name
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
# The same weights once more, in other formats. Chat templates may lie in a folder.
_NOT_HUB_FILES = ["*/*.json", "*/*.safetensors", "tokenizer*/*", "consolidated*"]
_MAX_REASON = 300  # characters of the Hub library's message, which spans lines


def resolve_model(path_or_id: str) -> Path:
    """The folder of the default model (by its name), of a local folder, or of a Hub id, fetched where needed.

    The folder is sure to hold a tokenizer.json and nothing else: a simulated engine needs no more, so the engine
    itself asks for config and weights. Raises ConfigError or StartupError, each with one clear line.
    """
    if path_or_id == DEFAULT_MODEL:
        return default_model.ensure_default_model()
    if local := _existing(path_or_id):
        folder = local
    elif _HUB_ID.fullmatch(path_or_id):
        folder = _snapshot(path_or_id)
    else:
        raise ConfigError(
            f"model.path: {path_or_id!r} is neither an existing folder, nor a Hub id (org/name),"
            f" nor the default model ({DEFAULT_MODEL})"
        )
    if not folder.is_dir():
        raise ConfigError(f"model.path: {path_or_id} is a file; expected the folder that holds the model")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"model.path: {path_or_id} has no tokenizer.json")
    return folder


def served_name(path_or_id: str, override: str = "") -> str:
    """The model's name in the API: ``override``, or the name of the default model, folder or Hub id itself."""
    if override:
        return override
    local = None if path_or_id == DEFAULT_MODEL else _existing(path_or_id)
    return local.name if local else path_or_id


def _existing(path: str) -> Path | None:
    local = os.path.expanduser(path)  # this and exists() take any text at all, unlike their pathlib twins
    return Path(local).resolve() if os.path.exists(local) else None


def _snapshot(hub_id: str) -> Path:
    """Download, or find in the Hub's own cache. HF_HUB_OFFLINE, HF_TOKEN and HF_HOME mean what they always do."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_HUB_FILES))
    except Exception as error:  # the library, its transfer back ends and its HTTP client raise many kinds
        reason = textwrap.shorten(str(error) or type(error).__name__, _MAX_REASON, placeholder=" ...")
        raise StartupError(f"model.path: no folder {hub_id} here, and the Hub did not give it: {reason}") from error
