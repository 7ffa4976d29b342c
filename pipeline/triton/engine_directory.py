"""Reading an engine directory, and finding where a path of the container lies here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.errors import ConfigError


def in_repository(path: str, repository: Path, mount: str) -> Path:
    """Return where a path that the server sees lies on this machine.

    Args:
        path: absolute path inside the container.
        repository: the model repository here.
        mount: the same repository as the server sees it; other paths are taken to be the same here and there.
    """
    inside = PurePosixPath(path)
    root = PurePosixPath(mount)
    return repository / inside.relative_to(root) if inside.is_relative_to(root) else Path(path)


def read_mapping(engine: Path) -> Mapping[str, Any]:
    """Return the parallel mapping of an engine, or of the checkpoint beside it when it is not built yet.

    Raises:
        ConfigError: neither can be read.
    """
    places = (engine / "config.json", engine.parent / "checkpoint" / "config.json")
    for place in places:
        if not place.is_file():
            continue
        try:
            document = json.loads(place.read_text(encoding="utf-8"))
            mapping = document.get("pretrained_config", document).get("mapping", {})
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{place} is no engine configuration: {error}", hint="Copy the engine again.") from error
        return mapping if isinstance(mapping, dict) else {}
    raise ConfigError(
        f"{engine} has no config.json, so the number of ranks is not known", hint="Build the engine, or name its mount."
    )


def world_size(mapping: Mapping[str, Any]) -> int:
    """Return the number of ranks of a parallel mapping."""
    sizes = [int(mapping.get(name) or 1) for name in ("tp_size", "pp_size", "cp_size")]
    return int(mapping.get("world_size") or sizes[0] * sizes[1] * sizes[2])
