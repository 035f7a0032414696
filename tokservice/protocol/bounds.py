"""Between which numbers a field's value lies: said once, in its type, for who checks it and for who describes it.

Used by the tokenizer workers and the API's description. Imports no tokenizer and no socket.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from functools import cache
from types import UnionType

import msgspec

from tokservice.wire.errors import RequestError

INT32 = 2**31
INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Bounds:
    """Marks a number, as ``Annotated[int, Bounds(...)]``. Both ends are allowed, unless ``above_low``."""

    low: int | float
    high: int | float | None = None
    above_low: bool = False

    @property
    def rule(self) -> str:
        """For messages."""
        if self.above_low:
            return f"must be above {self.low}" + ("" if self.high is None else f" and at most {self.high}")
        return f"must be at least {self.low}" if self.high is None else f"must be between {self.low} and {self.high}"

    @property
    def meta(self) -> msgspec.Meta:
        """The same for JSON Schema."""
        if self.above_low:
            return msgspec.Meta(gt=self.low, le=self.high)
        return msgspec.Meta(ge=self.low, le=self.high)

    def allow(self, value: float) -> bool:
        """Whether it is a value between them."""
        is_high_enough = value > self.low if self.above_low else value >= self.low
        return is_high_enough and (self.high is None or value <= self.high)

    def check(self, param: str, value: float) -> None:
        """Raise RequestError (400) unless it is."""
        if not self.allow(value):
            message = f"Invalid '{param}': {self.rule}, not {value!s:.40}."
            raise RequestError(message, param=param, code="invalid_value")


@cache
def bounds_of(kind: type[msgspec.Struct]) -> dict[str, Bounds]:
    """Name -> bounds of the fields of a type that are numbers, or null."""
    found = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        is_union = typing.get_origin(hint) in (UnionType, typing.Union)
        for part in typing.get_args(hint) if is_union else (hint,):
            for note in getattr(part, "__metadata__", ()):
                if isinstance(note, Bounds):
                    found[name] = note
    return found


def check_bounds(part: msgspec.Struct) -> None:
    """Raise RequestError (400), which names the field, for a number that is out of its bounds; of parts' parts too."""
    for name, bounds in bounds_of(type(part)).items():
        value = getattr(part, name)
        if value is not None:
            bounds.check(name, value)
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, msgspec.Struct):
            check_bounds(value)
