from __future__ import annotations

import errno
import os

import pytest

from tokservice.runtime.terminal import HANG_UP_S, Terminal


class Tty:
    """What opening /dev/tty says: an error number, or 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        monkeypatch.setattr(os, "open", self._open)
        monkeypatch.setattr(os, "close", lambda descriptor: None)

    def _open(self, path: str, flags: int) -> int:
        assert path == "/dev/tty"
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return 99


@pytest.fixture
def tty(monkeypatch: pytest.MonkeyPatch) -> Tty:
    return Tty(monkeypatch)


def test_a_signal_is_that_of_a_loss_for_a_short_while(tty: Tty) -> None:
    """Closing a terminal restarted all workers and left the server running; an order that comes later is one."""
    terminal = Terminal()
    assert not terminal.is_being_lost(10.0)
    tty.error = errno.EIO
    assert terminal.is_being_lost(11.0)
    assert terminal.is_being_lost(11.0 + HANG_UP_S / 2), "a shell sends another one"
    assert not terminal.is_being_lost(11.0 + HANG_UP_S)


def test_without_a_terminal_every_signal_is_an_order(tty: Tty) -> None:
    tty.error = errno.ENXIO
    assert not Terminal().is_being_lost(0.0)


def test_other_errors_are_no_loss(tty: Tty) -> None:
    """Of a process that has no files left, or of a container without this one."""
    terminal = Terminal()
    for number in (errno.EMFILE, errno.ENOENT):
        tty.error = number
        assert not terminal.is_being_lost(10.0)
