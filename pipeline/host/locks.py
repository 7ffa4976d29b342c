"""Locks between processes that die with their holder: the kernel releases flock when a process ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import StoreBusy

POLL_S = 0.1


@contextmanager
def hold(
    path: Path,
    *,
    shared: bool = False,
    timeout_s: float = 0.0,
    on_wait: Callable[[int], None] = lambda _pid: None,
) -> Iterator[None]:
    """Hold the lock file `path`, which is made when absent and never removed.

    Args:
        path: the lock file; it holds the process id of whoever took the lock last.
        shared: allow other shared holders.
        timeout_s: seconds to wait for another holder; 0 does not wait.
        on_wait: called once, with the holder's process id (0 when unknown), when waiting begins.

    Raises:
        StoreBusy: another process still holds the lock after `timeout_s`; names its process id.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not try_lock(descriptor, shared=shared):
            deadline = time.monotonic() + timeout_s
            if timeout_s > 0:
                on_wait(_holder(descriptor))
            while not try_lock(descriptor, shared=shared):
                if time.monotonic() >= deadline:
                    raise StoreBusy(
                        f"process {_holder(descriptor)} still holds {path} after {timeout_s:.0f} s",
                        hint="Wait for that process to end, or stop it, and run again.",
                    )
                time.sleep(POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file or directory without waiting; tell whether it worked."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0).strip()
    return int(text) if text.isdigit() else 0
