"""What a connection needs of the application behind it: see ``app.py``. API process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from api.backlog import Held
from api.cors import Origins
from api.exchange import Exchange
from tokservice.runtime.config import ApiConfig

if TYPE_CHECKING:
    from api.http_connection import HttpConnection


class Application(Protocol):
    """What is done with exchanges; see ``app.py``."""

    settings: ApiConfig
    origins: Origins | None
    date: bytes
    draining: bool  # what is new is refused
    held: Held

    def opened(self, connection: HttpConnection) -> None:
        """A client connected."""

    def closed(self, connection: HttpConnection) -> None:
        """Its connection is gone."""

    def begin(self, exchange: Exchange) -> None:
        """A request's head is here, and it is its turn."""

    def body(self, exchange: Exchange) -> None:
        """More of its body is kept, or it is ``complete``."""

    def abandoned(self, exchange: Exchange) -> None:
        """Nobody waits for the answer any more."""

    def response_started(self, status: int) -> None:
        """A response began."""

    def slow_reader(self) -> None:
        """A client was cut off since it did not read."""

    def make_room(self) -> None:
        """More is held for clients that do not read: there is a bound to it."""
