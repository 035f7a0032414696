"""A tokenizer worker: sockets around ``Preparer``. One body at a time; what the router sends ahead waits here."""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from tokservice.runtime.links import PeerLinks, RouterLink
from tokservice.runtime.metrics import Metrics
from tokservice.runtime.process import Process, run_process
from tokservice.runtime.work_mark import WorkMark, encode_mark
from tokservice.tokenizer.prepare import Answer, Prepared, Preparer
from tokservice.wire.channels import shared
from tokservice.wire.codec import encode_part
from tokservice.wire.errors import CLIENT_GONE, PeerLost, RequestError
from tokservice.wire.messages import (
    Abort,
    Accepted,
    Answered,
    Generate,
    Message,
    Prepare,
    Rejected,
    Role,
    Route,
    Topology,
    Undelivered,
)

IDLE_S = 1.0

log = logging.getLogger(__name__)


class Tokenizer:
    """The service that ``Process.run`` drives."""

    def __init__(self, process: Process) -> None:
        model = process.config.model
        self._preparer = Preparer(
            model_dir=Path(model.path),
            model_name=model.served_name,
            chat_template_file=model.chat_template,
            settings=process.config.tokenizer,
            tool_call_parser=model.tool_call_parser,
            reasoning_parser=model.reasoning_parser,
        )
        self._metrics = process.metrics
        self._mark = WorkMark(process.run_dir, process.identity)
        self._inbox: OrderedDict[tuple[str, int], Prepare] = OrderedDict()
        self._num_prepared = 0
        self._has_limits = False
        self._engines = PeerLinks(process, Role.ENGINE)
        self.hello = process.hello(capacity=process.config.tokenizer.capacity)
        self._router = RouterLink(process, lambda: self.hello, self._on_message, self._inbox.clear)

    def on_topology(self, topology: Topology) -> None:
        """See ``Service``. Without an engine's limits nothing can be checked: the router hears of us after that."""
        self._engines.follow(topology)
        engine = next((peer for peer in topology.peers if peer.role == Role.ENGINE), None)
        if engine is not None:
            self._preparer.set_limits(engine.limits)
            self._has_limits = True
        if self._has_limits:
            self._router.follow(topology)

    def turn(self, now: float) -> float:
        """See ``Service``: one body."""
        if not self._inbox:
            return IDLE_S
        _, message = self._inbox.popitem(last=False)
        self._prepare(message)
        self._num_prepared += 1
        return 0.0 if self._inbox else IDLE_S

    def drain(self) -> None:
        """See ``Service``: the router decides what still comes."""

    def report(self, metrics: Metrics) -> tuple[int, int]:
        """See ``Service``."""
        self._preparer.bound_memory()
        return self._num_prepared, len(self._inbox)

    def _on_message(self, message: Message) -> None:
        match message:
            case Prepare():
                self._inbox[message.request_id, message.attempt] = message
            case Abort():
                unwanted = self._inbox.pop((message.request_id, message.attempt), None)
                if unwanted is not None:
                    self._reject(unwanted, CLIENT_GONE)

    def _prepare(self, message: Prepare) -> None:
        start_s = time.perf_counter()
        self._mark.set(encode_mark(message.request_id, message.attempt))
        try:
            result = self._preparer.prepare(Route(message.route), message.frames, time.time())
        except RequestError as error:
            self._reject(message, error)
        else:
            if isinstance(result, Answer):
                self._router.send(Answered(message.request_id, message.attempt, (result.body,)))
            else:
                self._forward(message, result)
        self._mark.clear()
        self._metrics.observe("tokenize_seconds", time.perf_counter() - start_s)
        self._metrics.add("tokenizer_bytes_total", sum(map(len, message.frames)))
        is_equal = self._preparer.shadow_check()
        if is_equal is not None:
            self._metrics.add("tokenizer_shadow_checks_total", 1)
            self._metrics.add("tokenizer_shadow_mismatches_total", 0 if is_equal else 1)

    def _forward(self, message: Prepare, prepared: Prepared) -> None:
        """Tell the router first: it must be able to begin the request again from the moment that the engine has it."""
        self._metrics.add("pretokenized_prompts_total", prepared.num_pretokenized)
        # The ids go to two peers, and can be as large as the body.
        frames = (encode_part(prepared.sampling), prepared.context, *map(shared, prepared.prompts))
        accepted = Accepted(
            request_id=message.request_id,
            attempt=message.attempt,
            stream=prepared.stream,
            num_choices=prepared.num_choices,
            num_prompt_tokens=prepared.num_prompt_tokens,
            frames=frames,
        )
        self._router.send(accepted)
        generate = Generate(
            request_id=message.request_id,
            attempt=message.attempt,
            detokenizer=message.detokenizer,
            num_prompts=len(prepared.prompts),
            frames=frames,
        )
        try:
            self._engines.send(message.engine, generate)
        except PeerLost as lost:
            log.warning("prompt not delivered request_id=%s peer=%s", message.request_id, lost)
            self._router.send(Undelivered((message.request_id,), (message.attempt,)))

    def _reject(self, message: Prepare, error: RequestError) -> None:
        self._router.send(Rejected(message.request_id, message.attempt, error.status, (error.body(message.route),)))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry: ``python -m tokservice.tokenizer.tokenizer_proc --config FILE``."""

    def body(process: Process) -> int:
        tokenizer = Tokenizer(process)
        process.control.send(tokenizer.hello)
        return process.run(tokenizer)

    return run_process(Role.TOKENIZER, argv, body)


if __name__ == "__main__":
    sys.exit(main())
