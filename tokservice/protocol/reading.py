"""Reads bodies by strict msgspec types, and says in the client's words what is wrong with them.

Used by the tokenizer workers. Imports no tokenizer and no socket.
"""

from __future__ import annotations

import re
import typing
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Raw

from tokservice.protocol.bounds import check_bounds
from tokservice.wire.errors import RequestError

NULL = Raw(b"null")
MAX_NEUTRAL_BYTES = 64  # a longer value is never neutral, and is not decoded to find out

Ignored = Raw
T = TypeVar("T", bound=msgspec.Struct)


class Neutral:
    """Marks a field that is not supported, with the values (beside null) that change nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = (None, *values)


Refused = Annotated[Raw, Neutral()]
RefusedUnlessFalse = Annotated[Raw, Neutral(False)]
RefusedUnlessEmpty = Annotated[Raw, Neutral([], {}, "")]


class Reader(typing.Generic[T]):
    """Reads bodies of one type."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._neutral = neutral_fields(kind)

    def read(self, body: bytes) -> T:
        """The validated body. Raises RequestError (400), which names the field."""
        try:
            request = self._decoder.decode(body)
            refuse_unsupported(request, self._neutral)
            check_bounds(request)
        except msgspec.ValidationError as error:
            raise _explained(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from error
        except RecursionError as error:
            raise RequestError("The body is nested too deeply.", code="invalid_json") from error
        return request


def refuse_unsupported(part: msgspec.Struct, neutral: dict[str, tuple[Any, ...]], param: str | None = None) -> None:
    """Raise RequestError if a field that is not supported asks for something."""
    for name, values in neutral.items():
        raw = getattr(part, name)
        if raw is NULL:
            continue
        if not _is_neutral(raw, values):
            name = name.removesuffix("_")  # a word of Python has one more
            raise RequestError(f"'{name}' is not supported by this server.", param=param or name, code="unsupported")


def _is_neutral(raw: Raw, values: tuple[Any, ...]) -> bool:
    if len(bytes(raw)) > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # raw parts of a body have not been looked into
        return False
    return any(type(value) is type(neutral) and value == neutral for neutral in values)  # 0 is not False


def neutral_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """Name -> neutral values of the fields of a type that are not supported."""
    fields = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Neutral):
                fields[name] = note.values
    return fields


_PATH = re.compile(r"`\$(?:\.(\w+))?")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*?)`", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(\w+)`")


def _explained(problem: str) -> RequestError:
    """msgspec's complaint with the top-level field as ``param``; the message keeps the whole path."""
    path = _PATH.search(problem)
    param = path.group(1) if path else None
    if unknown := _UNKNOWN.match(problem):
        name = unknown.group(1)[:100]
        return RequestError(f"Unknown field '{name}'.", param=param or name, code="unknown_field")
    if missing := _MISSING.match(problem):
        param = param or missing.group(1)
        return RequestError(f"'{missing.group(1)}' is required.", param=param, code="missing_field")
    return RequestError(f"Invalid value: {problem[:500]}.", param=param, code="invalid_value")
