"""Parent of all processes: starts them, waits until they are ready, watches, restarts, stops them in order.

The launcher's own process runs it; no request passes through. It tells everyone who lives (topology), collects
heartbeats, and pushes the pages that need no request to the API processes (readiness, models, metrics).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

import tokservice
from tokservice.runtime.children import Child, slots
from tokservice.runtime.config import Config, save
from tokservice.runtime.logs import LogRelay
from tokservice.runtime.metrics import Metrics, MetricsPage
from tokservice.runtime.model_pages import model_pages
from tokservice.runtime.orders import Orders
from tokservice.runtime.process import CONFIG_FILE
from tokservice.runtime.readiness import why_not_ready
from tokservice.runtime.transport import SUPERVISOR, Transport
from tokservice.wire.channels import listen_router
from tokservice.wire.errors import PeerLost, StartupError
from tokservice.wire.messages import (
    WIRE_VERSION,
    Heartbeat,
    Hello,
    Message,
    Peer,
    Publish,
    Role,
    Stop,
    Topology,
)

TICK_MS = 100
LONG_TURN_S = 1.0  # from one look at the children to the next: this process was stopped, and perhaps all were
EXIT_TIMEOUT_S = 5.0  # for a process that was told to stop; then it is killed
PAGE_MAX_AGE_S = 5.0
WORKERS = (Role.TOKENIZER, Role.DETOKENIZER, Role.ENGINE)
STOP_ORDER = (Role.TOKENIZER, Role.ENGINE, Role.DETOKENIZER, Role.ROUTER, Role.API)
JSON = "application/json"
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger(__name__)


class Forced(Exception):
    """A second signal came while stopping."""


class Supervisor:
    """See the module's docstring. ``run`` is called once."""

    def __init__(
        self, config: Config, run_dir: Path, api_environment: dict[str, str], fixed_pages: Sequence[Publish] = ()
    ) -> None:
        """``fixed_pages``: what the API processes serve unchanged beside the pages that are made here."""
        self._config = config
        self._run_dir = run_dir
        self._api_environment = api_environment
        self._fixed_pages = fixed_pages
        self.children = [Child(role, slot) for role, slot in slots(config)]
        self._by_identity: dict[str, Child] = {}
        transport = Transport(config.runtime.transport, run_dir, is_supervisor=True)
        self._context = transport.context
        self._channel = listen_router(self._context, transport.endpoint(SUPERVISOR))
        transport.publish_supervisor(self._channel.endpoint)
        self._relay = LogRelay()
        self._parent_read, self._parent_write = os.pipe()  # its end tells the children that we are gone
        self._signal_read, self._signal_write = os.pipe()
        self._poller = zmq.Poller()
        self._poller.register(self._channel.socket, zmq.POLLIN)
        self._poller.register(self._signal_read, zmq.POLLIN)
        self._orders = Orders()
        self._to_restart: deque[Child] = deque()
        self._leaving: tuple[Child, int, float] | None = None  # with its incarnation, and since when
        self._topology_version = 0
        self._phase = "starting"
        self._metrics = Metrics()
        self._page = MetricsPage()
        self._next_publish_s = 0.0
        self._turn_s = 0.0  # when the children were last looked at

    def run(self, on_ready: Callable[[Supervisor], None]) -> int:
        """Serve until a signal; returns the exit code. Raises StartupError where a process cannot start."""
        save(self._config, self._run_dir / CONFIG_FILE)
        with self._orders.heard(self._signal_write):
            try:
                for child in self.children:
                    self._start(child)
                if not self._pump(self._everyone_is_ready, self._config.runtime.start_timeout_s):
                    waiting = ", ".join(child.identity for child in self.children if child.hello is None)
                    limit_s = self._config.runtime.start_timeout_s
                    raise StartupError(f"not ready within {limit_s:g} s (runtime.start_timeout_s): {waiting}")
                if not self._orders.num_stops:
                    self._phase = "ready"
                    self._publish(time.monotonic())
                    on_ready(self)
                    self._pump(lambda: False)
                self._drain()
                return 0
            except Forced:
                log.warning("second signal: ending all processes at once")
                return 1
            finally:
                self._close()

    # --- the stages of a life

    def _drain(self) -> None:
        self._phase = "draining"
        log.info("draining timeout_s=%g", self._config.runtime.drain_timeout_s)
        self._publish(time.monotonic())
        for child in self._of_role(Role.API) + self._of_role(Role.ROUTER):
            self._send(child, Stop(drain=True))
        self._pump(self._nothing_is_running, self._config.runtime.drain_timeout_s, stop_on_signal=False)
        self._phase = "stopping"
        for role in STOP_ORDER:
            children = [child for child in self._of_role(role) if child.process is not None]
            for child in children:
                if child.hello is None:
                    child.kill()  # it holds nothing yet, and does not listen while it loads
                self._send(child, Stop(drain=False))
            self._pump(
                lambda children=children: all(child.process is None for child in children),  # type: ignore[misc]
                EXIT_TIMEOUT_S,
                stop_on_signal=False,
            )
        log.info("stopped")

    def _close(self) -> None:
        self._phase = "stopping"
        for child in self.children:
            child.kill()
        self._channel.close()
        self._context.destroy(linger=0)
        self._relay.close()
        for descriptor in (self._parent_read, self._parent_write, self._signal_read, self._signal_write):
            os.close(descriptor)

    def _pump(
        self, condition: Callable[[], bool], timeout_s: float | None = None, *, stop_on_signal: bool = True
    ) -> bool:
        """Handle events until a condition holds, a signal comes or the time is over; whether the first two did."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        num_signals = self._orders.num_stops
        self._turn_s = time.monotonic()
        while not condition():
            now_s = time.monotonic()
            if self._orders.num_stops > 1 or (not stop_on_signal and self._orders.num_stops > num_signals):
                raise Forced
            if stop_on_signal and self._orders.num_stops:
                return True
            if deadline_s is not None and now_s >= deadline_s:
                return False
            ready = dict(self._poller.poll(TICK_MS))
            if self._signal_read in ready:
                os.read(self._signal_read, 4096)
            for sender, message in self._channel.receive():
                self._on_message(sender, message)
            self._flush()
            self._forgive_pause(time.monotonic())
            self._reap(time.monotonic())
            self._roll(time.monotonic())
            if time.monotonic() >= self._next_publish_s:
                self._publish(time.monotonic())
        return True

    # --- children

    def _start(self, child: Child) -> None:
        environment = self._api_environment if child.role is Role.API else {}
        try:
            child.start(self._run_dir, self._parent_read, environment, time.monotonic())
        except OSError as error:  # no memory, no process to be had
            if self._phase == "starting":
                raise StartupError(f"{child.role.label} {child.slot} could not start: {error}") from error
            child.start_at_s = time.monotonic() + child.restarts.pause_after_death_s(did_work=False)
            log.error("process not started identity=%s error=%s", child.identity, error)
            return
        self._by_identity[child.identity] = child
        assert child.process is not None
        assert child.process.stdout is not None
        self._relay.add(child.process.stdout)

    def _forgive_pause(self, now_s: float) -> None:
        """Only time in which they could have been heard counts as their silence."""
        pause_s, self._turn_s = now_s - self._turn_s, now_s
        if pause_s > LONG_TURN_S:
            log.warning("the launcher stood still seconds=%.1f", pause_s)
            for child in self.children:
                child.last_beat_s = min(now_s, child.last_beat_s + pause_s)

    def _reap(self, now_s: float) -> None:
        """Replace the dead, and those that have said nothing for so long that they count as dead."""
        runtime = self._config.runtime
        for child in self.children:
            limit_s = runtime.start_timeout_s if child.hello is None else runtime.hang_timeout_s
            if child.process is not None and now_s - child.last_beat_s > limit_s and self._phase != "starting":
                log.error("no heartbeat: killing it identity=%s seconds=%.0f", child.identity, limit_s)
                child.kill()
        died = [child for child in self.children if child.process is not None and child.process.poll() is not None]
        left = tuple(child.identity for child in died if child.process is not None and not child.process.returncode)
        for child in died:
            self._on_death(child, now_s)
        if died:
            for child in died:
                child.hello = None
            self._announce(left)
        for child in self.children:
            if child.process is None and self._phase in ("ready", "draining") and now_s >= child.start_at_s:
                self._start(child)

    def _roll(self, now_s: float) -> None:
        """After SIGHUP: restart the workers one by one, each once all others are well; no request is lost.

        The API processes stay, and read their certificate again.
        """
        if self._orders.num_rolls:
            self._orders.num_rolls = 0
            for child in self._of_role(Role.API):
                if child.process is not None and child.hello is not None:  # before, the signal would end it
                    child.process.send_signal(signal.SIGHUP)
            log.info("restarting the workers one by one")
            self._to_restart = deque(child for child in self.children if child.role in WORKERS)
        if self._leaving is not None and self._leaving[0].incarnation > self._leaving[1]:
            self._leaving = None
        if self._leaving is not None:
            child, _, since_s = self._leaving
            if now_s - since_s > EXIT_TIMEOUT_S:
                child.kill()
        elif self._to_restart and self._phase == "ready" and self._everyone_is_ready():
            child = self._to_restart.popleft()
            self._leaving = child, child.incarnation, now_s
            if child.process is not None:
                child.process.terminate()

    def _on_death(self, child: Child, now_s: float) -> None:
        del self._by_identity[child.identity]
        self._page.retire(child.identity)
        if self._phase == "starting":
            raise StartupError(f"{child.role.label} {child.slot} could not start: {self._reason(child)}")
        if self._phase != "stopping":
            pause_s = child.restarts.pause_after_death_s(did_work=child.hello is not None and child.progress > 0)
            child.start_at_s = now_s + pause_s
            self._metrics.add("process_restarts_total", role=child.role.label)
            child.last_end = self._reason(child)
            was_told_to = child.process is not None and child.process.returncode == 0
            log.log(
                logging.INFO if was_told_to else logging.WARNING,
                "process ended identity=%s reason=%r restart_in_s=%.1f",
                child.identity,
                child.last_end,
                pause_s,
            )
        for path in self._run_dir.glob(f"{child.identity}.*"):
            if path.is_socket():  # a killed process could not remove it, and its address is never used again
                path.unlink(missing_ok=True)
        child.process = None

    def _reason(self, child: Child) -> str:
        try:
            return (self._run_dir / f"{child.identity}.error").read_text(encoding="utf-8")
        except OSError:
            return child.exit_text()

    def _of_role(self, role: Role) -> list[Child]:
        return [child for child in self.children if child.role is role]

    # --- messages

    def _on_message(self, sender: str, message: Message) -> None:
        child = self._by_identity.get(sender)
        if child is None:
            return  # of a process that has died since
        child.last_beat_s = time.monotonic()
        match message:
            case Hello():
                if message.wire_version != WIRE_VERSION:
                    log.error("wire version differs identity=%s version=%d", sender, message.wire_version)
                    child.kill()
                    return
                child.hello = message
                log.info("ready identity=%s pid=%d", sender, message.pid)
                self._announce()
                if self._phase == "draining" and child.role in (Role.API, Role.ROUTER):
                    self._send(child, Stop(drain=True))  # it was started after the others were told
                if child.role is Role.API:
                    self._publish_models(child)
                    for page in self._fixed_pages:
                        self._send(child, page)
                if child.role is Role.ENGINE:
                    for api in self._of_role(Role.API):
                        self._publish_models(api)
            case Heartbeat():
                child.progress = message.progress
                child.unfinished = message.unfinished
                child.draining = message.draining
                has_news, child.doing = child.doing != message.doing, message.doing
                caught_up = child.topology_version < message.topology_version == self._topology_version
                child.topology_version = message.topology_version
                self._page.update(sender, message.metrics)
                if caught_up or has_news:
                    self._next_publish_s = 0.0

    def _flush(self) -> None:
        """Go on with what a child that had stalled did not take."""
        try:
            self._channel.flush()
        except PeerLost as lost:
            log.debug("not delivered peer=%s", lost)

    def _send(self, child: Child, message: Message) -> None:
        if child.hello is None:
            return
        try:
            self._channel.send(message, child.identity)
        except PeerLost as lost:
            log.debug("not delivered type=%s peer=%s", type(message).__name__, lost)

    def _announce(self, left: tuple[str, ...] = ()) -> None:
        self._topology_version += 1
        peers = tuple(
            Peer(child.identity, child.role, child.hello.endpoints, child.hello.limits)
            for child in self.children
            if child.hello is not None
        )
        for child in self.children:
            self._send(child, Topology(self._topology_version, peers, left))
        self._publish(time.monotonic())  # readiness may have changed with it

    # --- what is known of the whole

    def _everyone_is_ready(self) -> bool:
        return all(
            child.hello is not None and child.topology_version == self._topology_version for child in self.children
        )

    def _nothing_is_running(self) -> bool:
        doors = [child for child in self._of_role(Role.ROUTER) + self._of_role(Role.API) if child.hello is not None]
        return all(child.draining and not child.unfinished for child in doors)

    def _publish(self, now_s: float) -> None:
        self._next_publish_s = now_s + self._config.runtime.heartbeat_s
        self._orders.terminal.is_being_lost(now_s)
        self._metrics.set("malformed_messages_total", self._channel.num_malformed)
        self._page.update(SUPERVISOR, self._metrics.snapshot())
        reason = self._phase
        if self._phase in ("starting", "ready"):
            reason = why_not_ready(self.children, self._topology_version, self._config.runtime, now_s)
        status = {"status": "not ready", "reason": reason} if reason else {"status": "ready"}
        ready = Publish("/ready", 503 if reason else 200, JSON, PAGE_MAX_AGE_S, (json.dumps(status).encode(),))
        metrics = Publish("/metrics", 200, PROMETHEUS_TEXT, PAGE_MAX_AGE_S, (self._page.render(),))
        for api in self._of_role(Role.API):
            self._send(api, ready)
            self._send(api, metrics)

    def _publish_models(self, api: Child) -> None:
        name = self._config.model.served_name
        limits = next((child.hello.limits for child in self._of_role(Role.ENGINE) if child.hello), None)
        created = int(os.stat(self._run_dir / CONFIG_FILE).st_mtime)
        pages = model_pages(name, created, limits.max_model_len if limits else None)
        pages["/version"] = {"version": tokservice.__version__}
        for path, page in pages.items():
            self._send(api, Publish(path, 200, JSON, 0.0, (json.dumps(page).encode(),)))
