"""The picture of a run of ``bench_front_end.py``: panels of the sections that it ran. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _front import Record, medians
from _front_lag import FLOOD, IN_PROCESS, QUIET

_COLUMNS = 3
_LEAST_MS = 0.05  # finer differences say nothing
_LEAST = 1e-4  # share of values above, down to which tails are drawn


def draw(record: Record, path: Path) -> None:
    """Write a PNG. Raises ImportError where matplotlib is absent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        (panel, found)
        for name, found in record["sections"].items()
        for panel in _PANELS.get(name, ())
        if "error" not in found
    ]
    if not panels:
        return
    num_rows = -(-len(panels) // _COLUMNS)
    size = (6 * _COLUMNS, 4.5 * num_rows)
    figure, axes = pyplot.subplots(num_rows, _COLUMNS, figsize=size, squeeze=False, layout="constrained")
    for axis, (panel, found) in zip(axes.flat, panels, strict=False):
        panel(axis, found)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.suptitle(f"tokservice's front end with the simulated engine; tokenizer {record['tokenizer']}")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


# --- latency curves: the share of values above x --------------------------------------------------------------


def _lag(axis: Any, found: Record) -> None:
    for how, one in found["in_process"].items():
        _tail(axis, one["lag"], IN_PROCESS[how], linestyle=":")
    _whole(axis, found, "lag")
    _finish_tail(axis, "lag of the heartbeat", "share of beats later than x")
    axis.set(xlim=(_LEAST_MS, None))


def _health(axis: Any, found: Record) -> None:
    _whole(axis, found, "health")
    _finish_tail(axis, "GET /health from outside", "share of answers later than x")


def _gap(axis: Any, found: Record) -> None:
    _whole(axis, found, "gap")
    axis.axvline(60, color="black", linewidth=0.8, linestyle=":")
    _finish_tail(axis, "gap between the events of a stream (20 ms a token)", "share of gaps longer than x")


def _short(axis: Any, found: Record) -> None:
    for number, (backend, rows) in enumerate(found["backends"].items()):
        for style, (name, row) in zip(("--", "-", "-."), rows.items(), strict=False):
            _tail(axis, row["ttft"], f"{backend}: {name}", linestyle=style, color=f"C{number}")
    _finish_tail(axis, "TTFT of 100-token prompts", "share of requests later than x")


def _whole(axis: Any, found: Record, key: str) -> None:
    for number, (backend, runs) in enumerate(found["whole"].items()):
        for name, style in ((QUIET, "--"), (FLOOD, "-")):
            curve = medians([window[key] for window in runs[name]])
            _tail(axis, curve, f"tokservice, {backend}: {name}", linestyle=style, color=f"C{number + 3}")


def _tail(axis: Any, curve: dict[str, float], label: str, **style: Any) -> None:
    """Quantiles as the share of values above each; the maximum ends the line."""
    points = [(value * 1000, 1 - float(name[1:]) / 100) for name, value in curve.items() if name != "max"]
    if points:
        points.append((curve["max"] * 1000, max(_LEAST, points[-1][1] / 2)))
        axis.plot(*zip(*points, strict=True), label=label, **style)


def _finish_tail(axis: Any, title: str, y_label: str) -> None:
    axis.set(
        title=title,
        xlabel="ms",
        ylabel=y_label,
        xscale="log",
        yscale="log",
        ylim=(_LEAST / 2, 1.1),
    )
    _finish(axis)


# --- costs ----------------------------------------------------------------------------------------------------


def _hops(axis: Any, found: Record) -> None:
    hops = found["hops_mean_s"]
    _bars(axis, hops, (value * 1000 for value in hops.values()))
    axis.set(title="request to first event: mean of each hop", xlabel="ms")


def _capacity(axis: Any, found: Record) -> None:
    running = [row for row in found["rows"] if row["kind"] == "streams"]
    for number, step_ms in enumerate(dict.fromkeys(row["step_ms"] for row in running)):
        color = f"C{number}"
        rows = [row for row in running if row["step_ms"] == step_ms]
        for role, style in (("api", ":"), ("router", "--"), ("detokenizer", "-.")):
            costs = [row["s_per_token"][role] * 1e6 for row in rows]
            axis.plot([row["streams"] for row in rows], costs, style, color=color, label=f"{role}, {step_ms} ms a step")
        whole = [row["front_s_per_token"] * 1e6 for row in rows]
        axis.plot([row["streams"] for row in rows], whole, "-o", color=color, label=f"all, {step_ms} ms a step")
    axis.set(title="CPU of the front end per output token", xlabel="streams", ylabel="µs", xscale="log", yscale="log")
    _finish(axis)


def _throughput(axis: Any, found: Record) -> None:
    pool = {f"{row['backend']}, {row['workers']} workers, {row['prompts']}": row for row in found["pool"]}
    rows = {**{f"{name}, alone": row for name, row in found["alone"].items()}, **pool}
    _bars(axis, rows, (row["bytes_per_s"] / 1e6 for row in rows.values()))
    axis.set(title="prompts through the tokenizers", xlabel="MB/s", xscale="log")


def _by_length(axis: Any, found: Record) -> None:
    _growth(axis, found["curves"]["length"], "prompt tokens", "whole request", "")


def _by_streams(axis: Any, found: Record) -> None:
    _growth(axis, found["curves"]["streams"], "streams", "until all have begun", " per second")


def _growth(axis: Any, rows: list[Record], x_label: str, wall: str, per: str) -> None:
    sizes = [row["size"] for row in rows]
    axis.plot(sizes, [row["wall_s"] for row in rows], "-o", label=f"{wall}, s")
    axis.plot(sizes, [row["front_cpu_s"] for row in rows], "-o", label=f"CPU of the front end{per}, s")
    _linear(axis, sizes, rows[-1]["front_cpu_s"])
    axis.set(title=f"growth with {x_label}", xlabel=x_label, ylabel="s", xscale="log", yscale="log")
    memory = axis.twinx()
    whole = [row["front_bytes"] / 1e6 for row in rows]
    memory.plot(sizes, whole, "-o", color="C2", label="front end: more memory, MB")
    for role, style in (("tokenizer", "-"), ("api", "--"), ("router", "-."), ("detokenizer", ":")):
        more = [row["bytes"][role] / 1e6 for row in rows]
        memory.plot(sizes, more, linestyle=style, color="C2", alpha=0.5, label=f"{role}: the same")
    _linear(memory, sizes, whole[-1])
    memory.set(ylabel="MB", yscale="log")
    lines = [line for one in (axis, memory) for line in one.get_lines() if not line.get_label().startswith("_")]
    axis.grid(alpha=0.3)
    axis.legend(handles=lines, fontsize=7)


def _linear(axis: Any, sizes: list[int], last: float) -> None:
    values = [last * size / sizes[-1] for size in sizes]
    axis.plot(sizes, values, color="black", linewidth=0.8, alpha=0.5, linestyle="--", label="linear")


def _bars(axis: Any, names: Iterable[str], values: Iterable[float]) -> None:
    for row, (name, value) in enumerate(zip(names, values, strict=True)):
        axis.barh(row, value, color="C0", alpha=0.5)
        axis.text(0.02, row, f"{name}: {value:.3g}", transform=axis.get_yaxis_transform(), verticalalignment="center")
    axis.set(yticks=[])
    axis.invert_yaxis()


def _finish(axis: Any) -> None:
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7)


_PANELS = {
    "lag": (_lag, _health, _gap),
    "short": (_short,),
    "overhead": (_hops,),
    "capacity": (_capacity,),
    "throughput": (_throughput,),
    "growth": (_by_length, _by_streams),
}
