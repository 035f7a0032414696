"""Figures for people (a table) and for programs (one JSON line)."""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

NONE = "-"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need to be: the first to the left, the others to the right."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(cells))
        for cells in ((zip(line, widths, strict=True)) for line in lines)
    )


def quantiles(values: Iterable[float], shares: Sequence[float] = (0.5, 0.9, 0.99)) -> dict[str, float]:
    """{'p50': ..., 'max': ...} by nearest rank; empty where there are no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    found = {share_name(share): ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in shares}
    return {**found, "max": ordered[-1]}


def share_name(share: float) -> str:
    """0.999 -> p99.9"""
    return f"p{share * 100:g}"


def ms(seconds: float | None) -> str:
    """A cell: milliseconds, three significant digits."""
    return NONE if seconds is None or math.isnan(seconds) else significant(seconds * 1000)


def significant(value: float) -> str:
    """Three significant digits, no exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def spread(values: Sequence[float]) -> str:
    """A cell of several runs, in milliseconds: median (lowest to highest)."""
    if len(values) == 1:
        return ms(values[0])
    return f"{ms(statistics.median(values))} ({ms(min(values))} to {ms(max(values))})"


def json_line(record: dict[str, Any]) -> str:
    """The record with the date and the kind of machine, on one line, without NaN."""
    where = {"date": time.strftime("%Y-%m-%d"), "machine": platform.machine(), "python": platform.python_version()}
    return json.dumps(_finite({**where, **record}))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
