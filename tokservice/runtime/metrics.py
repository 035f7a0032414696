"""Counters, gauges and histograms: the catalogue, one process's values, and the page over all processes.

Pure: no sockets, no clock. Every process sends its values with its heartbeat; the supervisor adds them up and
renders the page in Prometheus's text format (https://prometheus.io/docs/instrumenting/exposition_formats/).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tokservice.wire.messages import Metric

PREFIX = "tokservice_"


def _log_buckets(low: float, high: float, per_decade: int) -> tuple[float, ...]:
    steps = itertools.count()
    bounds = itertools.takewhile(lambda bound: bound <= high * 1.0001, (low * 10 ** (i / per_decade) for i in steps))
    return tuple(float(f"{bound:.4g}") for bound in bounds)


BELOW_A_MINUTE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SECONDS = (*BELOW_A_MINUTE, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)  # a request may take an hour
TOKENS = tuple(float(2**exponent) for exponent in range(21))
LOOP_LAG = _log_buckets(0.0001, 30.0, per_decade=16)  # bounds 15 % apart: quantiles can be read off


@dataclass(frozen=True, slots=True)
class Spec:
    """What a metric is. ``per_process`` metrics carry a ``process`` label; the others are summed."""

    kind: str  # counter, gauge, histogram
    help: str
    buckets: tuple[float, ...] = ()
    per_process: bool = False


CATALOGUE: dict[str, Spec] = {
    # API processes
    "http_requests_total": Spec("counter", "HTTP responses, by status code."),
    "http_connections": Spec("gauge", "Open client connections."),
    "http_unsent_bytes": Spec("gauge", "Bytes of answers that are held until their clients read."),
    "http_slow_readers_total": Spec("counter", "Connections cut off since their client did not read."),
    "event_loop_lag_seconds": Spec(
        "histogram", "How late the heartbeat of an API process's event loop ran.", LOOP_LAG, per_process=True
    ),
    "event_loop_lag_max_seconds": Spec("gauge", "Largest lag since the process started.", per_process=True),
    # router
    "num_requests_unfinished": Spec("gauge", "Requests that are not finished, uploads included."),
    "num_requests_tokenizing": Spec("gauge", "Requests at a tokenizer worker."),
    "num_requests_queued": Spec("gauge", "Requests that wait for a tokenizer worker."),
    "unfinished_bytes": Spec("gauge", "Bytes of bodies and journals that the router holds."),
    "requests_total": Spec("counter", "Finished requests, by outcome."),
    "request_success_total": Spec("counter", "Finished choices, by finish reason."),
    "request_retries_total": Spec("counter", "Further attempts, by reason."),
    "time_to_first_token_seconds": Spec("histogram", "From the request's headers to its first token.", SECONDS),
    "time_per_output_token_seconds": Spec(
        "histogram", "After the first token, for each of a request's longest choice.", SECONDS
    ),
    "e2e_request_latency_seconds": Spec("histogram", "From the request's headers to its last byte.", SECONDS),
    "request_prompt_tokens": Spec("histogram", "Prompt tokens of a request.", TOKENS),
    "prompt_tokens_total": Spec("counter", "Prompt tokens of accepted requests."),
    "generation_tokens_total": Spec("counter", "Output tokens that reached the router."),
    # tokenizer workers
    "tokenize_seconds": Spec("histogram", "Parsing, templating and encoding of one body.", SECONDS),
    "tokenizer_bytes_total": Spec("counter", "Bytes of bodies prepared."),
    "pretokenized_prompts_total": Spec("counter", "Prompts that came as token ids, and were not encoded."),
    "tokenizer_shadow_checks_total": Spec("counter", "Texts whose token ids were compared with the reference."),
    "tokenizer_shadow_mismatches_total": Spec("counter", "Texts whose token ids differed from the reference."),
    # engines
    "num_requests_running": Spec("gauge", "Choices that hold KV cache in the engine."),
    "num_requests_waiting": Spec("gauge", "Choices that wait in the engine."),
    "kv_cache_usage_perc": Spec("gauge", "Share of the KV cache in use, 0 to 1.", per_process=True),
    "num_preemptions_total": Spec("counter", "Choices put back to make room in the KV cache."),
    "prefix_cache_hit_tokens_total": Spec("counter", "Prompt tokens found in the prefix cache."),
    "engine_prompt_tokens_total": Spec("counter", "Prompt tokens prefilled."),
    "engine_generation_tokens_total": Spec("counter", "Tokens sampled."),
    "engine_steps_total": Spec("counter", "Forward passes."),
    # every process
    "malformed_messages_total": Spec("counter", "Messages between processes that were dropped as malformed."),
    "process_cpu_seconds_total": Spec("counter", "CPU time of a process.", per_process=True),
    "process_resident_memory_bytes": Spec("gauge", "Resident memory of a process.", per_process=True),
    "process_restarts_total": Spec("counter", "Processes restarted after they ended, by role."),
}


class Metrics:
    """The values of one process. Labels are given as keyword arguments."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[float]] = {}

    def add(self, name: str, amount: float = 1.0, **labels: object) -> None:
        """Raise a counter."""
        self._slot(name, 1, labels)[0] += amount

    def set(self, name: str, value: float, **labels: object) -> None:
        """Set a gauge, or a counter whose total is kept elsewhere."""
        self._slot(name, 1, labels)[0] = value

    def observe(self, name: str, value: float, **labels: object) -> None:
        """Count a value in a histogram."""
        buckets = CATALOGUE[name].buckets
        slot = self._slot(name, len(buckets) + 2, labels)
        slot[bisect.bisect_left(buckets, value)] += 1
        slot[-1] += value

    def snapshot(self) -> tuple[Metric, ...]:
        """All values so far."""
        return tuple(Metric(name, labels, tuple(values)) for (name, labels), values in self._values.items())

    def _slot(self, name: str, size: int, labels: Mapping[str, object]) -> list[float]:
        text = ",".join(f'{key}="{_escaped(value)}"' for key, value in sorted(labels.items())) if labels else ""
        slot = self._values.get((name, text))
        if slot is None:
            if name not in CATALOGUE:
                raise KeyError(f"metric {name} is not in the catalogue")
            slot = self._values[(name, text)] = [0.0] * size
        return slot


class MetricsPage:
    """The values of all processes, living and dead: counters never fall, the gauges of the dead go."""

    def __init__(self) -> None:
        self._living: dict[str, tuple[Metric, ...]] = {}  # by identity
        self._retired: dict[tuple[str, str], list[float]] = {}

    def update(self, identity: str, metrics: Iterable[Metric]) -> None:
        """Replace the values of a process; what the catalogue does not know in this form is left out."""
        self._living[identity] = tuple(filter(_is_known, metrics))

    def retire(self, identity: str) -> None:
        """Keep what a dead process counted."""
        for metric in self._living.pop(identity, ()):
            if CATALOGUE[metric.name].kind != "gauge":
                _add(self._retired, (metric.name, _labels(metric, identity)), metric.values)

    def render(self) -> bytes:
        """The page."""
        totals = {key: list(values) for key, values in self._retired.items()}
        for identity, metrics in self._living.items():
            for metric in metrics:
                _add(totals, (metric.name, _labels(metric, identity)), metric.values)
        lines: list[str] = []
        for name, spec in CATALOGUE.items():
            series = sorted((labels, values) for (key, labels), values in totals.items() if key == name)
            if series:
                lines += [f"# HELP {PREFIX}{name} {spec.help}", f"# TYPE {PREFIX}{name} {spec.kind}"]
            for labels, values in series:
                lines += _lines(name, spec, labels, values)
        return ("\n".join(lines) + "\n").encode()


def _is_known(metric: Metric) -> bool:
    spec = CATALOGUE.get(metric.name)
    return spec is not None and len(metric.values) == (len(spec.buckets) + 2 if spec.kind == "histogram" else 1)


def _escaped(value: object) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _labels(metric: Metric, identity: str) -> str:
    if not CATALOGUE[metric.name].per_process:
        return metric.labels
    process = f'process="{identity.rpartition(".")[0]}"'
    return f"{metric.labels},{process}" if metric.labels else process


def _add(totals: dict[tuple[str, str], list[float]], key: tuple[str, str], values: tuple[float, ...]) -> None:
    have = totals.get(key)
    totals[key] = list(values) if have is None else [a + b for a, b in zip(have, values, strict=False)]


def _lines(name: str, spec: Spec, labels: str, values: list[float]) -> list[str]:
    if spec.kind != "histogram":
        return [
            f"{PREFIX}{name}{{{labels}}} {_number(values[0])}" if labels else f"{PREFIX}{name} {_number(values[0])}"
        ]
    prefix = f"{labels}," if labels else ""
    counts = list(itertools.accumulate(values[:-1]))
    bounds = [*map(_number, spec.buckets), "+Inf"]
    lines = [
        f'{PREFIX}{name}_bucket{{{prefix}le="{bound}"}} {_number(count)}'
        for bound, count in zip(bounds, counts, strict=True)
    ]
    braces = f"{{{labels}}}" if labels else ""
    return [
        *lines,
        f"{PREFIX}{name}_sum{braces} {_number(values[-1])}",
        f"{PREFIX}{name}_count{braces} {_number(counts[-1])}",
    ]


def _number(value: float) -> str:
    if not math.isfinite(value):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
