"""How long work tells what it is doing, without knowing who listens.

Rooms receive a `Progress`; cli/ supplies one that draws bars on a terminal or prints plain lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    """A listener for long work."""

    def note(self, text: str) -> None:
        """Tell one fact, such as a choice and its reason."""
        ...

    def track(self, label: str, total: int, unit: str = "") -> AbstractContextManager[Advance]:
        """Open a counted piece of work; call the yielded function with the number of units done."""
        ...


class Silent:
    """A Progress that nobody listens to."""

    def note(self, text: str) -> None:
        """Drop the fact."""

    @contextmanager
    def track(self, label: str, total: int, unit: str = "") -> Iterator[Advance]:
        """Count nothing."""
        del label, total, unit
        yield lambda _units: None
