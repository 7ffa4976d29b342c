"""Walks `trtpipe matrix --sources` on a tiny model: what it makes is made and proven, the rest is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import stages
from pipeline.config.load import load
from pipeline.core.artifacts import VerificationReport
from pipeline.core.digest import FileHasher
from pipeline.core.progress import Silent
from pipeline.core.runner import run
from pipeline.core.store import Store
from pipeline.coverage import Row, rows
from pipeline.errors import ConfigError
from pipeline.examine import examine
from pipeline.quantize.proof import read_report
from tests.support.checkpoints import tiny_llama

pytestmark = pytest.mark.heavy

CONFIG = """\
name: tiny
source:
  path: {source}
quantization:
  format: {form}
  group_size: {group_size}
calibration:
  num_samples: 4
  max_seq_len: 64
verify:
  num_tokens: 256
  min_top1_agreement: 0.05
engine:
  target: {target}
  gpu: H100
  dtype: {dtype}
  max_batch_size: 4
  max_num_tokens: 256
  max_seq_len: 256
{serving}"""
OF_16_BIT = [row for row in rows() if row.source == "16-bit checkpoint"]
MADE = [row for row in OF_16_BIT if row.verdict == "made"]
REFUSED = [row for row in OF_16_BIT if row.verdict == "refused"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with as many KV heads as heads, which every format takes."""
    return tiny_llama(tmp_path_factory.mktemp("source") / "checkpoint", kv_heads=4)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store, so that targets share what they can."""
    return tmp_path_factory.mktemp("store")


def _config(directory: Path, source: Path, row: Row) -> Path:
    path = directory / "tiny.yaml"
    text = CONFIG.format(
        source=source,
        form=row.format,
        group_size=128 if row.format == "w4a8_awq" else 64,
        target=row.target,
        dtype="float16" if row.format == "fp16" else "bfloat16",
        serving="" if row.target == "vllm" else "serving:\n  default_max_tokens: 32\n",
    )
    path.write_text(text)
    return path


def _name(row: Row) -> str:
    return f"{row.format}-{row.target}"


@pytest.mark.parametrize("row", MADE, ids=_name)
def test_what_is_made_is_made_and_proven(row: Row, source: Path, store: Path, tmp_path: Path) -> None:
    """Built until verify, which checks every layer against the formula of its format."""
    hasher = FileHasher(tmp_path / "stat-cache.json")
    build = examine(load(_config(tmp_path, source, row)), hasher)
    build.require_possible()
    results = run(stages.steps(build, hasher, store), Store(store), Silent(), until="verify")
    verification = results["verify"].artifact
    assert isinstance(verification, VerificationReport)
    report = read_report(verification.path)
    assert report["passed"]
    assert report["format"] == row.format


@pytest.mark.parametrize("row", REFUSED, ids=_name)
def test_what_is_refused_is_refused_before_anything_runs(row: Row, source: Path, tmp_path: Path) -> None:
    """By the config alone, with the reason that the matrix gives."""
    build = examine(load(_config(tmp_path, source, row)), FileHasher(tmp_path / "stat-cache.json"))
    with pytest.raises(ConfigError) as caught:
        build.require_possible()
    said = " ".join(f"{problem.message} {problem.hint}" for problem in caught.value.problems)
    assert row.why in said
