"""Pages that the API process serves as they are: pushed by the supervisor, with an age. No clock inside."""

from __future__ import annotations

from dataclasses import dataclass

from tokservice.wire.messages import Publish


@dataclass(frozen=True, slots=True)
class Page:
    """A finished response."""

    status: int
    content_type: str
    body: bytes


STALE = Page(503, "application/json", b'{"status":"not ready","reason":"no news from the supervisor"}')


class Pages:
    """What was published last for each path."""

    def __init__(self) -> None:
        self._pages: dict[str, tuple[Page, float]] = {"/ready": (STALE, float("inf"))}  # until there is news

    def publish(self, message: Publish, now_s: float) -> None:
        """Take a page in."""
        expires_s = now_s + message.max_age_s if message.max_age_s else float("inf")
        page = Page(message.status, message.content_type, bytes(memoryview(message.frames[0])))
        self._pages[message.path] = (page, expires_s)

    def get(self, path: str, now_s: float) -> Page | None:
        """The page for a path: STALE if it should have been renewed, None if there is none."""
        page, expires_s = self._pages.get(path, (None, 0.0))
        return STALE if page is not None and now_s > expires_s else page
