"""A bar on a terminal, a handful of log lines elsewhere."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from tokservice.models.progress import Progress


def _lines(caplog: pytest.LogCaptureFixture, steps: list[int], total: int) -> list[str]:
    with caplog.at_level(logging.INFO), Progress("convert", total, "tensor") as progress:
        for done in steps:
            progress.move_to(done)
    return [record.getMessage() for record in caplog.records]


def test_without_a_terminal_a_thousand_steps_are_five_lines(caplog: pytest.LogCaptureFixture) -> None:
    lines = _lines(caplog, list(range(1001)), 1000)
    assert lines == ["convert: started", *(f"convert: {percent} %" for percent in (25, 50, 75, 100))]


def test_one_leap_is_one_line_and_counts_stay_in_range(caplog: pytest.LogCaptureFixture) -> None:
    assert _lines(caplog, [60, 10, 500], 100) == ["convert: started", "convert: 60 %", "convert: 100 %"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_is_drawn_and_nothing_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert _lines(caplog, [30, 100], 100) == []
    assert "convert: 100%" in terminal.getvalue()
    assert "100/100" in terminal.getvalue()
