"""Real quantized checkpoints of a tiny model, made once per test session and copied per test."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from pipeline.config.schema import CalibrationConfig, Format, QuantizationConfig, VerifyConfig
from pipeline.core.artifacts import QuantizedCheckpoint, SourceCheckpoint
from pipeline.quantize.formats import WantedCheckpoint
from tests.support.checkpoints import tiny_llama
from tests.support.making import make_quantized

TEXT = "The capital of France is Paris {0} and the capital of Italy is Rome, said the quick brown fox {1} times."


@cache
def tiny_source() -> SourceCheckpoint:
    """A tiny Llama with random weights and, beside it, text.jsonl."""
    directory = tiny_llama(Path(mkdtemp()) / "source")
    rows = [json.dumps({"text": TEXT.format(number, number * number)}) for number in range(100)]
    (directory / "text.jsonl").write_text("\n".join(rows))
    return SourceCheckpoint(path=directory, digest="sha256:source")


def held_text() -> VerifyConfig:
    """Verification on the text beside the tiny source, 256 tokens of it."""
    return VerifyConfig(dataset=tiny_source().path / "text.jsonl", num_tokens=256)


@cache
def _quantized(format_: Format, export: str, awq: str) -> Path:

    out = Path(mkdtemp()) / format_
    make_quantized(
        tiny_source(),
        QuantizationConfig(format=format_, group_size=64, awq=awq),  # type: ignore[arg-type]
        CalibrationConfig(dataset=tiny_source().path / "text.jsonl", num_samples=8, max_seq_len=64),
        WantedCheckpoint(export=export),
        out,
    )
    return out


def tiny_quantized(format_: Format, directory: Path, export: str = "hf", *, awq: str = "lite") -> QuantizedCheckpoint:
    """Copy the tiny model in `format_` (int4_awq in groups of 64) to a directory that a test may damage."""
    shutil.copytree(_quantized(format_, export, awq), directory)
    return QuantizedCheckpoint(path=directory, digest="sha256:quantized")
