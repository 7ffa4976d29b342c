"""What a target is: a module that compiles quantized checkpoints into engines for one kind of machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pipeline.config.schema import EngineConfig, Format, TargetName
from pipeline.core.artifacts import QuantizedCheckpoint
from pipeline.core.progress import Progress


class Target(Protocol):
    """Satisfied by the modules in this room, for example `pipeline.targets.openvino`."""

    NAME: TargetName

    def compile_engine(
        self, quantized: QuantizedCheckpoint, engine: EngineConfig, *, out: Path, progress: Progress
    ) -> None:
        """Write an Engine directory to `out`: engine.json and the target's own files."""
        ...

    def describe(self, engine_path: Path) -> Mapping[str, object]:
        """Read back what was built: limits, choices with reasons, sizes."""
        ...

    def deviations(self, quantization_format: Format) -> list[str]:
        """Say in words where this target computes otherwise than TensorRT-LLM does in that format."""
        ...
