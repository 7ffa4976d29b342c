"""Mixtures of experts: which layers belong to one expert, and what experts get that the text hardly reaches.

An expert is a directory of linear layers, `….experts.<number>.<projection>`. The router sends each token to few
of them, so an expert sees a part of the calibration text, or none. What it sees is counted. The input range of a
projection that was never reached is the widest of the same projection's in the layer's other experts: runtimes
that fuse experts take one input scale for all of them, the largest, so nothing is lost by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_EXPERT = re.compile(r"(?P<block>.*\.experts)\.(?P<number>\d+)\.(?P<projection>[^.]+)$")
# Read the same tensor and are one matrix in fused kernels, which take one weight scale for both.
FUSED = (("gate_proj", "up_proj"), ("w1", "w3"))
FEW_TOKENS = 256  # half a default sequence; fewer say little about the range that all text needs


def siblings(name: str, names: Iterable[str]) -> list[str]:
    """The same projection of the other experts of `name`'s layer; empty when it belongs to no expert."""
    mine = _EXPERT.match(name)
    if mine is None:
        return []
    found = []
    for other in names:
        match = _EXPERT.match(other)
        if other != name and match and match["block"] == mine["block"] and match["projection"] == mine["projection"]:
            found.append(other)
    return found


def fused_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Layers of one expert that must share their weight's scale, where it is one number."""
    known = set(names)
    pairs = []
    for name in sorted(known):
        match = _EXPERT.match(name)
        for first, second in FUSED:
            other = f"{name.rpartition('.')[0]}.{second}"
            if match and match["projection"] == first and other in known:
                pairs.append((name, other))
    return pairs


def lend_missing(found: Mapping[str, torch.Tensor], names: Iterable[str], *, widest: bool) -> dict[str, torch.Tensor]:
    """What experts that saw nothing get from their siblings.

    Args:
        found: by layer name: input ranges (float32 [in]), or recorded rows.
        names: every layer.
        widest: the largest of all siblings' values; otherwise those of the first sibling.
    """
    import torch

    lent: dict[str, torch.Tensor] = {}
    for name in names:
        if name in found:
            continue
        others = [found[other] for other in siblings(name, names) if other in found]
        if others:
            lent[name] = torch.stack(others).amax(dim=0) if widest else others[0].clone()
    return lent


def coverage(tokens: Mapping[str, int]) -> dict[str, Any]:
    """Tokens that each expert saw, for calibration.json; layers that belong to no expert are left out.

    Returns:
        empty without experts; else `tokens` (block -> one number per expert) and `unseen` and `few` (experts by name).
    """
    seen: dict[str, dict[int, int]] = {}
    for name, count in tokens.items():
        match = _EXPERT.match(name)
        if match:
            experts = seen.setdefault(match["block"], {})
            experts[int(match["number"])] = max(count, experts.get(int(match["number"]), 0))
    if not seen:
        return {}
    named = {f"{block}.{number}": count for block, experts in seen.items() for number, count in sorted(experts.items())}
    return {
        "tokens": {block: [experts[number] for number in sorted(experts)] for block, experts in seen.items()},
        "unseen": [name for name, count in named.items() if count == 0],
        "few": [name for name, count in named.items() if 0 < count < FEW_TOKENS],
    }


def coverage_warnings(covered: Mapping[str, Any]) -> list[str]:
    """What coverage tells about text that leaves experts out, in words for a user."""
    if not covered:
        return []
    total = sum(len(experts) for experts in covered["tokens"].values())
    words = []
    if covered["unseen"]:
        words.append(
            f"{len(covered['unseen'])} of {total} experts saw no token and take their siblings' widest range: "
            f"{_named(covered['unseen'])}; give calibration text of more kinds"
        )
    if covered["few"]:
        words.append(
            f"{len(covered['few'])} of {total} experts saw fewer than {FEW_TOKENS} tokens: {_named(covered['few'])}; "
            "raise calibration.num_samples"
        )
    return words


def _named(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
