"""What a core model brings to a repository; the text models around it are the same for every target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.config.deployment import ServingConfig
from pipeline.triton.backend_parameters import CORE_MODEL, Decision
from pipeline.triton.launch import MOUNT
from pipeline.triton.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Emission:
    """One repository in the making.

    engine_dir: the Engine artifact's directory.
    engine: its engine.json.
    mount: the repository as the server sees it.
    templates: directory of the template models.
    """

    engine_dir: Path
    engine: Mapping[str, Any]
    serving: ServingConfig
    name: str
    mount: str = MOUNT
    templates: Path = Path()

    @property
    def version_directory(self) -> str:
        """The core model's version directory as the server sees it."""
        return f"{self.mount}/{CORE_MODEL}/1"


class CoreModel(Protocol):
    """The part of a repository that differs by target.

    whole_responses: responses of the core never end inside a character.
    packages: Python packages to install for the repository's models; none where the server's image has them.
    """

    @property
    def whole_responses(self) -> bool: ...  # noqa: D102 (see the class)
    @property
    def packages(self) -> tuple[str, ...]: ...  # noqa: D102 (see the class)

    def configure(self, configs: Mapping[str, ModelConfig], emission: Emission) -> tuple[Decision, ...]:
        """Set the core's fields and parameters; return what was decided, with reasons."""
        ...

    def write(self, emission: Emission, out: Path) -> None:
        """Write the core model's files below `out`, whose config.pbtxt are there already."""
        ...

    def readme(self, emission: Emission) -> str:
        """Return how to start the server."""
        ...
