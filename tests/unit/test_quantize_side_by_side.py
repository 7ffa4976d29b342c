"""Pieces of work on several threads, and how tensors are cut into them."""

from __future__ import annotations

import threading

import pytest

from pipeline.quantize.side_by_side import in_order, row_blocks

pytestmark = pytest.mark.fast


def test_results_come_in_the_order_of_the_items() -> None:
    """A slow first item holds the others back."""
    second_done = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            second_done.wait(0.05)
        second_done.set()
        return item * item

    assert list(in_order(work, range(20))) == [item * item for item in range(20)]


def test_an_error_of_one_item_ends_the_whole() -> None:
    """Later items are not taken any more."""
    taken: list[int] = []

    def items() -> object:
        for item in range(1000):
            taken.append(item)
            yield item

    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda item: 1 // (item - 1), items()))  # type: ignore[arg-type]
    assert len(taken) < 1000


@pytest.mark.parametrize("shape", [(2, 64), (1000, 64), (5, 300_000), (7,), (4096, 4096)])
def test_row_blocks_cover_every_row_once_and_start_at_even_rows(shape: tuple[int, ...]) -> None:
    """Packed int4 has two rows in a byte, so no block begins with the second of them."""
    blocks = list(row_blocks(shape))
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(shape[0]))
    assert all(block.start % 2 == 0 for block in blocks)
