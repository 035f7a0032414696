"""What clients send is in no log, not even at debug level, and in no file: neither prompts nor keys nor schemas."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.certificates import Certificates
from tests.helpers.server import SIMULATED, Server, running_server

MARK = "Xq7marker"  # no token of any vocabulary, and no part of what a simulated engine writes
KEY = f"key-{MARK}"


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Of all routes, right and wrong, with the mark wherever text can be."""
    prompt, chat = f"Tell me of {MARK}", [{"role": "user", "content": f"Hello {MARK}"}]
    schema = {"type": "object", "properties": {MARK: {"type": "string"}}, "required": [MARK]}
    tool = {"type": "function", "function": {"name": f"f_{MARK}", "description": MARK, "parameters": schema}}
    response_format = {"type": "json_schema", "json_schema": {"name": MARK, "schema": schema}}
    return [
        ("/v1/completions", {"prompt": prompt, "max_tokens": 5, "user": MARK, "stop": [MARK]}),
        ("/v1/completions", {"prompt": prompt, "max_tokens": 5, "stream": True, "echo": True, "bad_words": [MARK]}),
        ("/v1/completions", {"prompt": prompt, "max_tokens": 5, "guided_regex": f"({MARK}"}),
        ("/v1/completions", {"prompt": prompt, "max_tokens": MARK}),
        ("/v1/completions", {"prompt": prompt, MARK: 1}),
        ("/v1/completions", {"prompt": prompt, "model": MARK}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 5, "tools": [tool]}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 5, "response_format": response_format}),
        ("/v1/chat/completions", {"messages": [{"role": MARK, "content": MARK}]}),
        ("/v1/messages", {"model": "x", "messages": chat, "max_tokens": 5, "system": MARK}),
        ("/v1/responses", {"input": f"Say {MARK}", "instructions": MARK, "max_output_tokens": 5}),
        ("/tokenize", {"prompt": prompt}),
        (f"/v1/{MARK}", {}),
        (f"/v1/models/{MARK}?{MARK}={MARK}", {}),
    ]


def exercise(server: Server) -> set[int]:
    """Everything that might be logged: all bodies, bodies that are no JSON, wrong keys, and the death of workers."""
    statuses = set()
    with httpx.Client(base_url=server.url, verify=server.verify, trust_env=False, timeout=90) as http:
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"x-api-key": f"wrong-{MARK}"}):
            for path, body in bodies():
                statuses.add(http.post(path, json=body, headers=headers).status_code)
        key = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        for data in (
            f'{{"prompt": "{MARK}"'.encode(),
            MARK.encode(),
            b"[" * 100 + MARK.encode(),
            b"\xff" + MARK.encode(),
        ):
            statuses.add(http.post("/v1/chat/completions", content=data, headers=key).status_code)
        statuses.add(http.get("/health", headers={"origin": f"https://{MARK}.example", "cookie": MARK}).status_code)
        body = {"prompt": f"More of {MARK}", "max_tokens": 80, "stream": True, "ignore_eos": True}
        for role in ("tokenizer", "detokenizer", "engine"):
            with http.stream("POST", "/v1/completions", json=body, headers=key) as response:
                lines = response.iter_lines()
                next(lines)
                os.kill(server.pid(role), signal.SIGKILL)
                assert "data: [DONE]" in list(lines)
    return statuses


def test_a_mark_in_everything(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    (tmp_path / "keys").write_text(f"{KEY}\n")
    arguments = (
        *SIMULATED, "--set", "runtime.log_level=debug", "--set", "simulated.step_ms=5", "--set", "tokenizer.workers=1",
        "--set", "tokenizer.shadow_check_rate=1.0", "--api-key-file", str(tmp_path / "keys"),
        "--ssl-certfile", str(certificates.server), "--allowed-origins", '["https://chat.example"]',
    )  # fmt: skip
    environment = {**os.environ, "TOKSERVICE_API_KEY": f"another-{MARK}"}
    with running_server(*arguments, env=environment, verify=certificates.client_context()) as server:
        assert exercise(server) >= {200, 400, 401, 404}
        server.wait_until_status("/ready", 200)  # and no file of a dead process is just being removed
        for path in server.run_dir.rglob("*"):
            if path.is_file():
                assert MARK.encode() not in path.read_bytes(), path
        for process in (server.process, *server.process.children(recursive=True)):
            assert MARK not in " ".join(process.cmdline())
        assert MARK not in server.metrics()
        assert server.stop() == 0
        assert "worker connected" in server.log  # it is the log
        lines = [line for line in server.log.splitlines() if MARK.lower() in line.lower()]
        assert not lines, lines
