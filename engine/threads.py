"""How many threads compute for one engine on a CPU. Pure."""

from __future__ import annotations

from tokservice.runtime.config import EngineConfig

SPARE_FROM = 4  # of so many cores, one is left to the processes that move bytes and detokenize


def num_threads(settings: EngineConfig, num_cores: int) -> int:
    """What ``engine.threads`` says, else this engine's share of the cores: engines of one machine do not compete.

    All threads of a step wait for the last of them, so that one which shares its core with the front end delays
    the step for everybody. On two or three cores the engine needs them all the same: it runs at lower priority.
    """
    num_left = num_cores - 1 if num_cores >= SPARE_FROM else num_cores
    threads = settings.threads or max(1, num_left // settings.processes)
    if settings.deterministic:
        threads = 1 << (threads.bit_length() - 1)  # a power of two splits rows at vector boundaries
    return threads
