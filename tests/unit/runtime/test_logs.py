"""Log lines leave a process without ever holding it up, and reach the launcher's own standard error."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.wait import wait_for
from tokservice.runtime.logs import LogRelay

ROOT = Path(__file__).parents[3]
PIPE_BYTES = 65536  # that one holds
CHILD = """
import json, logging, os, sys, time
from tokservice.runtime.logs import set_up_logging
set_up_logging("engine.0.1", "info")
log = logging.getLogger("x")
{body}
"""


def _child(body: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(body=body)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_line_names_its_process() -> None:
    child = _child("log.info('ready identity=%s', 'x'); log.debug('not shown')")
    _, lines = child.communicate(timeout=60)
    (line,) = lines.decode().splitlines()
    assert line.split(maxsplit=3)[2:] == ["INFO", "engine.0.1       ready identity=x"]


def test_warnings_and_records_that_cannot_be_formatted_are_lines_too() -> None:
    child = _child("import warnings; warnings.warn('old'); log.error('%d', 'x'); log.info('\\udcff')")
    _, lines = child.communicate(timeout=60)
    text = lines.decode()
    assert "UserWarning: old" in text
    assert "unloggable record" in text
    assert "\\udcff" in text


def test_a_full_pipe_does_not_hold_a_process_up() -> None:
    """A launcher whose terminal blocks used to stop, line by line, every process that logs."""
    child = _child(
        "start = time.monotonic()\n"
        "for _ in range(20_000): log.info('x' * 100)\n"
        "handler = logging.root.handlers[0]\n"
        "print(json.dumps([time.monotonic() - start, handler.num_dropped]), flush=True)"
    )
    assert child.stdout is not None
    assert child.stderr is not None
    seconds, num_dropped = json.loads(child.stdout.readline())  # and nobody reads its standard error
    assert num_dropped > 10_000
    assert seconds < 20
    child.stdout.close()
    kept = child.stderr.read().count(b"\n")
    child.stderr.close()
    assert child.wait() == 0
    assert kept + num_dropped == pytest.approx(20_000, abs=1)  # the last one that fitted may be cut


# --- the launcher's side


@pytest.fixture
def out() -> Iterator[tuple[int, int]]:
    """The launcher's standard error, as a pipe: where to read, where the relay writes."""
    read, write = os.pipe()
    yield read, write
    for descriptor in (read, write):
        try:
            os.close(descriptor)
        except OSError:
            logging.getLogger(__name__).debug("closed by the test")


def _pipe() -> tuple[int, object]:
    read, write = os.pipe()
    return write, os.fdopen(read, "rb")


def test_lines_of_several_children_arrive(out: tuple[int, int]) -> None:
    read, write = out
    relay = LogRelay(write)
    children = [_pipe() for _ in range(3)]
    for _, pipe in children:
        relay.add(pipe)  # type: ignore[arg-type]
    for number, (end, _) in enumerate(children):
        os.write(end, b"line %d\n" % number)
    got = b""
    while got.count(b"\n") < 3:
        got += os.read(read, 1000)
    assert sorted(got.split(b"\n")) == [b"", b"line 0", b"line 1", b"line 2"]
    for end, _ in children:
        os.close(end)
    relay.close()
    assert not relay._thread.is_alive()
    assert all(pipe.closed for _, pipe in children)  # type: ignore[attr-defined]


def test_what_a_child_said_last_is_copied_before_the_end(out: tuple[int, int]) -> None:
    read, write = out
    relay = LogRelay(write)
    end, pipe = _pipe()
    relay.add(pipe)  # type: ignore[arg-type]
    os.write(end, b"cannot start: no such model\n")
    os.close(end)
    relay.close()
    assert os.read(read, 1000) == b"cannot start: no such model\n"


def test_a_standard_error_that_blocks_for_a_while_loses_nothing(out: tuple[int, int]) -> None:
    """The launcher sets its own pipe to non-blocking: a full one ended the relay's thread, and no line of any
    child was ever seen again."""
    read, write = out
    os.set_blocking(write, False)
    relay = LogRelay(write)
    end, pipe = _pipe()
    relay.add(pipe)  # type: ignore[arg-type]
    lines = b"".join(b"%06d\n" % number for number in range(100_000))
    writer = threading.Thread(target=lambda: (_write_all(end, lines), os.close(end)))
    writer.start()
    wait_for(lambda: _waiting_bytes(read) == PIPE_BYTES, what="the terminal is full")
    got = bytearray()
    while len(got) < len(lines):
        got += os.read(read, PIPE_BYTES)
    writer.join()
    relay.close()
    assert bytes(got) == lines


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def test_the_children_are_drained_when_nobody_reads_the_launchers_lines() -> None:
    read, write = os.pipe()
    os.close(read)  # a log collector that has gone
    relay = LogRelay(write)
    end, pipe = _pipe()
    relay.add(pipe)  # type: ignore[arg-type]
    _write_all(end, b"x" * 1_000_000)  # would block for ever
    os.close(end)
    wait_for(lambda: pipe.closed)  # type: ignore[attr-defined]
    relay.close()
    os.close(write)


def test_closing_does_not_wait_for_a_terminal_that_blocks(out: tuple[int, int]) -> None:
    read, write = out
    relay = LogRelay(write)
    end, pipe = _pipe()
    relay.add(pipe)  # type: ignore[arg-type]
    os.write(end, b"x" * PIPE_BYTES)
    wait_for(lambda: _waiting_bytes(read) == PIPE_BYTES, what="the terminal is full")
    os.write(end, b"y" * PIPE_BYTES)
    os.close(end)
    relay.close(timeout_s=0.2)  # it would wait for ever
    assert relay._thread.is_alive()
    got = b""
    while len(got) < 2 * PIPE_BYTES:  # somebody reads again
        got += os.read(read, PIPE_BYTES)
    assert got == b"x" * PIPE_BYTES + b"y" * PIPE_BYTES
    relay.close()
    assert not relay._thread.is_alive()


def _waiting_bytes(descriptor: int) -> int:
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
