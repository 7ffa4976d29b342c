"""Read the JSON documents of a checkpoint with errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.errors import Unreadable


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in a file.

    Raises:
        Unreadable: the file is absent, unreadable, not UTF-8 or not a JSON object.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read ({error.strerror or error}).") from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path}: not JSON ({error}).", hint="Download the checkpoint again.") from error
    if not isinstance(document, dict):
        raise Unreadable(f"{path}: holds {type(document).__name__}, expected a JSON object.")
    return document


def read_optional_json(path: Path) -> dict[str, object]:
    """Return the JSON object in a file, or an empty one when the file is absent."""
    return read_json(path) if path.exists() else {}
