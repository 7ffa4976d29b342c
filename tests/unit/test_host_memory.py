"""Peak memory: this process and its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pipeline.host.memory import MemoryPeak, peak_memory

pytestmark = pytest.mark.fast

HELD_BYTES = 200 * 2**20
HOLD = f"b = b'x' * {HELD_BYTES}; print(len(b), flush=True); input()"


def test_the_resident_set_is_the_kernels() -> None:
    """A process without children is counted as psutil counts it, to within what it allocates meanwhile."""
    peak = MemoryPeak()
    peak.sample()
    children = sum(child.memory_full_info().uss for child in psutil.Process().children(recursive=True))
    assert peak.bytes == pytest.approx(psutil.Process().memory_info().rss + children, rel=0.05)


def test_pages_shared_with_a_forked_child_count_once() -> None:
    """A child that was only forked adds next to nothing."""
    held = bytearray(HELD_BYTES)
    held[::4096] = b"x" * len(held[::4096])
    with peak_memory() as peak:
        before = peak.bytes
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        peak.sample()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert peak.bytes < before + HELD_BYTES // 4


@pytest.mark.parametrize("argv", [[sys.executable, "-c", HOLD], ["sh", "-c", f'"{sys.executable}" -c "{HOLD}"; true']])
def test_children_and_their_children_count(argv: list[str]) -> None:
    """Memory that only a child or grandchild holds is in the peak, and stays there when it is gone."""
    with peak_memory() as peak:
        before = peak.bytes
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == f"{HELD_BYTES}\n"
            peak.sample()
            child.communicate("\n")
    assert peak.bytes > before + HELD_BYTES
