"""Integers packed into 32-bit words, as the formats of other tools store them.

A word holds 32 / bits codes, the first in its lowest bits. The formats differ in the axis that is packed and
in the order of the codes within a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

WORD_BITS = 32


def unpack_columns(words: npt.NDArray[Any], bits: int, order: Sequence[int] | None = None) -> npt.NDArray[np.uint8]:
    """Unpack int32 [rows, words] to codes uint8 [rows, words * 32 / bits].

    Args:
        words: packed along the last axis.
        bits: of a code, a divisor of 32 up to 8.
        order: place, from the lowest bits, at which each consecutive code of a word lies; None is 0, 1, 2, ...
    """
    places = np.arange(WORD_BITS // bits) if order is None else np.asarray(order)
    shifts = (places * bits).astype(np.uint32)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    codes = (unsigned[:, :, None] >> shifts) & np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)


def unpack_rows(words: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """Unpack int32 [words, columns], packed along the first axis, to codes uint8 [words * 32 / bits, columns]."""
    return np.ascontiguousarray(unpack_columns(np.ascontiguousarray(words.T), bits).T)


def pack_columns(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int32]:
    """Pack codes uint8 [rows, columns] to int32 [rows, ceil(columns * bits / 32)], the rest of a word 0."""
    per_word = WORD_BITS // bits
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // per_word) * per_word), np.uint32)
    padded[:, :columns] = codes
    shifts = (np.arange(per_word) * bits).astype(np.uint32)
    words = np.bitwise_or.reduce(padded.reshape(rows, -1, per_word) << shifts, axis=2)
    return np.asarray(words, np.uint32).view(np.int32)
