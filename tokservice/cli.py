"""The command ``tokservice``: resolve the configuration, check what can be checked, hand over to the supervisor."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import setproctitle

import tokservice
from tokservice.models.resolve import resolve_model, served_name
from tokservice.protocol.api_pages import api_pages
from tokservice.runtime.config import ApiConfig, Config, resolve
from tokservice.runtime.logs import set_up_logging
from tokservice.runtime.process import EXIT_CANNOT_START
from tokservice.runtime.run_dir import run_directory
from tokservice.runtime.supervisor import Supervisor
from tokservice.runtime.tls import server_context
from tokservice.wire.errors import ConfigError, StartupError

API_KEY_VARIABLE = "TOKSERVICE_API_KEY"
API_KEYS_FOR_CHILD = "TOKSERVICE_API_KEYS"


def _origins(text: str) -> Any:
    """A JSON list, or one origin as it is; ``ApiConfig`` checks them."""
    if not text.startswith("["):
        return [text]
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list: {error}") from error


# The usual flags: the configuration keys that they set, and how the help shows them.
FLAGS: dict[str, tuple[str, Callable[[str], Any], str, str]] = {
    "--model": ("model.path", str, "PATH_OR_ID", "a folder, a Hub id, or the default model's name"),
    "--served-model-name": ("model.served_name", str, "NAME", "name of the model in the API"),
    "--max-model-len": ("model.max_model_len", int, "N", "prompt and output tokens of one sequence"),
    "--dtype": ("model.dtype", str, "DTYPE", "auto, float32, bfloat16 or float16"),
    "--chat-template": ("model.chat_template", str, "FILE", "a Jinja file that replaces the model's own"),
    "--host": ("api.host", str, "HOST", f"address to listen on; default: {ApiConfig().host}"),
    "--port": ("api.port", int, "PORT", f"port to listen on; default: {ApiConfig().port}; 0 takes a free one"),
    "--ssl-certfile": ("api.ssl_certfile", str, "FILE", "PEM certificate: serve HTTPS"),
    "--ssl-keyfile": ("api.ssl_keyfile", str, "FILE", "its PEM key"),
    "--ssl-ca-certs": (
        "api.ssl_ca_certs",
        str,
        "FILE",
        "PEM authorities, which must have signed clients' certificates",
    ),
    "--allowed-origins": ("api.allowed_origins", _origins, "ORIGINS", "web pages that may call: * or a JSON list"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the ``tokservice`` command. Returns the exit code: 0 clean, 3 cannot start."""
    _make_streams_safe()
    arguments = _parser().parse_args(argv)
    setproctitle.setproctitle("tokservice: launcher")  # it finds no room once a key has left the environment
    try:
        config = _resolve(arguments)
        keys = _api_keys(arguments)
        _check_template(config.model.chat_template)
        if config.api.ssl_certfile:
            server_context(config.api)
    except (ConfigError, StartupError) as error:
        print(f"tokservice: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the supervisor takes over
    set_up_logging("launcher", config.runtime.log_level)
    try:
        port_guard, config = _reserve_port(config)
        with closing(port_guard), run_directory(config.runtime.run_dir) as run_dir:
            config = _with_model(config)
            environment = {API_KEYS_FOR_CHILD: " ".join(keys)} if keys else {}
            supervisor = Supervisor(config, run_dir, environment, api_pages(tokservice.__version__))
            return supervisor.run(lambda supervisor: _print_banner(config, supervisor, needs_key=bool(keys)))
    except (ConfigError, StartupError) as error:
        print(f"tokservice: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    except KeyboardInterrupt:
        return 0


def _make_streams_safe() -> None:
    """Whatever started us: no other file gets the numbers of the standard streams, and a terminal that lacks some
    letters, as those of a model's name, ends nothing.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it is closed
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokservice", description=tokservice.__doc__)
    parser.add_argument("--version", action="version", version=f"tokservice {tokservice.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="start every process and serve the OpenAI API")
    serve.add_argument("--config", type=Path, metavar="FILE", help="a TOML file like configs/default.toml")
    serve.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting of configs/default.toml; once for each",
    )
    serve.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="clients need one of the keys in this file, one on each line"
    )
    serve.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"the same, seen by all in the process list; or {API_KEY_VARIABLE}",
    )
    for flag, (key, kind, metavar, text) in FLAGS.items():
        serve.add_argument(flag, dest=key, type=kind, metavar=metavar, help=text)
    return parser


def _resolve(arguments: argparse.Namespace) -> Config:
    given: dict[str, Any] = {key: value for key, *_ in FLAGS.values() if (value := getattr(arguments, key)) is not None}
    return resolve(arguments.config, arguments.settings, given)


def _api_keys(arguments: argparse.Namespace) -> list[str]:
    """Keys from everywhere. They never enter the configuration; only the API processes get them. Raises ConfigError."""
    variable = os.environ.pop(API_KEY_VARIABLE, None)
    if variable is not None and not variable.split():
        raise ConfigError(f"{API_KEY_VARIABLE} is set, but holds no key: unset it to serve everybody")
    keys = [*arguments.api_key, *(variable or "").split()]
    if arguments.api_key_file is not None:
        try:
            keys += arguments.api_key_file.read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file: cannot read {arguments.api_key_file}: {error}") from error
        if not keys:
            raise ConfigError(f"--api-key-file: {arguments.api_key_file} holds no key")
    if any(not key.isascii() or not key.isprintable() or key.split() != [key] for key in keys):
        raise ConfigError("an API key must consist of printable ASCII characters without blanks")
    return keys


def _check_template(file: str) -> None:
    """The workers read it; whether they can is known before they are started. Raises ConfigError."""
    if file:
        try:
            Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.chat_template: cannot read {file}: {error}") from error


def _reserve_port(config: Config) -> tuple[socket.socket, Config]:
    """Find out first whether the port is free, and keep it: a bound socket that does not listen.

    The API processes bind it too (SO_REUSEPORT); no child inherits this one. Raises StartupError.
    """
    host, port = config.api.host, config.api.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            port = probe.getsockname()[1]
        guard = socket.socket(family)
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        guard.bind((host, port))
    except (OSError, OverflowError) as error:
        raise StartupError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', error)}") from error
    return guard, dataclasses.replace(config, api=dataclasses.replace(config.api, port=port))


def _with_model(config: Config) -> Config:
    """The model on this machine, under the name that the API gives it."""
    model = config.model
    name = served_name(model.path, model.served_name)
    path = str(resolve_model(model.path))
    return dataclasses.replace(config, model=dataclasses.replace(model, path=path, served_name=name))


def _print_banner(config: Config, supervisor: Supervisor, *, needs_key: bool) -> None:
    host = f"[{config.api.host}]" if ":" in config.api.host else config.api.host
    url = f"{'https' if config.api.ssl_certfile else 'http'}://{host}:{config.api.port}"
    request = {"model": config.model.served_name, "messages": [{"role": "user", "content": "Hello!"}]}
    body = shlex.quote(json.dumps(request, ensure_ascii=False))
    lines = [f"\ntokservice {tokservice.__version__} is ready at {url}   (model {config.model.served_name})\n"]
    lines += [f"  {'launcher':<12}    pid {os.getpid()}"]
    lines += [
        f"  {child.role.label:<12} {child.slot}  pid {child.process.pid}"
        for child in supervisor.children
        if child.process is not None
    ]
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    lines += [f"\n  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n    -d {body}\n"]
    try:
        print("\n".join(lines), flush=True)
    except OSError:  # whoever read it has gone, as after "| head"; its buffer must find an end, or the exit would fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
