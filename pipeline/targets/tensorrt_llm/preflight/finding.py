"""What a check says, and what it may look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pipeline.config.legality import gpus
from pipeline.config.schema import BuildConfig
from pipeline.errors import Problem
from pipeline.host.probe import HostProfile
from pipeline.targets.tensorrt_llm import weights


@dataclass(frozen=True, kw_only=True)
class Finding(Problem):
    """A problem with the row of coverage.toml that it belongs to: "TL" and a number."""

    id: str

    def __str__(self) -> str:
        """Close with the row, so that two findings about one key can be told apart."""
        return f"{super().__str__()} [{self.id}]"


def error(row: str, where: str, message: str, hint: str) -> Finding:
    """A finding that stops a build."""
    return Finding(id=row, where=where, message=message, hint=hint)


def warning(row: str, where: str, message: str, hint: str) -> Finding:
    """A finding that a build survives."""
    return Finding(id=row, where=where, message=message, hint=hint, severity="warning")


class Rope(Protocol):
    """Rotary embedding of a model."""

    @property
    def scaling(self) -> Mapping[str, object]:
        """rope_scaling of config.json, with 'rope_type'; empty for none."""
        ...


class Model(weights.Model, Protocol):
    """What the checks want to know about a model; checkpoints/architecture.py provides it."""

    @property
    def rope(self) -> Rope:
        """Rotary embedding."""
        ...


@dataclass(frozen=True, kw_only=True)
class Case:
    """One config with its model and, when the build runs where it is judged, its machine."""

    config: BuildConfig
    model: Model
    host: HostProfile | None = None

    @property
    def gpu(self) -> str:
        """The config's GPU word.

        Raises:
            ValueError: the config names none; config/rules.py reports that first.
        """
        if self.config.engine.gpu is None:
            raise ValueError("preflight needs engine.gpu")
        return self.config.engine.gpu

    @property
    def sm(self) -> int:
        """Compute capability as an integer, 90 for Hopper."""
        return gpus()[self.gpu].sm

    @property
    def world_size(self) -> int:
        """GPUs of one instance."""
        engine = self.config.engine
        return engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.context_parallel_size
