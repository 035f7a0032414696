"""Whether this machine has an IPv6 loopback; many containers have none."""

from __future__ import annotations

import socket

import pytest


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


HAS_IPV6 = _has_ipv6()
NEEDS_IPV6 = pytest.mark.skipif(not HAS_IPV6, reason="there is no IPv6 here")
