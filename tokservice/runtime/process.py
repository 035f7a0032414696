"""The common life of every child process: start, follow the topology, beat, stop.

A child is started by the supervisor as a fresh interpreter with its identity and the path of the resolved
configuration. Order: death of the parent armed, title, logging, control channel, then whatever the process is
(``body``), its hello, its loop, close. Exit codes: 0 clean, 1 crash, 3 cannot start (and then the run
directory holds the reason in ``<identity>.error``).
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import logging
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import setproctitle
import zmq

from tokservice.runtime.config import Config, load
from tokservice.runtime.logs import set_up_logging
from tokservice.runtime.memory import resident_bytes
from tokservice.runtime.metrics import Metrics
from tokservice.runtime.time_slice import shorten_time_slice
from tokservice.runtime.transport import SUPERVISOR, Transport
from tokservice.wire.channels import Channel, dealer
from tokservice.wire.errors import ConfigError, PeerLost, StartupError
from tokservice.wire.messages import WIRE_VERSION, EngineLimits, Heartbeat, Hello, Message, Role, Stop, Topology

EXIT_CLEAN = 0
EXIT_CRASH = 1
EXIT_CANNOT_START = 3

CONFIG_FILE = "config.json"
FLUSH_INTERVAL_S = 0.002
LAST_WORDS_S = 1.0  # for the last messages of a process that leaves in peace
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessName:
    """Which process this is. The identity is never reused: a restart raises the incarnation."""

    role: Role
    slot: int
    incarnation: int

    @property
    def identity(self) -> str:
        """Routing id on every channel: ``router.0.1``."""
        return f"{self.role.label}.{self.slot}.{self.incarnation}"


class Service(Protocol):
    """What a process does, driven by ``Process.run``; one thread calls everything."""

    def on_topology(self, topology: Topology) -> None:
        """The set of living processes changed."""

    def turn(self, now: float) -> float:
        """Do what is due. Returns the seconds (monotonic clock) after which it wants to run again."""

    def drain(self) -> None:
        """Refuse what is new, finish what is running."""

    def report(self, metrics: Metrics) -> tuple[int, int]:
        """Bring the gauges up to date. Returns (progress, unfinished requests) for the heartbeat."""


class Process:
    """One child process: its name, configuration, control channel and, for the synchronous ones, its loop."""

    def __init__(self, name: ProcessName, run_dir: Path) -> None:
        self.name = name
        self.identity = name.identity
        self.run_dir = run_dir
        self.config: Config = load(run_dir / CONFIG_FILE)
        self.metrics = Metrics()
        self._transport = Transport(self.config.runtime.transport, run_dir)
        self.context = self._transport.context
        self.control = dealer(self.context, self._transport.supervisor, self.identity, SUPERVISOR)
        self.stopping = False
        self._channels: dict[zmq.Socket[bytes], tuple[Channel, Callable[[str, Message], None]]] = {}
        self._poller = zmq.Poller()
        self._next_beat = 0.0
        self._watched: set[Channel] = set()
        self._num_malformed_before = 0  # on channels that are closed
        self.topology_version = 0
        self.draining = False

    def endpoint(self, purpose: str) -> str:
        """Where to bind a fresh inbox of this incarnation; peers find it at its channel's ``endpoint``."""
        return self._transport.endpoint(f"{self.identity}.{purpose}")

    def add(self, channel: Channel, on_message: Callable[[str, Message], None] | None = None) -> None:
        """Have the loop flush a channel and, unless it only sends, read it."""
        self._channels[channel.socket] = (channel, on_message or _ignore)
        if on_message is not None:
            self._poller.register(channel.socket, zmq.POLLIN)

    def listen(self, channel: Channel, wanted: bool) -> None:
        """Whether the loop reads a channel; what it does not read waits there, and then at the peers."""
        if wanted and channel.socket not in self._poller:
            self._poller.register(channel.socket, zmq.POLLIN)
        elif not wanted and channel.socket in self._poller:
            self._poller.unregister(channel.socket)

    def remove(self, channel: Channel) -> None:
        """Close a channel and forget it."""
        if channel.socket in self._poller:
            self._poller.unregister(channel.socket)
        del self._channels[channel.socket]
        self._num_malformed_before += channel.num_malformed
        channel.close()

    def watch(self, channel: Channel) -> None:
        """Count what is malformed on a channel that somebody else reads."""
        self._watched.add(channel)

    def unwatch(self, channel: Channel) -> None:
        """It is closed."""
        self._watched.discard(channel)
        self._num_malformed_before += channel.num_malformed

    def hello(self, endpoints: tuple[str, ...] = (), capacity: int = 0, limits: EngineLimits | None = None) -> Hello:
        """This process's hello, for the supervisor and the router."""
        return Hello(
            identity=self.identity,
            role=self.name.role,
            wire_version=WIRE_VERSION,
            pid=os.getpid(),
            capacity=capacity,
            endpoints=endpoints,
            limits=limits or EngineLimits(),
        )

    def beat(self, report: Callable[[Metrics], tuple[int, int]]) -> None:
        """Send a heartbeat now; ``report`` is that of ``Service``."""
        progress, unfinished = report(self.metrics)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.metrics.set("process_cpu_seconds_total", usage.ru_utime + usage.ru_stime)
        self.metrics.set("process_resident_memory_bytes", resident_bytes())
        channels = {self.control, *self._watched, *(channel for channel, _ in self._channels.values())}
        malformed = sum(channel.num_malformed for channel in channels)
        self.metrics.set("malformed_messages_total", self._num_malformed_before + malformed)
        self.control.send(
            Heartbeat(progress, unfinished, self.topology_version, self.draining, self.metrics.snapshot())
        )

    def tell(self, doing: str) -> None:
        """Say what a long start is busy with: in the log, and to the supervisor, before this process's hello."""
        log.info("%s", doing)
        self.control.send(Heartbeat(0, 0, 0, False, (), doing))

    def run(self, service: Service, *, reads_per_turn: int = 1) -> int:
        """The loop of a synchronous process, until the supervisor says stop. Control is read first.

        ``reads_per_turn``: above 1 where a turn is so long that all that has arrived should be read before it.
        """
        self.add(self.control, lambda _, message: self._on_control(service, message))
        spare_imports()
        while not self.stopping:
            pause_s = service.turn(time.monotonic())
            now = time.monotonic()
            if now >= self._next_beat:
                self._next_beat = now + self.config.runtime.heartbeat_s
                self.beat(service.report)
            pause_s = min(pause_s, self._next_beat - now)
            if self._flush():
                pause_s = min(pause_s, FLUSH_INTERVAL_S)
            for _ in range(reads_per_turn):
                if self.stopping or not self._read(max(0.0, pause_s)):
                    break
                pause_s = 0.0
        return EXIT_CLEAN

    def close(self, linger_s: float = 0.0) -> None:
        """Close every socket; the last messages have so long to leave."""
        for channel, _ in self._channels.values():
            channel.close(linger_s)
        self.control.close(linger_s)
        self.context.destroy(linger=0)

    def _read(self, timeout_s: float) -> bool:
        """Handle what has arrived, of each channel its share; whether there was anything."""
        # Rounded up: a pause below a millisecond must not become a busy loop.
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        if self.control.socket in ready:
            ready = {self.control.socket: 0, **ready}
        for socket in ready:
            entry = self._channels.get(socket)
            if entry is None:
                continue  # closed by a handler before it in this turn
            channel, on_message = entry
            for sender, message in channel.receive():
                on_message(sender, message)
                if self.stopping or channel.socket.closed:
                    break
        return bool(ready)

    def _flush(self) -> bool:
        unsent = False
        for channel, _ in list(self._channels.values()):
            if channel.has_unsent:
                try:
                    unsent = not channel.flush() or unsent
                except PeerLost as lost:
                    log.warning("peer lost peer=%s", lost)
        return unsent

    def _on_control(self, service: Service, message: Message) -> None:
        match message:
            case Topology() if message.version > self.topology_version:
                self.topology_version = message.version
                service.on_topology(message)
                self.beat(service.report)  # the supervisor waits until everyone knows
            case Stop(drain=True):
                self.draining = True
                service.drain()
                self.beat(service.report)
            case Stop():
                self.stopping = True


def spare_imports() -> None:
    """Before the first request: a full garbage collection over all that was imported would stop everything for 10 ms
    and more."""
    gc.collect()
    gc.freeze()


def run_process(role: Role, argv: Sequence[str] | None, body: Callable[[Process], int]) -> int:
    """Entry of every ``_proc`` file: set up, run ``body``, tear down. Returns the exit code."""
    arguments = _parse(argv)
    name = ProcessName(role, arguments.slot, arguments.incarnation)
    _die_with_parent()
    faulthandler.enable()
    setproctitle.setproctitle(f"tokservice: {role.label} {name.slot}")
    run_dir = arguments.config.parent
    process = Process(name, run_dir)
    set_up_logging(name.identity, process.config.runtime.log_level)
    if role is Role.TOKENIZER:
        os.nice(process.config.tokenizer.nice_of(name.slot))
    elif role is not Role.ENGINE:  # which has to know first whether it computes on the CPU
        os.nice(getattr(process.config, role.label).nice)
        shorten_time_slice()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the supervisor orders stops
    signal.signal(signal.SIGTERM, lambda *_: setattr(process, "stopping", True))
    linger_s = 0.0
    try:
        code = body(process)
        linger_s = LAST_WORDS_S
        return code
    except (ConfigError, StartupError) as error:
        log.error("cannot start: %s", error)
        (run_dir / f"{name.identity}.error").write_text(str(error), encoding="utf-8", errors="backslashreplace")
        return EXIT_CANNOT_START
    except Exception:
        log.exception("crashed")
        return EXIT_CRASH
    finally:
        process.close(linger_s)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A process of tokservice; started by its supervisor.")
    parser.add_argument("--config", type=Path, required=True, help=f"{CONFIG_FILE} in the run directory")
    parser.add_argument("--slot", type=int, default=0)
    parser.add_argument("--incarnation", type=int, default=1)
    return parser.parse_args(argv)


def _die_with_parent() -> None:
    """End when the supervisor does, however it ended.

    The kernel's death signal also reaches a stopped or busy process; the end of the pipe on standard input
    covers the moment before it is armed, and systems that have no such signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(EXIT_CRASH)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _ignore(sender: str, message: Message) -> None:
    """Nothing arrives on a channel that only sends."""
