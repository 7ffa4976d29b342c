"""A source is found and identified, or refused with what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pipeline.checkpoints.resolve import ResolvedSource, resolve
from pipeline.config.schema import SourceConfig
from pipeline.core.digest import FileHasher
from pipeline.errors import (
    BadGGUF,
    BadSafetensors,
    BadTokenizer,
    ConfigError,
    SourceNotFound,
    TrtpipeError,
    Unreadable,
    UnsafeCheckpoint,
)
from tests.support.checkpoint_files import TinyGguf, write_checkpoint, write_tensors

pytestmark = pytest.mark.fast

SHAPES = {"model.embed_tokens.weight": [512, 16]}


def found(**source: object) -> ResolvedSource:
    """Resolve a source that reads every byte."""
    return resolve(SourceConfig.model_validate(source), FileHasher(None))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a small valid checkpoint directory."""
    return write_checkpoint(tmp_path / "checkpoint", SHAPES)


def test_a_directory_is_used_as_it_is(checkpoint: Path) -> None:
    """A valid checkpoint needs no import and lists the files that make it up."""
    (checkpoint / "README.md").write_text("not part of it")
    source = found(path=checkpoint)
    assert (source.kind, source.location, source.needs_import, source.problems) == ("directory", checkpoint, False, ())
    assert source.files == ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def test_identity_follows_content_and_not_the_place(checkpoint: Path, tmp_path: Path) -> None:
    """A moved copy is the same source; a changed byte is another."""
    copy = write_checkpoint(tmp_path / "elsewhere", SHAPES)
    assert found(path=copy).identity == found(path=checkpoint).identity
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert found(path=copy).identity != found(path=checkpoint).identity


def test_files_that_are_not_the_model_do_not_change_its_identity(checkpoint: Path) -> None:
    """A README or a pickle beside the safetensors is ignored."""
    before = found(path=checkpoint).identity
    (checkpoint / "README.md").write_text("x")
    (checkpoint / "pytorch_model.bin").write_bytes(b"x")
    assert found(path=checkpoint).identity == before


def test_a_snapshot_of_symlinks_is_used(checkpoint: Path, tmp_path: Path) -> None:
    """The layout of the hub's cache is a directory of links to blobs."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in checkpoint.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert found(path=snapshot).identity == found(path=checkpoint).identity


def test_a_dangling_symlink_is_named(checkpoint: Path, tmp_path: Path) -> None:
    """A cache whose blob was removed is not called missing weights."""
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(Unreadable, match=r"'model\.safetensors' is a symlink to a file that is not there"):
        found(path=checkpoint)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickle_weights_are_refused_with_the_way_to_convert_them(checkpoint: Path, name: str) -> None:
    """Loading a pickle runs its code, so it is never loaded."""
    (checkpoint / "model.safetensors").rename(checkpoint / name)
    with pytest.raises(UnsafeCheckpoint, match="safe_serialization=True") as failure:
        found(path=checkpoint)
    assert name in str(failure.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused_until_the_config_allows_it_by_name(checkpoint: Path, file: str) -> None:
    """auto_map is an error that names the file and the key; with the key set the code joins the identity."""
    document = json.loads((checkpoint / file).read_text())
    (checkpoint / file).write_text(json.dumps(document | {"auto_map": {"AutoModel": "modeling.Model"}}))
    (checkpoint / "modeling.py").write_text("raise SystemExit")
    with pytest.raises(UnsafeCheckpoint, match=rf"{file}: 'auto_map'.*(?s:.*)source\.trust_remote_code: true"):
        found(path=checkpoint)
    assert "modeling.py" in found(path=checkpoint, trust_remote_code=True).files


def test_a_quantized_checkpoint_tells_its_method(checkpoint: Path) -> None:
    """Whether it can be used is judged where it is read."""
    assert found(path=checkpoint).quant_method is None
    document = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(document | {"quantization_config": {"quant_method": "awq"}}))
    assert found(path=checkpoint).quant_method == "awq"


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("config.json", None, SourceNotFound, "config.json is missing"),
        ("config.json", b"{", Unreadable, "config.json: not JSON"),
        ("config.json", b"[]", Unreadable, "expected a JSON object"),
        ("model.safetensors", None, SourceNotFound, "neither model.safetensors nor"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", BadSafetensors, "Git LFS pointer"),
        ("model.safetensors", bytes(64), BadSafetensors, "not JSON"),
        ("tokenizer.json", None, BadTokenizer, "no tokenizer"),
    ],
)
def test_each_broken_file_has_its_own_error(
    checkpoint: Path, name: str, content: bytes | None, error: type[TrtpipeError], words: str
) -> None:
    """What is absent, not JSON, a pointer or truncated is told apart."""
    if content is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_bytes(content)
    with pytest.raises(error, match=words):
        found(path=checkpoint)


def test_a_misspelt_path_suggests_its_neighbour(checkpoint: Path) -> None:
    """The nearest name beside it is offered."""
    with pytest.raises(SourceNotFound, match=f"Did you mean '{checkpoint}'"):
        found(path=checkpoint.with_name("chekpoint"))


def test_a_gguf_file_needs_an_import(tmp_path: Path) -> None:
    """A GGUF is identified by its content, wherever it lies."""
    file = TinyGguf().write(tmp_path / "model.gguf")
    source = found(gguf=file)
    assert (source.kind, source.location, source.needs_import, source.files) == ("gguf", file, True, ())
    assert source.identity == {"format": "gguf", "digest": FileHasher(None).digest(file)}


def test_a_gguf_named_as_path_points_to_the_right_key(tmp_path: Path) -> None:
    """The other key is suggested."""
    file = TinyGguf().write(tmp_path / "model.gguf")
    with pytest.raises(SourceNotFound, match=r"source\.gguf"):
        found(path=file)


def test_a_directory_named_as_gguf_lists_its_files(tmp_path: Path) -> None:
    """What could have been meant is listed."""
    TinyGguf().write(tmp_path / "model.gguf")
    with pytest.raises(SourceNotFound, match=r"GGUF files in it: model\.gguf"):
        found(gguf=tmp_path)


def test_a_file_of_another_kind_is_no_gguf(tmp_path: Path) -> None:
    """The first bytes decide, before anything is hashed."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04")
    with pytest.raises(BadGGUF, match="not a GGUF file"):
        found(gguf=file)


@pytest.mark.parametrize("source", [{}, {"path": "a", "hub": "b/c"}, {"file": "x"}])
def test_exactly_one_kind_of_source_is_needed(source: dict[str, str]) -> None:
    """None and two are both errors."""
    with pytest.raises(ConfigError, match="exactly one of path, hub, gguf and package"):
        found(**source)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install, on the import path, a distribution that ships a GGUF and a checkpoint directory."""
    site = tmp_path / "site"
    module = site / "shipped_models"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("raise SystemExit('imported')")
    TinyGguf().write(module / "tiny.Q8_0.gguf")
    write_checkpoint(module / "hf", SHAPES)
    names = [str(file.relative_to(site)) for file in module.rglob("*") if file.is_file()]
    info = site / "shipped_models-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shipped-models\nVersion: 1.2\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in [*names, "shipped_models/lost.gguf"]))
    monkeypatch.syspath_prepend(site)
    return module


@pytest.mark.parametrize("name", ["shipped_models/tiny.Q8_0.gguf", "tiny.Q8_0.gguf"])
def test_a_file_of_an_installed_package_is_found_without_importing_it(package: Path, name: str) -> None:
    """The distribution's file list is enough."""
    source = found(package="shipped-models", file=name)
    assert (source.kind, source.location, source.needs_import) == ("package", package / "tiny.Q8_0.gguf", True)
    assert source.origin == "package shipped-models 1.2: shipped_models/tiny.Q8_0.gguf"
    assert "shipped_models" not in sys.modules


def test_a_directory_of_an_installed_package_is_found(package: Path) -> None:
    """A checkpoint directory inside a package is used as it is."""
    source = found(package="shipped-models", file="shipped_models/hf")
    assert (source.location, source.needs_import) == (package / "hf", False)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (None, r"source\.file is needed"),
        ("tiny.Q4_0.gguf", r"there is no 'tiny\.Q4_0\.gguf'(?s:.*)Did you mean 'shipped_models/tiny\.Q8_0\.gguf'"),
        ("lost.gguf", "in its file list and not on disk"),
    ],
)
def test_a_file_that_a_package_lacks_lists_what_it_has(package: Path, file: str | None, words: str) -> None:
    """The checkpoints inside are listed, and a near name offered."""
    with pytest.raises(SourceNotFound, match=words):
        found(package="shipped-models", file=file)


def test_a_package_that_is_not_installed_suggests_a_near_one(package: Path) -> None:
    """The nearest installed distribution is offered."""
    assert package.exists()
    with pytest.raises(SourceNotFound, match=r"not installed here(?s:.*)Did you mean 'shipped-models'"):
        found(package="shiped-models", file="x")


def test_shards_are_part_of_the_files(checkpoint: Path) -> None:
    """The index and its shards are listed, and a stray shard is not."""
    (checkpoint / "model.safetensors").unlink()
    write_tensors(checkpoint / "model-00001-of-00001.safetensors", SHAPES)
    write_tensors(checkpoint / "stray.safetensors", SHAPES)
    index = {"weight_map": dict.fromkeys(SHAPES, "model-00001-of-00001.safetensors")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    files = found(path=checkpoint).files
    assert "model-00001-of-00001.safetensors" in files
    assert "model.safetensors.index.json" in files
    assert "stray.safetensors" not in files
