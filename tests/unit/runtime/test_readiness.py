from __future__ import annotations

from tokservice.runtime.children import Child
from tokservice.runtime.config import RuntimeConfig
from tokservice.runtime.readiness import why_not_ready
from tokservice.wire.messages import WIRE_VERSION, EngineLimits, Hello, Role

SETTINGS = RuntimeConfig()


def engine() -> Child:
    return Child(Role.ENGINE, 0, incarnation=1, last_beat_s=100.0)


def test_a_long_start_says_what_it_is_busy_with() -> None:
    """The first start compiles for half a minute, large models load for minutes: all that was said was "starting"."""
    child = engine()
    assert why_not_ready([child], 0, SETTINGS, 100.0) == "engine 0 is starting"
    child.doing = "loading weights: 40 %"
    assert why_not_ready([child], 0, SETTINGS, 100.0) == "engine 0 is starting: loading weights: 40 %"


def test_a_crash_loop_says_how_it_ended() -> None:
    child = engine()
    child.last_end = "killed by signal 9"
    for _ in range(5):
        child.restarts.pause_after_death_s(did_work=False)
    assert why_not_ready([child], 0, SETTINGS, 100.0) == "engine 0 keeps ending: killed by signal 9"


def test_the_reasons_of_the_living() -> None:
    child = engine()
    child.hello = Hello("engine.0.1", Role.ENGINE, WIRE_VERSION, 1, limits=EngineLimits())
    assert why_not_ready([child], 0, SETTINGS, 100.0) == ""
    assert why_not_ready([child], 1, SETTINGS, 100.0) == "engine 0 is getting to know the others"
    late_s = 101.0 + SETTINGS.busy_stall_timeout_s
    assert why_not_ready([child], 0, SETTINGS, late_s) == "engine 0 has stalled"
