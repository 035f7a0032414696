"""What the started processes are, and what they have not loaded."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tests.helpers.server import ROOT, SIMULATED, Server, running_server

COMPUTES = {"torch", "tokenizers", "fastokens", "jinja2", "msgspec", "orjson", "pydantic", "numpy"}
MUST_NOT_LOAD = {
    "api.api_proc": COMPUTES,
    "tokservice.router.router_proc": COMPUTES,
    "tokservice.tokenizer.tokenizer_proc": {"torch"},
    "tokservice.detokenizer.detokenizer_proc": {"torch", "tokenizers", "jinja2"},
    "engine.engine_proc": {"torch", "tokenizers", "jinja2", "msgspec"},  # of a simulated engine
}


def test_a_process_loads_nothing_that_is_not_its_business(tmp_path: Path) -> None:
    """The loop's process computes nothing: what could compute is not even in its memory. And each is an interpreter of
    its own: a fork after the tokenizer's threads were used could deadlock (transformers#5486)."""
    path = os.pathsep.join([str(ROOT / "tests/helpers/dump_modules"), os.environ.get("PYTHONPATH", "")])
    with running_server(*SIMULATED, env={**os.environ, "DUMP_MODULES_TO": str(tmp_path), "PYTHONPATH": path}) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        answer = server.http.post("/tokenize", content=b"\xff no JSON", headers={"content-type": "application/json"})
        assert answer.json()["error"]["code"] == "invalid_json"
        assert server.http.get("/v1/models").status_code == 200
        assert server.http.get("/metrics").status_code == 200
        assert server.stop() == 0
    loaded: dict[str, set[str]] = {}
    for dump in tmp_path.iterdir():
        command, *modules = dump.read_text().splitlines()
        for name in MUST_NOT_LOAD:
            if name in command:
                loaded[name] = {module.partition(".")[0] for module in modules}
    assert loaded.keys() == MUST_NOT_LOAD.keys()
    assert "uvloop" in loaded["api.api_proc"]
    for name, forbidden in MUST_NOT_LOAD.items():
        assert not loaded[name] & forbidden, name


def test_every_process_names_its_role(simulated: Server) -> None:
    roles = {("router", 0), ("api", 0), ("engine", 0), ("tokenizer", 0), ("tokenizer", 1), ("detokenizer", 0)}
    assert set(simulated.pids()) == roles


def test_who_computes_gives_way_to_who_moves_bytes(simulated: Server) -> None:
    """Nice values, and one session for all: across sessions the scheduler would ignore them."""
    pids = simulated.pids()
    nice = {f"{role} {slot}": psutil.Process(pid).nice() for (role, slot), pid in pids.items()}
    added = {
        "api 0": 0,
        "router 0": 0,
        "detokenizer 0": 3,
        "tokenizer 0": 5,
        "tokenizer 1": 10,  # which takes the long bodies
        "engine 0": 10,
    }
    assert nice == {name: min(19, os.nice(0) + more) for name, more in added.items()}
    stat = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids.values()]
    assert len({fields[3] for fields in stat}) == 1, "one session"
    assert len({fields[2] for fields in stat}) == len(pids), "a process group each, out of Ctrl-C's reach"
