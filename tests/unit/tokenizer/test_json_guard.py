from __future__ import annotations

import contextlib
import json
import time

import pytest

from tokservice.tokenizer.json_guard import check_depth
from tokservice.wire.errors import RequestError


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[[[]]]",
        b'{"a":[{"b":1}],"c":[[]]}',
        b"[],[],[],[],[],[]",
        b'["[[[[[["]',
        b'["\\"[[[[[["]',
        b'["\\\\\\"[[[[[["]',
        b'["\\\\",["\\\\"]]',
        json.dumps(["\\" * 5 + '"[[[[[']).encode(),
    ],
)
def test_shallow_bodies_pass(body: bytes) -> None:
    check_depth(body, 3)


@pytest.mark.parametrize("body", [b"[[[[]]]]", b'{"a":{"b":[{}]}}', b'["\\\\",[[[', b'["\\\\\\\\",[[["x"]]]]', b"[[[["])
def test_deep_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="nested more than 3"):
        check_depth(body, 3)


@pytest.mark.parametrize("unit", [b"[", b"{", b"[]", b'"\\""', b'"', b"\\", b'\\"', b"]"])
def test_cost_is_linear(unit: bytes) -> None:
    begin = time.process_time()
    with contextlib.suppress(RequestError):
        check_depth(unit * 2_000_000, 64)
    assert time.process_time() - begin < 20  # a square of the length would take hours
