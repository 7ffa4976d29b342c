"""Old engine repositories to migrate; repositories/ holds them as files."""

from __future__ import annotations

import shutil
from pathlib import Path

OLD = Path(__file__).resolve().parent / "repositories"


def edited(tmp_path: Path, old: str, new: str, file: str = "tensorrt_llm/config.pbtxt") -> Path:
    """A copy of our repository with one text replaced."""
    copy = tmp_path / "old"
    shutil.copytree(OLD / "ours", copy)
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    return copy
