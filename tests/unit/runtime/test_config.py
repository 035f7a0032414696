"""Configuration: what is written is what every process reads, and a mistake is named."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest

from tokservice.runtime import config
from tokservice.runtime.config import Config, from_dict, load, resolve, save
from tokservice.wire.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
SECTIONS = typing.get_type_hints(Config)


def test_the_default_file_is_the_defaults() -> None:
    assert resolve(CONFIGS / "default.toml") == Config()


def test_the_default_file_has_every_key_in_the_same_order() -> None:
    written = tomllib.loads((CONFIGS / "default.toml").read_text())
    assert [(name, list(values)) for name, values in written.items()] == [
        (name, [item.name for item in dataclasses.fields(kind)]) for name, kind in SECTIONS.items()
    ]


def _comments(source: str) -> dict[str, str]:
    """The comment behind each ``name = value`` or ``name: type = value``."""
    lines = [line.strip() for line in source.splitlines()]
    matches = (re.match(r"(\w+)(?:: [\w\[\], .]+)? = [^#]*?(?:  # (.*))?$", line) for line in lines)
    return {match[1]: match[2] for match in matches if match and match[2]}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_explained_in_the_same_words_in_both_places(section: str) -> None:
    text = (CONFIGS / "default.toml").read_text()
    in_file = _comments(text.partition(f"\n[{section}]")[2].partition("\n[")[0])
    in_code = _comments(textwrap.dedent(inspect.getsource(SECTIONS[section])).partition("def __post_init__")[0])
    assert in_file == in_code
    assert set(in_file) == {item.name for item in dataclasses.fields(SECTIONS[section])}


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.name)
def test_every_shipped_file_loads(file: Path) -> None:
    resolve(file)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    changed = resolve(settings=["api.port=0", "model.path=/a/ü b", "simulated.step_ms=2", 'api.allowed_origins=["*"]'])
    save(changed, tmp_path / "config.json")
    assert load(tmp_path / "config.json") == changed != Config()


def test_a_place_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot write /dev/full: No space left on device"):
        save(Config(), Path("/dev/full"))


def test_file_then_settings_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[api]\nport = 1\nhost = 'a'\nprocesses = 2\n")
    resolved = resolve(file, ["api.port=2", "api.host=b"], {"api.port": 3})
    assert (resolved.api.port, resolved.api.host, resolved.api.processes) == (3, "b", 2)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("api.port=123", 123),
        ("api.port = 123 ", 123),
        ("simulated.step_ms=5", 5.0),
        ("simulated.step_ms=0.5", 0.5),
        ("engine.deterministic=true", True),
        ("model.path=/some/where with blanks", "/some/where with blanks"),
        ("model.path='quoted'", "quoted"),
        ("model.path=a=b", "a=b"),
        ('model.served_name="7"', "7"),
        ("model.served_name=", ""),
        ('api.allowed_origins=["https://a.example", "http://[::1]:8080"]', ("https://a.example", "http://[::1]:8080")),
        ('api.allowed_origins=["*"]', ("*",)),
        ("api.allowed_origins=[]", ()),
    ],
)
def test_settings_from_the_command_line(setting: str, value: Any) -> None:
    section, key = setting.partition("=")[0].strip().split(".")
    got = getattr(getattr(resolve(settings=[setting]), section), key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("api.port", "api.port: expected section.key=value"),
        ("port=1", "port: expected section.key"),
        ("api.=1", r"api\.: expected section.key"),
        ("api.prot=1", "unknown key api.prot; known are host, port"),
        ("api.port.x=1", "unknown key api.port.x"),
        ("apo.port=1", r"unknown section \[apo\]; known are model, api"),
        ("api.port=true", "api.port: expected int, got True"),
        ("api.port=1.0", "api.port: expected int, got 1.0"),
        ("api.port=many", "api.port: expected int, got 'many'"),
        ("api.port=-1", "api.port: must be between 0 and 65535"),
        ("api.port=[1]", "api.port: expected int"),
        ("api.allowed_origins=*", r"api.allowed_origins: expected a list of strings, got '\*'"),
        ("api.allowed_origins=[1]", "api.allowed_origins: expected a list of strings"),
        ('api.allowed_origins=["https://a.example/"]', "api.allowed_origins: 'https://a.example/' is not an origin"),
        ('api.allowed_origins=["a.example"]', "api.allowed_origins: 'a.example' is not an origin"),
        ('api.allowed_origins=["null"]', "api.allowed_origins: 'null' is not an origin"),
        ('api.allowed_origins=["https://A.example"]', "api.allowed_origins: 'https://A.example' is not an origin"),
        ("api.ssl_keyfile=key.pem", "api.ssl_keyfile: needs api.ssl_certfile"),
        ("engine.deterministic=1", "engine.deterministic: expected bool, got 1"),
        ("simulated.step_ms=true", "simulated.step_ms: expected float, got True"),
        ("simulated.step_ms='5'", "simulated.step_ms: expected float, got '5'"),
        ("simulated.step_ms=-1", "simulated.step_ms: must be 0 or more"),
        ("runtime.heartbeat_s=nan", "runtime.heartbeat_s: must be a finite number"),
        ("runtime.heartbeat_s=inf", "runtime.heartbeat_s: must be a finite number"),
        ("runtime.stall_timeout_s=0.1", "runtime.stall_timeout_s: must be above runtime.heartbeat_s"),
        ("model.served_name=7", "model.served_name: expected str, got 7"),
        ("model.path=", "model.path: must not be empty"),
        ("model.served_name=\udcff", "model.served_name: must be UTF-8 without NUL"),  # bytes of a command line
        ('api.host="a\\u0000"', "api.host: must be UTF-8 without NUL"),
        ("model.dtype=int8", "model.dtype: must be one of auto, float32"),
        ("engine.kind=magic", "engine.kind: must be torch or simulated"),
        ("tokenizer.workers=0", "tokenizer.workers: must be between 1 and 64"),
        ("tokenizer.nice=-5", "tokenizer.nice: must be between 0 and 19"),
        ("runtime.log_level=loud", "runtime.log_level: must be one of debug"),
    ],
)
def test_a_mistake_is_named(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        resolve(settings=[setting])


def test_a_value_where_a_section_should_be(tmp_path: Path) -> None:
    """Together with a setting of the same name this ended in a TypeError."""
    file = tmp_path / "c.toml"
    file.write_text("api = 3\n")
    for settings in ([], ["api.port=1"]):
        with pytest.raises(ConfigError, match="api: must be a section, not a value"):
            resolve(file, settings)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b"\xef\xbb\xbf[api]\r\nport = 3\r\n")
    assert resolve(file).api.port == 3


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    with pytest.raises(ConfigError, match=r"cannot read .*c\.toml: No such file"):
        resolve(file)
    file.write_text("[api\n")
    with pytest.raises(ConfigError, match=r"c\.toml is not valid TOML"):
        resolve(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"c\.toml is not valid TOML"):
        resolve(file)


def test_nothing_can_be_changed_afterwards() -> None:
    resolved = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.api = config.ApiConfig()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.api.port = 1  # type: ignore[misc]


def test_unknown_keys_in_the_saved_file_are_errors_too() -> None:
    with pytest.raises(ConfigError, match=r"unknown key api\.ports"):
        from_dict({"api": {"ports": 1}})


def test_no_other_module_of_the_runtime_reads_the_environment() -> None:
    """Settings come from the file alone, so that every process sees the same."""
    package = Path(config.__file__).parent
    for file in package.glob("*.py"):
        if file.name in ("children.py", "cache_dir.py"):  # they hand it on, and find the user's cache
            continue
        names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"environ", "getenv"}, file.name
