"""A warm-up request in config.pbtxt: Triton runs it before the model is READY, and a failed one fails the load.

It is valid for decoupled models: Triton waits for the final flag (triton-inference-server/core
src/backend_model_instance.cc@006804e; tried on 2.51 with a decoupled Python model). Zeros would do for ids, but a
prompt length of zero would not, so lengths come from files in the model's `warmup` directory. An ensemble cannot
have one (server#6326).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pipeline.triton.model_config import ModelConfig, data_type

PROMPT_TOKENS: Final = 8
OUTPUT_TOKENS: Final = 4
_DIRECTORY: Final = "warmup"


def _lengths(limits: Mapping[str, int]) -> dict[str, int]:
    """Prompt and output length; an engine for very short sequences gets shorter ones."""
    prompt = max(1, min(PROMPT_TOKENS, limits["max_seq_len"] // 2))
    return {"input_lengths": prompt, "request_output_len": max(1, min(OUTPUT_TOKENS, limits["max_seq_len"] - prompt))}


def add_warm_up(core: ModelConfig, limits: Mapping[str, int]) -> None:
    """Add one sample: a prompt of zeros (any id is a token) and a few tokens of output."""
    sample = core.model_warmup.add(name="one_short_request", batch_size=1, count=1)
    lengths = _lengths(limits)
    ids = sample.inputs["input_ids"]
    ids.data_type, ids.zero_data = data_type("TYPE_INT32"), True
    ids.dims[:] = [lengths["input_lengths"]]
    for name in lengths:
        entry = sample.inputs[name]
        entry.data_type, entry.input_data_file = data_type("TYPE_INT32"), name
        entry.dims[:] = [1]


def write_warm_up_data(model: Path, limits: Mapping[str, int]) -> None:
    """Write the files that the sample names: one little-endian int32 each."""
    directory = model / _DIRECTORY
    directory.mkdir(parents=True)
    for name, value in _lengths(limits).items():
        (directory / name).write_bytes(struct.pack("<i", value))
