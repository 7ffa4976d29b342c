"""Independent pieces of numpy and torch work on all cores: both let go of the interpreter while they compute."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_BLOCK = 1 << 19  # values: with fewer, threads wait for the interpreter; with more, arrays leave the cache


def in_order(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield `work(item)` of every item, in order; the first exception ends it.

    Items are taken a few ahead of the work, so that files which an item maps are read meanwhile.
    """
    cores = len(os.sched_getaffinity(0))
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(cores, initializer=_compute_alone) as pool:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > 2 * cores:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _compute_alone() -> None:
    """Keep torch in this thread from taking the other cores as well; they have work of their own."""
    import torch

    torch.set_num_threads(1)


def row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Cut the rows of a tensor into blocks of an even number of rows, of about half a million values each."""
    columns = 1
    for extent in shape[1:]:
        columns *= extent
    step = max(2, _BLOCK // max(1, columns) // 2 * 2)
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))
