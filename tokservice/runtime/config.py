"""The configuration of a deployment: frozen dataclasses, one for each section of the TOML file.

The launcher resolves it once (defaults, then the file, then ``--set section.key=value`` and the usual flags),
writes it into the run directory, and every process reads that file; nobody changes it afterwards. Unknown
keys and values of the wrong type are errors. API keys never enter it (see ``api/api_proc.py``).

The field comments are the reference for users: ``configs/default.toml`` repeats these defaults, and a test
holds the two together.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokservice.wire.codec import MAX_ANSWER_BYTES
from tokservice.wire.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB

DEFAULT_MODEL = "smollm2-135m-instruct"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,A-Z]+")  # ASCII serialization, RFC 6454


def _require(condition: bool, key: str, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: {rule}")


def _require_nice(nice: int, key: str) -> None:
    _require(0 <= nice <= 19, key, "must be between 0 and 19")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """[model]"""

    path: str = DEFAULT_MODEL  # the default model, a Hugging Face style folder, or a Hub id
    served_name: str = ""  # name in the API; empty: the folder's or Hub id's own
    max_model_len: int = 0  # prompt and output tokens of one sequence; 0: the model's own limit
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    chat_template: str = ""  # a Jinja file that replaces the model's own
    tool_call_parser: str = "auto"  # form of tool calls: hermes, llama3_json, mistral; auto: by the template
    reasoning_parser: str = ""  # think: text between <think> and </think> becomes reasoning_content

    def __post_init__(self) -> None:
        _require(bool(self.path), "model.path", "must not be empty")
        _require(self.max_model_len >= 0, "model.max_model_len", "must be 0 (the model's own) or more")
        dtypes = ("auto", "float32", "bfloat16", "float16")
        _require(self.dtype in dtypes, "model.dtype", f"must be one of {', '.join(dtypes)}")
        parsers = ("auto", "hermes", "llama3_json", "mistral")
        _require(self.tool_call_parser in parsers, "model.tool_call_parser", f"must be one of {', '.join(parsers)}")
        _require(self.reasoning_parser in ("", "think"), "model.reasoning_parser", "must be empty or think")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """[api]: the HTTP processes."""

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8000  # 0: any free port
    ssl_certfile: str = ""  # PEM file with the certificate and those that it rests on: the port speaks TLS
    ssl_keyfile: str = ""  # PEM file with its key, without a password; empty: in ssl_certfile
    ssl_ca_certs: str = ""  # PEM file with authorities: clients need a certificate from one of them
    allowed_origins: tuple[str, ...] = ()  # web pages that may call this server (CORS); ["*"]: all
    processes: int = 1  # they share the port (SO_REUSEPORT)
    nice: int = 0  # scheduling priority, 0 to 19; higher gives way to lower
    max_body_bytes: int = 64 * MIB  # a larger body gets 413
    max_header_bytes: int = 64 * KIB  # larger headers get 431
    max_connections: int = 4096  # further ones get 503, but for the pages that probes ask for
    header_timeout_s: float = 30.0  # from a request's first byte to the end of its headers; also for a TLS handshake
    body_timeout_s: float = 60.0  # for each 64 KiB of a body, or what is left of it
    keep_alive_s: float = 120.0  # an idle connection stays open so long; above what common proxies assume
    write_stall_s: float = 60.0  # a client that reads nothing for so long is cut off
    max_unsent_bytes: int = 256 * KIB  # ready bytes that may wait for one slow reader of a stream; then it is cut off
    max_unsent_total_bytes: int = 512 * MIB  # the same for all clients of a process; then who holds most is cut off
    sse_keepalive_s: float = 15.0  # a comment on a stream that was silent so long, for proxies and clients; 0: none
    lag_heartbeat_ms: float = 10.0  # period of the monitor that measures the loop's lag

    def __post_init__(self) -> None:
        _require_nice(self.nice, "api.nice")
        _require(bool(self.host), "api.host", "must not be empty")
        _require(0 <= self.port <= 65535, "api.port", "must be between 0 and 65535")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            _require(bool(self.ssl_certfile or not getattr(self, name)), f"api.{name}", "needs api.ssl_certfile")
        for origin in self.allowed_origins:
            rule = f"{origin!r} is not an origin as browsers name it: scheme://host or scheme://host:port, or *"
            _require(origin == "*" or ORIGIN.fullmatch(origin) is not None, "api.allowed_origins", rule)
        _require(1 <= self.processes <= 64, "api.processes", "must be between 1 and 64")
        for name in ("max_body_bytes", "max_header_bytes", "max_connections", "max_unsent_bytes"):
            _require(getattr(self, name) >= 1, f"api.{name}", "must be at least 1")
        _require(
            self.max_unsent_total_bytes >= MAX_ANSWER_BYTES,
            "api.max_unsent_total_bytes",
            f"must be at least {MAX_ANSWER_BYTES}, as one answer may have",
        )
        for name in ("header_timeout_s", "body_timeout_s", "keep_alive_s", "write_stall_s", "lag_heartbeat_ms"):
            _require(getattr(self, name) > 0, f"api.{name}", "must be above 0")
        _require(self.sse_keepalive_s >= 0, "api.sse_keepalive_s", "must be 0 (none) or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """[router]: admission and dispatch."""

    nice: int = 0  # scheduling priority, 0 to 19; higher gives way to lower
    max_unfinished_requests: int = 4096  # uploads included; above: 429
    max_unfinished_bytes: int = 256 * MIB  # bodies and journals; above: 429
    long_body_bytes: int = 64 * KIB  # a larger body is long: it never delays short ones
    long_wait_s: float = 2.0  # a long body that has waited so long goes before short ones
    queue_timeout_s: float = 60.0  # waiting for a worker, at first or after one has died; then 503
    total_timeout_s: float = 3600.0  # from the first byte to the last; then 504

    def __post_init__(self) -> None:
        _require_nice(self.nice, "router.nice")
        for name in ("max_unfinished_requests", "max_unfinished_bytes", "long_body_bytes"):
            _require(getattr(self, name) >= 1, f"router.{name}", "must be at least 1")
        for name in ("long_wait_s", "queue_timeout_s", "total_timeout_s"):
            _require(getattr(self, name) > 0, f"router.{name}", "must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """[tokenizer]: the pool that parses, validates, renders templates and encodes."""

    workers: int = 2  # processes; of two or more one is kept free of long bodies
    nice: int = 5  # below the HTTP processes, which only move bytes and must never wait
    long_nice: int = 10  # of those workers that take long bodies, where there are others
    capacity: int = 4  # short bodies in flight at one worker
    backend: str = "auto"  # hf: the `tokenizers` library; fastokens; auto: fastokens if a self-test finds it equal
    allow_special_in_content: bool = True  # control tokens typed in messages keep their meaning, as elsewhere
    shadow_check_rate: float = 0.0  # share of the texts, 0 to 1, compared with the reference after the answer
    max_choices: int = 128  # prompts * n of one request
    max_json_depth: int = 64  # nested arrays and objects of a body

    def __post_init__(self) -> None:
        _require_nice(self.nice, "tokenizer.nice")
        _require_nice(self.long_nice, "tokenizer.long_nice")
        _require(1 <= self.workers <= 64, "tokenizer.workers", "must be between 1 and 64")
        _require(self.capacity >= 1, "tokenizer.capacity", "must be at least 1")
        backends = ("auto", "hf", "fastokens")
        _require(self.backend in backends, "tokenizer.backend", f"must be one of {', '.join(backends)}")
        _require(0 <= self.shadow_check_rate <= 1, "tokenizer.shadow_check_rate", "must be between 0 and 1")
        _require(self.max_choices >= 1, "tokenizer.max_choices", "must be at least 1")
        _require(self.max_json_depth >= 4, "tokenizer.max_json_depth", "must be at least 4")

    def takes_long(self, slot: int) -> bool:
        """Whether a worker takes long bodies: of two or more the one in slot 0 never does."""
        return self.workers == 1 or slot > 0

    def nice_of(self, slot: int) -> int:
        """Scheduling priority of a worker."""
        return self.long_nice if self.workers > 1 and self.takes_long(slot) else self.nice


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizerConfig:
    """[detokenizer]: the pool that turns token ids into finished bytes."""

    workers: int = 1  # processes
    nice: int = 3  # before the tokenizers: a stream waits for each of its tokens

    def __post_init__(self) -> None:
        _require_nice(self.nice, "detokenizer.nice")
        _require(1 <= self.workers <= 64, "detokenizer.workers", "must be between 1 and 64")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """[engine]"""

    kind: str = "torch"  # torch, or simulated: no weights, no torch, ids by a fixed rule
    processes: int = 1  # data parallel: each holds the whole model
    nice: int = 10  # applies on a CPU alone
    device: str = "auto"  # auto: cuda where there is one, else cpu
    threads: int = 0  # of torch on a CPU; 0: this engine's share of the cores, of four or more all but one
    deterministic: bool = False  # on a CPU: a request's ids never depend on its batch-mates
    weight_format: str = "auto"  # on a CPU: float32, bfloat16, float16, int8; auto: bfloat16 where fast, else float16
    max_num_seqs: int = 64  # choices that run at once
    max_num_batched_tokens: int = 0  # tokens of one step, over all choices; 0: 256 on a CPU, 4096 on a GPU
    block_size: int = 0  # tokens of one KV cache block; 0: 64 on a CPU, 256 on a GPU
    kv_cache_tokens: int = 0  # 0: from kv_cache_bytes on a CPU, from gpu_memory_utilization on a GPU
    kv_cache_bytes: int = 1024 * MIB  # on a CPU
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights and KV cache
    prefix_caching: bool = True  # prompts that begin alike share KV cache blocks

    def __post_init__(self) -> None:
        _require_nice(self.nice, "engine.nice")
        _require(self.kind in ("torch", "simulated"), "engine.kind", "must be torch or simulated")
        _require(1 <= self.processes <= 64, "engine.processes", "must be between 1 and 64")
        _require(
            self.weight_format in ("auto", "bfloat16", "float16", "float32", "int8"),
            "engine.weight_format",
            "must be auto, bfloat16, float16, float32 or int8",
        )
        _require(self.max_num_seqs >= 1, "engine.max_num_seqs", "must be at least 1")
        for name in ("max_num_batched_tokens", "block_size", "threads", "kv_cache_tokens", "kv_cache_bytes"):
            _require(getattr(self, name) >= 0, f"engine.{name}", "must be 0 or more")
        _require(0 < self.gpu_memory_utilization <= 1, "engine.gpu_memory_utilization", "must be in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """[simulated]: the engine of kind "simulated", for tests and load tests of the front end."""

    prefill_tokens_per_s: float = 0.0  # 0: prefill takes no time
    step_ms: float = 20.0  # time of one step: each running choice gets one token; 0: no pause at all
    max_model_len: int = 1_048_576  # prompt and output tokens of one sequence; up to 1048576
    fatal_token_id: int = -1  # a fault to test with: producing it ends the process; -1: none does

    def __post_init__(self) -> None:
        _require(self.prefill_tokens_per_s >= 0, "simulated.prefill_tokens_per_s", "must be 0 or more")
        _require(self.step_ms >= 0, "simulated.step_ms", "must be 0 or more")
        _require(1 <= self.max_model_len <= 1_048_576, "simulated.max_model_len", "must be between 1 and 1048576")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """[runtime]: common life of the processes."""

    run_dir: str = ""  # empty: a new private folder; else one that is new, empty or of an earlier run
    transport: str = "ipc"  # between processes: sockets in run_dir; tcp: ports on 127.0.0.1, with CURVE keys
    log_level: str = "info"  # debug, info, warning, error
    start_timeout_s: float = 600.0  # until every process is ready; large models load for minutes
    drain_timeout_s: float = 30.0  # after SIGTERM, for running requests
    heartbeat_s: float = 0.5  # period of every process's heartbeat, and of the pages made from them
    stall_timeout_s: float = 5.0  # no heartbeat for so long: not ready
    busy_stall_timeout_s: float = 30.0  # the same for tokenizers and engines, whose single piece of work may be long
    hang_timeout_s: float = 120.0  # no heartbeat for so long: killed and replaced

    def __post_init__(self) -> None:
        _require(self.transport in ("ipc", "tcp"), "runtime.transport", "must be ipc or tcp")
        levels = ("debug", "info", "warning", "error")
        _require(self.log_level in levels, "runtime.log_level", f"must be one of {', '.join(levels)}")
        for name in ("start_timeout_s", "drain_timeout_s", "heartbeat_s"):
            _require(getattr(self, name) > 0, f"runtime.{name}", "must be above 0")
        for name in ("stall_timeout_s", "busy_stall_timeout_s", "hang_timeout_s"):
            _require(getattr(self, name) > self.heartbeat_s, f"runtime.{name}", "must be above runtime.heartbeat_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything, in the order in which a request meets it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    detokenizer: DetokenizerConfig = field(default_factory=DetokenizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    simulated: SimulatedConfig = field(default_factory=SimulatedConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


# --- reading and writing --------------------------------------------------------------------------------------


def resolve(
    file: Path | None = None, settings: Iterable[str] = (), overrides: Mapping[str, Any] | None = None
) -> Config:
    """Defaults, then a TOML file, then ``section.key=value`` settings, then typed overrides ('api.port': 1).

    Raises ConfigError, which names the key.
    """
    sections: dict[str, dict[str, Any]] = _read_toml(file) if file else {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        _require(bool(equals), setting, "expected section.key=value")
        _assign(sections, name.strip(), _parse_value(text.strip()))
    for name, value in (overrides or {}).items():
        _assign(sections, name, value)
    return from_dict(sections)


def from_dict(sections: Mapping[str, Any]) -> Config:
    """Build the configuration from nested mappings. Raises ConfigError."""
    known = typing.get_type_hints(Config)
    built = {}
    for section, values in sections.items():
        if section not in known:
            raise ConfigError(f"unknown section [{section}]; known are {', '.join(known)}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{section}: must be a section, not a value")
        built[section] = _build_section(section, known[section], values)
    return Config(**built)


def load(path: Path) -> Config:
    """Read what ``save`` wrote."""
    return from_dict(json.loads(path.read_text()))


def save(config: Config, path: Path) -> None:
    """Write the resolved configuration, for the other processes to ``load``. Raises ConfigError, as on a full disk."""
    try:
        path.write_text(json.dumps(dataclasses.asdict(config), indent=1))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _read_toml(file: Path) -> dict[str, dict[str, Any]]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _parse_value(text: str) -> Any:
    """A TOML value, or, where it is none, the text itself (so that paths need no quotes)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _assign(sections: dict[str, dict[str, Any]], name: str, value: Any) -> None:
    section, dot, key = name.partition(".")
    _require(bool(dot and key), name, "expected section.key")
    values = sections.setdefault(section, {})
    _require(isinstance(values, dict), section, "must be a section, not a value")
    values[key] = value


def _build_section(section: str, kind: type, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    checked = {}
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"unknown key {section}.{key}; known are {', '.join(hints)}")
        checked[key] = _checked(f"{section}.{key}", hints[key], value)
    return kind(**checked)


def _checked(name: str, kind: Any, value: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is float and not math.isfinite(value):
        raise ConfigError(f"{name}: must be a finite number")
    if kind == tuple[str, ...] and type(value) is list and all(type(item) is str for item in value):
        return tuple(_text(name, item) for item in value)
    if type(value) is kind:
        return _text(name, value) if kind is str else value
    expected = kind.__name__ if not isinstance(kind, types.GenericAlias) else "a list of strings"
    raise ConfigError(f"{name}: expected {expected}, got {value!r}")


def _text(name: str, value: str) -> str:
    """What a command line may hold beside text reaches no file, no message and no answer."""
    is_text = value == value.encode(errors="ignore").decode() and "\0" not in value
    _require(is_text, name, f"must be UTF-8 without NUL, not {value!r}")
    return value
