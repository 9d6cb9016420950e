"""The edge every front end is written against. The local engine, remote back ends and the test fake implement it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from outpace.types import Delta, Request


class EngineClient(Protocol):
    """Submit requests, receive deltas. Implementations are safe to use from one event loop."""

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Queue a request. Raises UsageError or CapacityError at once if it can never run; the last Delta carries
        finish_reason. Closing the iterator early aborts the request."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request within one step. Unknown or finished ids are ignored."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters of the whole engine since start."""
        ...

    async def close(self) -> None:
        """Abort what is open and free the engine's resources."""
        ...
