"""Progress for people: bars on a terminal, plain lines without one. Everything goes to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from pipeline.cli import output
from pipeline.core.progress import Advance, Progress

PLAIN_INTERVAL_S = 10.0


class PlainProgress:
    """One line when work starts, then one at most every ten seconds."""

    def note(self, text: str) -> None:
        """Print one fact."""
        click.echo(f"  {text}", err=True)

    @contextmanager
    def track(self, label: str, total: int, unit: str = "") -> Iterator[Advance]:
        """Print how far the work is, sparsely."""
        started = last = time.monotonic()
        done = 0

        def advance(units: int) -> None:
            nonlocal done, last
            done += units
            now = time.monotonic()
            if now - last >= PLAIN_INTERVAL_S:
                last = now
                left = (now - started) / done * (total - done) if done else 0
                text = f"  {label}: {done}/{total} {unit}".rstrip()
                click.echo(f"{text}, about {output.seconds(max(0.0, left))} left", err=True)

        yield advance
        click.echo(f"  {label}: {done} {unit}".rstrip() + f" in {time.monotonic() - started:.1f} s", err=True)


class BarProgress:
    """Bars that disappear when their work is done."""

    def note(self, text: str) -> None:
        """Print one fact."""
        click.echo(f"  {text}", err=True)

    @contextmanager
    def track(self, label: str, total: int, unit: str = "") -> Iterator[Advance]:
        """Draw a bar with the time left."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
        with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda units: bar.advance(task, units)


def for_this_terminal() -> Progress:
    """Return bars when stderr is a terminal, plain lines otherwise."""
    return BarProgress() if sys.stderr.isatty() else PlainProgress()
