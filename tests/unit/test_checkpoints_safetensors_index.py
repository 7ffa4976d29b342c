"""Broken safetensors files are found from their headers, each named with file and tensor."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pipeline.checkpoints.safetensors_index import read_checkpoint, read_header
from pipeline.checkpoints.safetensors_write import TensorSpec, write_shard
from pipeline.errors import BadSafetensors, SourceNotFound, Unreadable
from tests.support.checkpoint_files import safetensors_bytes, write_tensors

pytestmark = pytest.mark.fast


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    """Return a header entry."""
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


def sharded(directory: Path) -> Path:
    """Write two shards and their index; return the index."""
    write_tensors(directory / "model-00001-of-00002.safetensors", {"a": [2, 3]})
    write_tensors(directory / "model-00002-of-00002.safetensors", {"b": [4]})
    index = directory / "model.safetensors.index.json"
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"metadata": {"total_size": 40}, "weight_map": weight_map}))
    return index


def test_headers_agree_with_the_safetensors_library(tmp_path: Path) -> None:
    """A file that the library wrote is read with its names, shapes and bytes."""
    tensors: dict[str, Any] = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.array([1, 2], np.int64)}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    header = read_header(file)
    assert {name: (each.dtype, each.shape) for name, each in header.items()} == {
        "x": ("F32", (2, 3)),
        "y": ("I64", (2,)),
    }
    assert file.read_bytes()[header["x"].start : header["x"].end] == tensors["x"].tobytes()


def test_written_shards_are_read_by_the_safetensors_library(tmp_path: Path) -> None:
    """What the streaming writer makes is what the library expects."""
    values = np.arange(12, dtype=np.float32)
    specs = [TensorSpec(name="one", shape=(2, 3)), TensorSpec(name="two", shape=(6,))]
    parts = {"one": values[:6], "two": values[6:]}
    file = tmp_path / "model.safetensors"
    write_shard(file, specs, lambda spec: (bytes(parts[spec.name][at : at + 2]) for at in (0, 2, 4)))
    loaded = load_file(file)
    assert np.array_equal(loaded["one"], values[:6].reshape(2, 3))
    assert np.array_equal(loaded["two"], values[6:])


def test_shards_are_joined(tmp_path: Path) -> None:
    """A sharded checkpoint is read as one."""
    sharded(tmp_path)
    assert {name: each.shape for name, each in read_checkpoint(tmp_path).items()} == {"a": (2, 3), "b": (4,)}


@given(st.integers(0, 200))
def test_a_file_cut_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, kept: int) -> None:
    """No truncation passes, wherever it cuts."""
    file = tmp_path_factory.mktemp("cut") / "model.safetensors"
    write_tensors(file, {"a": [2, 3], "b": [4, 4]})
    content = file.read_bytes()
    file.write_bytes(content[: min(kept, len(content) - 1)])
    with pytest.raises(BadSafetensors):
        read_header(file)


def test_truncation_names_the_first_tensor_that_is_cut(tmp_path: Path) -> None:
    """The message says which tensor, and how many."""
    file = tmp_path / "model.safetensors"
    write_tensors(file, {"a": [8], "b": [8], "c": [8]})
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(BadSafetensors, match=r"truncated: tensor 'b' ends .* \(2 of 3 tensors are cut\)"):
        read_header(file)


@pytest.mark.parametrize(
    ("header", "size", "words"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "tensors 'a' and 'b' overlap"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "4 bytes between 'a' and 'b'"),
        ({"a": entry(4, 8)}, 8, "4 bytes before tensor 'a'"),
        ({"a": entry(0, 8)}, 12, "4 bytes after the last tensor"),
        ({"a": entry(0, 8, shape=[3])}, 8, r"tensor 'a' \(F32 \[3\]\) needs 12 bytes"),
        ({"a": entry(8, 0, shape=[2])}, 8, "offsets say 8 to 0"),
        ({"a": entry(0, 8, shape=[-2])}, 8, r"tensor 'a' has shape \[-2\]"),
        ({"a": entry(0, 8, dtype="F31")}, 8, "dtype 'F31'"),
        ({"a": {"dtype": "F32"}}, 8, "tensor 'a' has no dtype, shape and data_offsets"),
        ({"a": 3}, 8, "tensor 'a' has no dtype"),
        ([], 8, "not a JSON object"),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, header: Any, size: int, words: str) -> None:
    """Offsets, shapes and dtypes must agree with each other and with the file."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors_bytes(header, bytes(size)))
    with pytest.raises(BadSafetensors, match=words):
        read_header(file)


def test_a_tensor_twice_in_one_header_is_refused(tmp_path: Path) -> None:
    """JSON would keep the last one in silence."""
    one = json.dumps(entry(0, 8))
    raw = f'{{"a": {one}, "a": {one}}}'.encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    with pytest.raises(BadSafetensors, match="'a' is twice in the header"):
        read_header(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes are no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (struct.pack("<Q", 2**63) + b"{}", "claims 9223372036854775808 bytes, at most 100000000"),
        (struct.pack("<Q", 5000) + b"{}", "claims 5000 bytes and the file has 10"),
        (struct.pack("<Q", 4) + b"abcd", "not JSON"),
        (struct.pack("<Q", 4000) + b"[" * 4000, "not JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "not JSON"),
    ],
)
def test_what_is_no_safetensors_file_is_said_to_be_none(tmp_path: Path, content: bytes, words: str) -> None:
    """Each kind of foreign file has its own words."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(BadSafetensors, match=words):
        read_header(file)


def test_an_absurd_header_length_allocates_nothing(tmp_path: Path) -> None:
    """A sparse file of a terabyte with an absurd length is refused before any read of that size."""
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 2**39))
        stream.truncate(2**40)
    with pytest.raises(BadSafetensors, match="at most 100000000"):
        read_header(file)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """An index that names a file that is not there is refused."""
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadSafetensors, match=r"shard 'model-00002-of-00002.safetensors' is missing \(1 of 2"):
        read_checkpoint(tmp_path)


def test_a_tensor_that_the_index_promises_must_be_there(tmp_path: Path) -> None:
    """A shard of another checkpoint is noticed."""
    sharded(tmp_path)
    write_tensors(tmp_path / "model-00002-of-00002.safetensors", {"c": [4]})
    with pytest.raises(BadSafetensors, match=r"tensor 'b' is not in 'model-00002-of-00002\.safetensors'"):
        read_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Which of the two counts is nobody's guess."""
    sharded(tmp_path)
    write_tensors(tmp_path / "model-00002-of-00002.safetensors", {"a": [2, 3], "b": [4]})
    with pytest.raises(BadSafetensors, match=r"tensor 'a' is also in model-00001-of-00002\.safetensors"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "model.bin", 3])
def test_an_index_cannot_point_outside_its_directory(tmp_path: Path, shard: object) -> None:
    """Only safetensors files beside the index are read."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(BadSafetensors, match="is no safetensors file of this directory"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}'])
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    """An index without a weight map is no index."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadSafetensors, match=r"index\.json"):
        read_checkpoint(tmp_path)


def test_absent_weights_list_what_is_there(tmp_path: Path) -> None:
    """Adapters and other files are not taken for the model."""
    write_tensors(tmp_path / "adapter_model.safetensors", {"a": [1]})
    with pytest.raises(SourceNotFound, match=r"Found: adapter_model\.safetensors"):
        read_checkpoint(tmp_path)


def test_a_file_that_cannot_be_read_is_unreadable(tmp_path: Path) -> None:
    """A directory in the place of a file gives the system's reason."""
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(Unreadable, match="cannot be read"):
        read_checkpoint(tmp_path)
