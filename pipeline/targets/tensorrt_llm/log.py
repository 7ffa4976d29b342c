"""Where a build is, read from its log.

Lines: console output of trtllm-build as upstream's examples show it (NVIDIA/TensorRT-LLM
examples/gpt/README.md, examples/falcon/README.md; unchanged from 2024 to 1.x logs of users).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from pipeline.core.progress import Advance

PHASES: Final = ("network", "kernels", "serialize")
# What ends each phase of one rank.
_ENDS: Final = (
    (0, re.compile(r"Total time of constructing network|Build TensorRT engine")),
    (1, re.compile(r"Engine generation completed in|Total time of building Unnamed Network")),
    (2, re.compile(r"Engine serialized\. Total time")),
)
_RANK: Final = re.compile(r"Serializing engine to .*rank(\d+)\.engine")
_WARNING: Final = re.compile(r"\[TRT-LLM\] \[W\] (.*)")
_VERSION: Final = re.compile(r"TensorRT-LLM version: (\S+)")


class BuildLog:
    """Follows a build line by line: counts phases over all ranks and passes on what a person should see.

    Attributes:
        version: of TensorRT-LLM as the log names it, "" before.
    """

    def __init__(self, advance: Advance, note: Callable[[str], None]) -> None:
        self._advance = advance
        self._note = note
        self._phase = 0
        self.version = ""
        self._kinds: set[str] = set()

    def take(self, line: str) -> None:
        """Read one line."""
        version = _VERSION.search(line)
        if version is not None and not self.version:
            self.version = version[1]
            self._note(f"TensorRT-LLM {self.version}")
        warning = _WARNING.search(line)
        if warning is not None and self._is_new(warning[1]):
            self._note(f"trtllm-build warns: {warning[1]}")
        rank = _RANK.search(line)
        if rank is not None:
            self._note(f"rank {rank[1]}: engine built, writing it")
        for phase, pattern in _ENDS:
            if phase >= self._phase and pattern.search(line):
                self._advance(phase + 1 - self._phase)
                self._phase = (phase + 1) % len(PHASES)
                break

    def _is_new(self, warning: str) -> bool:
        """Tell whether a warning is the first of its kind; one per layer would hide the others."""
        kind = re.sub(r"\d+", "#", warning)
        known = kind in self._kinds
        self._kinds.add(kind)
        return not known
