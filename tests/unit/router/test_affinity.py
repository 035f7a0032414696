"""Requests of one conversation go to one engine, whose KV cache holds its beginning, unless that is too busy."""

from __future__ import annotations

from collections import Counter

from tests.helpers import router
from tokservice.router.placement import MAX_SURPLUS, Engines, Workers
from tokservice.router.request import Request
from tokservice.wire.messages import Prepare, Route, Submit


def workers(kind: str = "engine", number: int = 4) -> Workers:
    it = Engines() if kind == "engine" else Workers()
    for slot in range(number):
        it.greet(f"{kind}.{slot}.1")
    return it


def request(session: str = "") -> Request:
    return Request("r", "api.0.1", 1, 0.0, session)


def test_a_conversation_stays_and_conversations_spread() -> None:
    it = workers()
    homes = {f"s{number}": it.choose(request(f"s{number}")) for number in range(400)}
    assert all(it.choose(request(session)) == home for session, home in homes.items())
    counts = Counter(homes.values())
    assert len(counts) == 4
    assert min(counts.values()) > 50


def test_it_moves_only_if_its_engine_has_gone() -> None:
    it = workers()
    homes = {f"s{number}": it.choose(request(f"s{number}")) for number in range(100)}
    it.bury("engine.2.1")
    for session, home in homes.items():
        assert (it.choose(request(session)) == home) == (home != "engine.2.1")


def test_a_busy_engine_is_left() -> None:
    """One long conversation with many branches filled one engine while others had nothing to do."""
    it = workers()
    home = it.choose(request("s"))
    for _ in range(MAX_SURPLUS + 1):
        assert it.choose(request("s")) == home
        it.move(request("s"), "", home)
    other = it.choose(request("s"))
    assert other != home
    assert not it.loads[other]


def test_without_a_name_and_for_detokenizers_the_least_busy_is_taken() -> None:
    for kind, one in (("engine", request()), ("detokenizer", request("s"))):
        it = workers(kind)
        for slot in (0, 1, 3):
            it.move(one, "", f"{kind}.{slot}.1")
        assert it.choose(one) == f"{kind}.2.1"


def test_the_name_of_a_request_s_conversation_decides_where_it_goes() -> None:
    """From its Submit on."""
    engines = [f"engine.{slot}.1" for slot in range(1, 6)]
    bench = router.Bench(everyone=(*router.EVERYONE, *engines))
    for number in range(MAX_SURPLUS):
        submit = Submit(f"r{number}", Route.COMPLETIONS, 2, True, "the same", (b"{}",))
        bench.core.submit(router.API, submit, bench.now)
    bench.tick()
    assert len({bench.last(Prepare, f"r{number}").engine for number in range(MAX_SURPLUS)}) == 1
