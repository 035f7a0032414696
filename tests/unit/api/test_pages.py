"""Pages and their age."""

from __future__ import annotations

from api.pages import STALE, Pages
from tokservice.wire.messages import Publish


def publish(pages: Pages, path: str, body: bytes, *, now_s: float, max_age_s: float = 0.0, status: int = 200) -> None:
    """One page, as a frame that is not bytes."""
    pages.publish(Publish(path, status, "text/plain", max_age_s, frames=(memoryview(body),)), now_s)


def test_a_page_is_stale_when_it_should_have_been_renewed() -> None:
    """A dead supervisor must not leave readiness at 200 for ever."""
    pages = Pages()
    publish(pages, "/ready", b"ok", now_s=100.0, max_age_s=5.0)
    page = pages.get("/ready", 105.0)
    assert page is not None
    assert (page.status, page.content_type, page.body) == (200, "text/plain", b"ok")
    assert pages.get("/ready", 105.1) is STALE
    publish(pages, "/ready", b"again", now_s=110.0, max_age_s=5.0, status=503)
    page = pages.get("/ready", 111.0)
    assert page is not None
    assert (page.status, page.body) == (503, b"again")


def test_a_page_without_age() -> None:
    """Models and version do not change."""
    pages = Pages()
    publish(pages, "/v1/models", b"{}", now_s=0.0)
    page = pages.get("/v1/models", 1e9)
    assert page is not None
    assert page.body == b"{}"


def test_before_any_news() -> None:
    """Not ready, which is not unknown."""
    pages = Pages()
    assert pages.get("/ready", 0.0) is STALE
    assert pages.get("/nowhere", 0.0) is None
