"""Counters, gauges, histograms, and the page that Prometheus reads."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokservice.runtime.metrics import CATALOGUE, LOOP_LAG, PREFIX, SECONDS, Metrics, MetricsPage
from tokservice.wire.messages import Metric

LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({PREFIX}[a-z0-9_]+)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")


def parse(page: bytes) -> dict[tuple[str, str], float]:
    """A page in the text format; every line must be in it."""
    text = page.decode()
    assert text.endswith("\n")
    samples: dict[tuple[str, str], float] = {}
    announced = ""
    for line in text.split("\n"):
        if line.startswith("# HELP "):
            announced = line.split()[2]
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name == announced
            assert kind in ("counter", "gauge", "histogram")
        elif line:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1].startswith(announced), "a sample outside its family"
            key = match[1], match[2] or ""
            assert key not in samples, "the same series twice"
            samples[key] = float(match[3])
    return samples


def page_of(*processes: tuple[str, Metrics]) -> dict[tuple[str, str], float]:
    page = MetricsPage()
    for identity, metrics in processes:
        page.update(identity, metrics.snapshot())
    return parse(page.render())


def test_counters_and_gauges_of_all_processes_are_summed() -> None:
    first, second = Metrics(), Metrics()
    first.add("http_requests_total", code=200)
    first.add("http_requests_total", 2, code=200)
    first.add("http_requests_total", code=429)
    second.add("http_requests_total", 5, code=200)
    first.set("http_connections", 7)
    second.set("http_connections", 1)
    first.set("http_connections", 2)
    samples = page_of(("api.0.1", first), ("api.1.1", second))
    assert samples == {
        (PREFIX + "http_requests_total", 'code="200"'): 8,
        (PREFIX + "http_requests_total", 'code="429"'): 1,
        (PREFIX + "http_connections", ""): 3,
    }


def test_some_are_kept_apart_by_process() -> None:
    first, second = Metrics(), Metrics()
    first.set("process_resident_memory_bytes", 10)
    second.set("process_resident_memory_bytes", 20)
    samples = page_of(("api.0.1", first), ("engine.0.3", second))
    assert samples == {
        (PREFIX + "process_resident_memory_bytes", 'process="api.0"'): 10,
        (PREFIX + "process_resident_memory_bytes", 'process="engine.0"'): 20,
    }


@given(st.lists(st.floats(0, 1000), max_size=50), st.sampled_from(["tokenize_seconds", "event_loop_lag_seconds"]))
def test_histograms(values: list[float], name: str) -> None:
    metrics = Metrics()
    for value in values:
        metrics.observe(name, value)
    samples = page_of(("api.0.1", metrics))
    if not values:
        assert not samples
        return
    buckets = {
        float(match[1]): count
        for (series, labels), count in samples.items()
        if series.endswith("_bucket") and (match := re.search(r'le="([^"]+)"', labels))
    }
    counts = [buckets[bound] for bound in sorted(buckets)]
    assert counts == sorted(counts), "cumulative"
    assert counts[-1] == buckets[math.inf] == len(values)
    assert all(count == sum(value <= bound for value in values) for bound, count in buckets.items())
    assert next(count for (series, _), count in samples.items() if series.endswith("_count")) == len(values)
    total = next(count for (series, _), count in samples.items() if series.endswith("_sum"))
    assert total == pytest.approx(sum(values))


@given(st.text(max_size=20))
def test_any_label_can_be_written(text: str) -> None:
    metrics = Metrics()
    metrics.add("requests_total", outcome=text)
    ((_, labels),) = page_of(("router.0.1", metrics))
    match = re.fullmatch(r'outcome="(.*)"', labels, re.DOTALL)
    assert match
    assert re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), match[1]) == text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -0.0, 0.1, 1e15, 12345678901234.0])
def test_any_number_can_be_written(value: float) -> None:
    metrics = Metrics()
    metrics.set("http_connections", value)
    (got,) = page_of(("api.0.1", metrics)).values()
    assert got == pytest.approx(value, nan_ok=True)


def test_counters_never_fall_and_the_gauges_of_the_dead_go() -> None:
    page = MetricsPage()
    total = 0
    seen = 0.0
    for incarnation in range(1, 5):
        metrics = Metrics()
        for step in range(1, 4):
            metrics.add("http_requests_total", code=200)
            metrics.observe("event_loop_lag_seconds", 0.001)
            metrics.set("http_connections", step)
            total += 1
            page.update(f"api.0.{incarnation}", metrics.snapshot())
            samples = parse(page.render())
            assert samples[PREFIX + "http_requests_total", 'code="200"'] == total
            assert samples[PREFIX + "event_loop_lag_seconds_count", 'process="api.0"'] == total
            assert samples[PREFIX + "http_connections", ""] == step
        page.retire(f"api.0.{incarnation}")
        samples = parse(page.render())
        assert (PREFIX + "http_connections", "") not in samples
        assert samples[PREFIX + "http_requests_total", 'code="200"'] >= seen
        seen = samples[PREFIX + "http_requests_total", 'code="200"']
    page.retire("api.0.9")  # of which nothing is known


def test_the_snapshot_is_of_its_moment() -> None:
    metrics = Metrics()
    metrics.add("engine_steps_total")
    snapshot = metrics.snapshot()
    metrics.add("engine_steps_total")
    assert snapshot == (Metric("engine_steps_total", "", (1.0,)),)


@pytest.mark.parametrize(
    "metric",
    [
        Metric("no_such_metric", "", (1.0,)),
        Metric("http_connections", "", ()),
        Metric("http_connections", "", (1.0, 2.0)),
        Metric("tokenize_seconds", "", (1.0,)),
        Metric("tokenize_seconds", "", (1.0,) * (len(SECONDS) + 3)),
    ],
)
def test_what_the_catalogue_does_not_know_is_left_out(metric: Metric) -> None:
    """A histogram of the wrong size ended the launcher, and with it everything."""
    page = MetricsPage()
    page.update("api.0.1", [metric, Metric("engine_steps_total", "", (3.0,))])
    assert parse(page.render()) == {(PREFIX + "engine_steps_total", ""): 3}
    page.retire("api.0.1")
    assert parse(page.render()) == {(PREFIX + "engine_steps_total", ""): 3}


def test_a_name_outside_the_catalogue_is_a_fault_of_ours() -> None:
    with pytest.raises(KeyError, match="not in the catalogue"):
        Metrics().add("request_total")


@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue(name: str) -> None:
    spec = CATALOGUE[name]
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
    assert spec.kind in ("counter", "gauge", "histogram")
    assert (spec.kind == "counter") == name.endswith("_total")
    assert spec.help.endswith(".")
    assert bool(spec.buckets) == (spec.kind == "histogram")
    assert list(spec.buckets) == sorted(set(spec.buckets))


def test_quantiles_of_the_lag_can_be_read_off() -> None:
    ratios = [high / low for low, high in itertools.pairwise(LOOP_LAG)]
    assert max(ratios) < 1.16
    assert LOOP_LAG[0] <= 0.0001
    assert LOOP_LAG[-1] > 25
