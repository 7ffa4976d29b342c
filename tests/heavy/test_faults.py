"""Broken inputs, each with its own words and exit code, through the real command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.store import Store
from tests.support.checkpoints import tiny_llama
from tests.support.commands import Outcome, trtpipe, write_config

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy tiny checkpoint; tests break copies of it."""
    return tiny_llama(tmp_path_factory.mktemp("healthy") / "checkpoint")


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def _refused(source: Path, code: int, *arguments: str) -> Outcome:
    directory = source.parent
    outcome = trtpipe("build", write_config(directory, source), *arguments, cwd=directory, code=code)
    assert "Traceback" not in outcome.stderr
    assert not (directory / "build").exists()
    return outcome


def test_missing_source(tmp_path: Path) -> None:
    """The path is named."""
    assert "nowhere" in _refused(tmp_path / "nowhere", 21).stderr


def test_truncated_safetensors(broken: Path) -> None:
    """The file and both sizes are named, before anything runs."""
    weights = broken / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    assert "model.safetensors" in _refused(broken, 23).stderr


def test_pickle_weights(broken: Path) -> None:
    """A .bin checkpoint is never opened."""
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    assert "pickle" in _refused(broken, 26).stderr


def test_remote_code(broken: Path) -> None:
    """`auto_map` is refused and the key that allows it is named."""
    config = (broken / "config.json").read_text()
    (broken / "config.json").write_text(config.replace("{", '{"auto_map": {"AutoModel": "evil.Model"},', 1))
    assert "trust_remote_code" in _refused(broken, 26).stderr


def test_tokenizer_of_another_model(broken: Path) -> None:
    """A tokenizer with ids beyond the embedding rows is refused."""
    path = broken / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["far"] = 9999
    path.write_text(json.dumps(tokenizer))
    assert "9999" in _refused(broken, 25).stderr


def test_bad_gguf(tmp_path: Path) -> None:
    """A file that is no GGUF says what it starts with."""
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    config = tmp_path / "tiny.yaml"
    config.write_text("name: tiny\nsource:\n  gguf: model.gguf\n")
    outcome = trtpipe("build", config, cwd=tmp_path, code=24)
    assert "model.gguf" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_unreadable_file(broken: Path) -> None:
    """Even root is refused by a file that is a directory; the file is named."""
    weights = broken / "model.safetensors"
    weights.unlink()
    weights.mkdir()
    assert "model.safetensors" in _refused(broken, 22).stderr


def test_group_size_that_fits_no_layer(broken: Path) -> None:
    """The legality table refuses before any weight is read, and names a size that fits."""
    outcome = _refused(broken, 3, "--set", "quantization.group_size=96")
    assert "group_size" in outcome.stderr


def test_unknown_key_names_line_and_nearest(broken: Path) -> None:
    """A misspelt key is an error with file:line and the nearest name."""
    config = write_config(broken.parent, broken)
    config.write_text(config.read_text().replace("max_batch_size", "max_batchsize"))
    outcome = trtpipe("build", config, cwd=broken.parent, code=3)
    assert "tiny.yaml:14 engine.max_batchsize" in outcome.stderr
    assert "max_batch_size" in outcome.stderr


def test_disk_full_is_said_and_leaves_nothing(checkpoint: Path, tmp_path: Path, small_disk: Path) -> None:
    """A store on a full file system ends with 20 and no half-written artifact."""
    config = write_config(tmp_path, checkpoint)
    outcome = trtpipe("build", config, "--store", small_disk / "store", cwd=tmp_path, code=20)
    assert str(small_disk) in outcome.stderr
    assert not [path for path in (small_disk / "store" / "work").iterdir() if path.is_dir()]
    finished = Store(small_disk / "store")
    assert {record.action.step for record in finished.records()} <= {"calibrate"}
    assert not any(finished.damage(digest) for digest in finished.digests())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    made = subprocess.run(argv, capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)
