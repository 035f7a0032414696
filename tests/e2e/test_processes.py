"""What the started processes are, and what they have not loaded."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.helpers.server import Server

HEAVY = ("torch", "tokenizers", "fastokens", "jinja2", "msgspec", "orjson", "pydantic", "numpy")
BEFORE = {"api": HEAVY, "router": HEAVY, "detokenizer": ("torch", "tokenizers", "jinja2"), "tokenizer": ("torch",)}


def loaded_libraries(pid: int) -> str:
    """Paths of all files that a process has mapped or could have imported compiled code from."""
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("role", BEFORE)
def test_a_process_loads_nothing_that_is_not_its_business(simulated: Server, role: str) -> None:
    """The loop's process computes nothing: what could compute is not even in its memory."""
    maps = loaded_libraries(simulated.pid(role))
    assert "uvloop" in maps or role != "api"
    for package in BEFORE[role]:
        assert not re.search(rf"site-packages/{package}[/.]", maps), f"{role} has loaded {package}"


def test_every_process_names_its_role(simulated: Server) -> None:
    roles = {("router", 0), ("api", 0), ("engine", 0), ("tokenizer", 0), ("tokenizer", 1), ("detokenizer", 0)}
    assert set(simulated.pids()) == roles


def test_who_computes_gives_way_to_who_moves_bytes(simulated: Server) -> None:
    """Nice values, and one session for all: across sessions the scheduler would ignore them."""
    pids = simulated.pids()
    nice = {role: psutil.Process(pid).nice() for (role, _), pid in pids.items()}
    assert nice == {"api": 0, "router": 0, "detokenizer": 3, "tokenizer": 5, "engine": 10}
    stat = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids.values()]
    assert len({fields[3] for fields in stat}) == 1, "one session"
    assert len({fields[2] for fields in stat}) == len(pids), "a process group each, out of Ctrl-C's reach"
