"""A model repository whose one model answers with its prompt: Triton's behaviour without an engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

SOURCE = Path(__file__).parent / "echo_model"


def write_echo_repository(
    folder: Path, *, name: str = "tensorrt_llm_bls", initialize: Literal["", "raise", "die", "hang"] = ""
) -> Path:
    """Add the echo model to the repository `folder`; `initialize` makes its loading fail. Returns `folder`."""
    model = folder / name
    (model / "1").mkdir(parents=True)
    shutil.copy(SOURCE / "model.py", model / "1" / "model.py")
    config = (SOURCE / "config.pbtxt").read_text().replace('"tensorrt_llm_bls"', f'"{name}"')
    if initialize:
        config += f'parameters {{ key: "initialize" value {{ string_value: "{initialize}" }} }}\n'
    (model / "config.pbtxt").write_text(config)
    return folder
