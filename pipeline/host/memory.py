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
        own, *descendants = _family(os.getpid())
        # A forked child shares its parent's pages, which count there already.
        used = _resident_bytes(own) + sum(_private_bytes(process) for process in descendants)
        self.bytes = max(self.bytes, used)


def _family(pid: int) -> list[Path]:
    """Return the /proc directories of a process and all its descendants."""
    family, pending = [], [pid]
    while pending:
        process = Path("/proc", str(pending.pop()))
        family.append(process)
        with suppress(OSError):  # it ended between being listed and being looked at
            # Guard: psutil's children() reads every process of the machine, 7 ms a sample beside 100 of them.
            for thread in (process / "task").iterdir():
                pending += map(int, (thread / "children").read_text().split())
    return family


def _resident_bytes(process: Path) -> int:
    return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")  # proc(5): resident pages


def _private_bytes(process: Path) -> int:
    """Pages that no other process maps (proc(5): Private_Clean and Private_Dirty)."""
    total_kib = 0
    with suppress(OSError):
        for line in (process / "smaps_rollup").read_text().splitlines():
            if line.startswith("Private_"):
                total_kib += int(line.split()[1])
    return total_kib * 1024


@contextmanager
def peak_memory() -> Iterator[MemoryPeak]:
    """Watch memory while the block runs; the yielded peak is final when the block has ended.

    Counted is the resident set of this process plus the private pages of its descendants, sampled five
    times a second and at both ends: a high-water mark of samples, so a spike between two of them is missed.
    The whole process counts, also what it held before the block.
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
