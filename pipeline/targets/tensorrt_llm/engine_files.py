"""The files around an engine: engine.json, the tokenizer, the side manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipeline.errors import IntegrityError, Problem

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a document with sorted keys, so that equal content is equal bytes."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the tokenizer files that `source` has to out/tokenizer.

    Raises:
        IntegrityError: there is no tokenizer.json.
    """
    if not (source / "tokenizer.json").is_file():
        raise IntegrityError(f"{source} has no tokenizer.json", hint="Rebuild the quantized checkpoint.")
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / "tokenizer" / name)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        IntegrityError: the file is absent, empty or no JSON object.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}", hint="Build it again.") from error
    except ValueError as error:
        raise IntegrityError(f"{path} is not JSON: {error}", hint="Build it again.") from error
    if not isinstance(document, dict):
        raise IntegrityError(f"{path} holds no JSON object", hint="Build it again.")
    return document


def describe(engine_path: Path) -> dict[str, Any]:
    """Read an engine of either GPU target back: engine.json, and the size of what is served.

    Raises:
        IntegrityError: a file that engine.json promises is missing.
    """
    facts = read_json(engine_path / "engine.json")
    needed = {"tensorrt_llm_llmapi": ["model/config.json"]}.get(facts.get("target", ""), [])
    if facts.get("state") == "built":
        needed = ["engine/config.json", *(f"engine/rank{rank}.engine" for rank in range(facts["world_size"]))]
    elif facts.get("state") == "deferred":
        needed = ["build/build.sh", "build/manifest.json", "checkpoint/config.json"]
    missing = [Problem(where=name, message="is missing.") for name in needed if not (engine_path / name).is_file()]
    if missing:
        raise IntegrityError(
            f"{engine_path} is not a complete {facts.get('target')} engine",
            problems=missing,
            hint="Build it with 'trtpipe compile CONFIG'.",
        )
    served = (path for name in ("engine", "checkpoint", "model") for path in (engine_path / name).rglob("*"))
    return facts | {"size_bytes": sum(path.stat().st_size for path in served if path.is_file())}
