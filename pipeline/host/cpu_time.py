"""How busy the whole machine was: what a measurement of time has to say about its neighbours."""

from __future__ import annotations

import os
from pathlib import Path

_IDLE = (3, 4)
"""Columns idle and iowait of the first line of /proc/stat (proc_stat(5)); guest time is in user time already."""
_COUNTED = 8


def busy_seconds(stat: Path = Path("/proc/stat")) -> float | None:
    """CPU seconds, over all cores, that the machine's processes have used since it started; None where not known."""
    try:
        ticks = [int(field) for field in stat.read_text("ascii").split("\n", 1)[0].split()[1 : _COUNTED + 1]]
    except (OSError, ValueError):
        return None
    return sum(count for column, count in enumerate(ticks) if column not in _IDLE) / os.sysconf("SC_CLK_TCK")
