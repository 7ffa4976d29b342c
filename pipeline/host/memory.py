"""How much memory a piece of work took."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

INTERVAL_S = 0.2


class MemoryPeak:
    """The most memory seen so far, in bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def sample(self) -> None:
        """Look once at this process and its descendants."""
        page_bytes = os.sysconf("SC_PAGESIZE")
        total = 0
        pending = [os.getpid()]
        while pending:
            process = Path("/proc", str(pending.pop()))
            with suppress(OSError):  # it ended between being listed and being looked at
                total += int((process / "statm").read_text().split()[1]) * page_bytes  # proc(5): resident pages
                # Guard: psutil's children() reads every process of the machine, 7 ms a sample beside 100 of them.
                for thread in (process / "task").iterdir():
                    pending += map(int, (thread / "children").read_text().split())
        self.bytes = max(self.bytes, total)


@contextmanager
def peak_memory() -> Iterator[MemoryPeak]:
    """Watch memory while the block runs; the yielded peak is final when the block has ended.

    Counted is the resident set of this process plus that of all its descendants, sampled five times a
    second and at both ends: a high-water mark of samples, so a spike between two of them is missed, and
    pages that parent and children share count once for each. The whole process counts, also what it
    held before the block.
    """
    peak = MemoryPeak()
    peak.sample()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(INTERVAL_S):
            peak.sample()

    thread = threading.Thread(target=watch, name="peak-memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak.sample()
