"""Whatever dies, whenever, and in whatever order the messages come: every request ends once, with the right text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.router import role_of
from tests.helpers.router_world import World
from tokservice.wire.messages import Role

WORKERS = (Role.TOKENIZER, Role.ENGINE, Role.DETOKENIZER)
# Two in company, one beside those that were cleared, one alone; more where tokens between them did arrive, or where
# an old attempt, or one whose acceptance the router had not read, was at work somewhere.
MAX_DEATHS_EACH = 15


def _play(
    world: World,
    *,
    steps: int,
    deaths: float = 0.0,
    leavers: float = 0.01,
    long_waits: float = 0.0,
    max_deaths: int = 99,
    settle: bool = True,
) -> None:
    for _ in range(steps):
        what = world.rng.random()
        if what < 0.05:
            world.submit()
        elif what < 0.05 + leavers:
            world.client_leaves()
        elif what < 0.05 + leavers + deaths:
            if world.workers and sum(world.deaths.values()) < max_deaths:
                world.kill(world.rng.choice(list(world.workers)))
        elif what < 0.05 + leavers + deaths + long_waits:
            world.wait_long()
        else:
            world.act()
    if settle:
        world.settle()
        world.check()


SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS)
def test_without_deaths(seed: int) -> None:
    world = World(seed)
    _play(world, steps=600)
    assert not any(b'"error"' in data for client in world.clients.values() for _, _, data in client.rows)


@given(SEEDS)
@settings(max_examples=200)
def test_one_death_is_never_seen(seed: int) -> None:
    _play(World(seed), steps=400, deaths=0.02, max_deaths=1)


@given(SEEDS)
@settings(max_examples=200)
def test_many_deaths(seed: int) -> None:
    _play(World(seed), steps=800, deaths=0.02, leavers=0.02)


@given(SEEDS)
def test_stalls_and_deaths(seed: int) -> None:
    _play(World(seed), steps=600, deaths=0.01, long_waits=0.01)


@given(SEEDS)
def test_all_of_a_kind_die_at_once(seed: int) -> None:
    world = World(seed)
    for role in (*WORKERS, Role.API):
        _play(world, steps=150)
        for identity in [name for name in world.workers if name.startswith(role.label)]:
            world.kill(identity)
        _play(world, steps=150)


@given(SEEDS)
def test_a_rolling_restart_is_never_seen(seed: int) -> None:
    """Workers leave one by one, each once its forerunner is replaced."""
    world = World(seed)
    for identity in [name for name in world.workers if role_of(name) in WORKERS]:
        _play(world, steps=100, settle=False)
        world.leave(identity)
        while world.unnoticed or world.to_start:
            world.act()
    world.settle()
    world.check()
    assert not any(b'"error"' in data for client in world.clients.values() for _, _, data in client.rows)


@given(SEEDS, st.sampled_from((0.05, 0.3)))
@settings(max_examples=200)
def test_poison_fails_alone(seed: int, share: float) -> None:
    """A request that kills its engine or detokenizer at one of its tokens took its batch-mates with it: three deaths
    were counted for all of them."""
    world = World(seed, share_of_poison=share)
    _play(world, steps=600, leavers=0.005)
    num_deaths = world.deaths[Role.ENGINE] + world.deaths[Role.DETOKENIZER]
    assert num_deaths <= MAX_DEATHS_EACH * world.num_poisoned


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(SEEDS)
@settings(max_examples=1000)
def test_many_deaths_for_long(seed: int) -> None:
    _play(World(seed), steps=3000, deaths=0.01, leavers=0.02, long_waits=0.002)
