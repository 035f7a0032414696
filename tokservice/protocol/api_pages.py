"""The finished pages that describe the API, for the API processes to serve as they are. The launcher makes them."""

from __future__ import annotations

import msgspec

from tokservice.protocol.docs_page import docs_page
from tokservice.protocol.openapi import document
from tokservice.wire.messages import Publish


def api_pages(version: str) -> tuple[Publish, ...]:
    """``/openapi.json`` and ``/docs``. ``version``: of the server."""
    described = document(version)
    return (
        Publish("/openapi.json", 200, "application/json", 0.0, (msgspec.json.encode(described),)),
        Publish("/docs", 200, "text/html; charset=utf-8", 0.0, (docs_page(described),)),
    )
