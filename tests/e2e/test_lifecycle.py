"""Starting and ending: what an operator does, and what goes wrong."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.http_client import post_head
from tests.helpers.server import ROOT, SIMULATED, Server, die_with_parent, running_server
from tests.helpers.wait import wait_for
from tokservice.models.default_model import ensure_default_model
from tokservice.runtime.orders import SAME_ORDER_S


def launch(*arguments: str) -> tuple[int, str]:
    """Run a launch that is to fail: exit code, what it printed."""
    command = [sys.executable, str(ROOT / "scripts" / "launch.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    return done.returncode, done.stdout + done.stderr


def refusal(*arguments: str) -> str:
    """The one line that a launch prints which is refused."""
    code, printed = launch(*arguments)
    assert (code, len(printed.splitlines())) == (3, 1), printed
    assert printed.startswith("tokservice: ")
    return printed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_cleanly(small: tuple[str, ...], number: signal.Signals) -> None:
    """A heartbeat that came due in the last moment met a closed socket, and left a traceback."""
    with running_server(*small, "--set", "runtime.heartbeat_s=0.001") as server:
        assert server.stop(number) == 0
        assert "Traceback" not in server.log
        assert not server.run_dir.exists()


@pytest.mark.parametrize("by_nohup", [False, True])
def test_a_closed_terminal_ends_what_runs_in_it(small: tuple[str, ...], tmp_path: Path, by_nohup: bool) -> None:
    """The server ran on without one and kept the port; under nohup(1) all workers were restarted."""
    master, slave = pty.openpty()

    def take_terminal() -> None:
        die_with_parent()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        if by_nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    log = tmp_path / "log"
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "launch.py"), *small, "--port", "0"],
            stdin=slave,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[slave],
            preexec_fn=take_terminal,
        )
    try:
        os.close(slave)
        wait_for(lambda: "is ready at" in log.read_text() or launcher.poll() is not None, what="it is ready")
        os.close(master)
        if by_nohup:
            launcher.terminate()
        assert launcher.wait(60) == 0
        assert "is ready at" in log.read_text()
        assert "restarting the workers" not in log.read_text()
    finally:
        launcher.kill()
        launcher.wait()


def test_a_signal_during_start_is_obeyed(small: tuple[str, ...]) -> None:
    with running_server(*small, ready=False) as server:
        wait_for(server.pids, what="the first child")
        assert server.stop() == 0
        assert "Traceback" not in server.log


def test_sigkill_of_the_launcher_leaves_nothing_behind(small: tuple[str, ...]) -> None:
    """Orphans kept the port or the GPU: vllm#55510, sglang#15165."""
    with running_server(*small) as server:
        port = int(server.url.rpartition(":")[2])
        children = server.process.children(recursive=True)
        # A stopped process cannot watch a pipe: the kernel's signal has to reach it.
        os.kill(server.pid("tokenizer"), signal.SIGSTOP)
        server.process.kill()
        server.process.wait(30)
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
        again = ("--port", str(port), "--set", f"runtime.run_dir={server.run_dir}")
        with running_server(*small, *again) as successor:
            assert successor.http.get("/health").status_code == 200
            assert successor.url == server.url


def test_a_pause_of_the_whole_system_harms_nobody(small: tuple[str, ...]) -> None:
    """After a container was frozen for two minutes the launcher killed everyone: they had said nothing for so long."""
    hang_s = 4.0
    with running_server(*small, "--set", f"runtime.hang_timeout_s={hang_s}") as server:
        pids = server.pids()
        everyone = [server.process.pid, *pids.values()]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        start_s = time.monotonic()
        wait_for(lambda: time.monotonic() > start_s + hang_s + 1, what="they count as hanging")
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        beat = server.gauge("event_loop_lag_seconds_count")
        wait_for(lambda: server.gauge("event_loop_lag_seconds_count") > beat, what="the launcher hears them again")
        server.wait_until_status("/ready", 200)
        assert server.pids() == pids
        assert "no heartbeat" not in server.log


def test_a_port_in_use_is_found_before_anything_loads(tmp_path: Path) -> None:
    """The conflict was found only after the model had loaded: vllm#8204. This one cannot be loaded."""
    (tmp_path / "tokenizer.json").write_text("{ not JSON")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        printed = refusal(*SIMULATED, "--port", str(port), "--model", str(tmp_path))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in printed


def test_two_servers_never_share_a_port(simulated: Server) -> None:
    assert "Address already in use" in refusal(*SIMULATED, "--port", simulated.url.rpartition(":")[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/no/such/folder"), "model.path: '/no/such/folder' is neither an existing folder"),
        (("--set", "api.prot=1"), "unknown key api.prot"),
        (("--set", "nonsense"), "nonsense: expected section.key=value"),
        (("--config", "/no/such.toml"), "cannot read /no/such.toml"),
        (("--set", "api.port=many"), "api.port: expected int, got 'many'"),
        (("--chat-template", "/no/such.jinja"), "model.chat_template: cannot read /no/such.jinja"),
        (("--allowed-origins", "chat.example"), "'chat.example' is not an origin as browsers name it"),
    ],
)
def test_a_bad_setting_is_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(*arguments)


def test_an_unreadable_tokenizer_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    """A worker died in its constructor, and the server answered 503 for ten minutes: sglang#21471."""
    (tmp_path / "tokenizer.json").write_text("{ not JSON")
    code, printed = launch(*SIMULATED, "--port", "0", "--model", str(tmp_path))
    last = printed.splitlines()[-1]
    assert code == 3
    assert last.startswith("tokservice: ")
    assert "tokenizer.json" in last
    assert "Traceback" not in printed


def test_a_model_without_weights_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    shutil.copy(ensure_default_model() / "tokenizer.json", tmp_path)
    code, printed = launch("--port", "0", "--model", str(tmp_path))
    assert code == 3
    assert "engine 0 could not start" in printed.splitlines()[-1]
    assert "config.json" in printed.splitlines()[-1]
    assert "Traceback" not in printed


def test_a_long_temporary_folder_does_not_matter(small: tuple[str, ...], tmp_path: Path) -> None:
    """Socket paths longer than 107 bytes made the start fail with a bare error: LMCache#3529."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    server = Server(*small, "--set", 'runtime.run_dir=""', env={**os.environ, "TMPDIR": str(folder)})
    try:
        server.wait_until_ready()
        assert server.stop() == 0
    finally:
        server.discard()


def refused(server: Server, body: dict[str, object]) -> httpx.Response | None:
    """The answer to one more request where it is 503; one that was still let in waits for the engine, and leaves."""
    with contextlib.suppress(httpx.ReadTimeout):
        answer = server.http.post("/v1/completions", json=body, timeout=2)
        return answer if answer.status_code == 503 else None
    return None


def test_drain_finishes_what_runs_and_refuses_what_is_new(small: tuple[str, ...]) -> None:
    """SIGTERM cut running streams at once: vllm#24885. The engine rests meanwhile, lest the stream ends by itself."""
    with running_server(*small, "--set", "simulated.step_ms=10") as server:
        body = {"prompt": "hello", "max_tokens": 40}
        with server.begun_stream(body) as lines:
            os.kill(server.pid("engine"), signal.SIGSTOP)
            server.process.terminate()
            server.wait_until_status("/ready", 503)
            late = wait_for(lambda: refused(server, body), what="new requests are refused")
            assert late.json()["error"]["code"] == "shutting_down"
            assert late.headers["connection"] == "close"
            os.kill(server.pid("engine"), signal.SIGCONT)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.process.wait(60) == 0


def test_half_sent_bodies_do_not_hold_the_end_up(small: tuple[str, ...]) -> None:
    """A long one held the drain for its thirty seconds; the client of a short one found its connection closed."""
    with running_server(*small, "--set", "runtime.drain_timeout_s=80") as server:
        with server.connect() as long, server.connect() as short:
            long.send(post_head("Content-Length: 200000") + b"{")
            short.send(post_head("Content-Length: 2000") + b"{")
            wait_for(lambda: server.gauge("num_requests_unfinished") == 1, what="the long one has begun")
            server.process.terminate()
            for client in (short, long):
                assert b'"code":"shutting_down"' in client.read_response().body
        assert server.process.wait(60) == 0


def test_a_second_signal_forces(small: tuple[str, ...]) -> None:
    with (
        running_server(*small, "--set", "simulated.step_ms=100") as server,
        server.begun_stream({"prompt": "hello", "max_tokens": 10_000}) as lines,
    ):
        server.process.terminate()
        first_s = time.monotonic()
        server.wait_until_status("/ready", 503)
        wait_for(lambda: time.monotonic() > first_s + 2 * SAME_ORDER_S, what="it is not the same order")
        server.process.terminate()
        assert server.process.wait(20) == 1, "the drain would take thirty seconds"
        with pytest.raises(httpx.TransportError):
            list(lines)


def test_one_order_that_comes_twice_does_not_force(small: tuple[str, ...]) -> None:
    """timeout(1) signals its child, then the child's whole group: streams were cut, and the exit code was 1."""
    with running_server(*small, "--set", "simulated.step_ms=10") as server:
        with server.begun_stream({"prompt": "hello", "max_tokens": 100}) as lines:
            server.process.send_signal(signal.SIGTERM)
            server.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(60) == 0


def test_a_drain_past_its_deadline_ends_streams_with_an_error_event(small: tuple[str, ...]) -> None:
    with running_server(*small, "--set", "simulated.step_ms=100", "--set", "runtime.drain_timeout_s=1") as server:
        with server.begun_stream({"prompt": "hello", "max_tokens": 10_000}) as lines:
            server.process.terminate()
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert '"code":"shutting_down"' in rest[-2]
        assert server.process.wait(60) == 0


def test_api_keys_are_nowhere_to_be_seen(small: tuple[str, ...], tmp_path: Path) -> None:
    """Without the variable that held a key, the launcher found no room for its title."""
    keys = tmp_path / "keys"
    keys.write_text("first-secret\nsecond-secret\n")
    environment = {**os.environ, "TOKSERVICE_API_KEY": "third-secret"}
    with running_server(*small, "--api-key-file", str(keys), env=environment) as server:
        assert server.process.cmdline()[0] == "tokservice: launcher"
        assert "-H 'Authorization: Bearer KEY'" in server.log
        body = {"prompt": "hi", "max_tokens": 1}
        without = server.http.post("/v1/completions", json=body)
        assert without.status_code == 401
        assert without.json()["error"]["code"] == "invalid_api_key"
        assert server.http.get("/v1/models", headers={"authorization": "Bearer first-secre"}).status_code == 401
        for key in ("first-secret", "second-secret", "third-secret"):
            authorization = {"authorization": f"Bearer {key}"}
            assert server.http.post("/v1/completions", json=body, headers=authorization).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert server.http.get(path).status_code == 200
        for child in [server.process, *server.process.children(recursive=True)]:
            assert "secret" not in " ".join(child.cmdline())
        assert not any("secret" in path.read_text() for path in server.run_dir.glob("*.json"))
        environments = {
            role: Path(f"/proc/{pid}/environ").read_text() for (role, _), pid in server.pids().items() if role != "api"
        }
        assert not any("secret" in environment for environment in environments.values())
        server.stop()
        assert "secret" not in server.log


@pytest.mark.parametrize(("content", "message"), [("", "holds no key"), ("clé", "printable ASCII")])
def test_a_useless_key_file_is_one_clear_line(tmp_path: Path, content: str, message: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text(content)
    assert message in refusal(*SIMULATED, "--api-key-file", str(keys))


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_test_run_that_is_killed_leaves_no_server_behind(tmp_path: Path) -> None:
    """Each lived on, and took memory and CPU from all later runs."""
    program = (
        "import os, signal; from tests.helpers.server import SIMULATED, Server; server = Server(*SIMULATED);"
        "print(server.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == -signal.SIGKILL, run.stderr

    def has_ended() -> bool:
        try:
            return bool(psutil.Process(int(run.stdout)).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    wait_for(has_ended, what="its server has ended")
