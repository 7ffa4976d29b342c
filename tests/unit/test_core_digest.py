"""Digests: what they see and what they do not."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.digest import JSON, FileHasher, canonical_json, digest_json, digest_tree, manifest
from pipeline.errors import ConfigError, IntegrityError, Unreadable

pytestmark = pytest.mark.fast

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    scalars | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
names = st.text("abcé.-_ ", min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))
trees = st.dictionaries(names, st.binary(min_size=1, max_size=40), min_size=1, max_size=5)


def write(directory: Path, files: dict[str, bytes]) -> Path:
    """Write files into a new directory."""
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def age(path: Path, seconds: float = 60) -> None:
    """Make a file look old enough to be remembered; its ctime follows the clock, so wait for that."""
    os.utime(path, (time.time() - seconds,) * 2)


def strict(value: object) -> object:
    """Tag every value with its type, so that 1, 1.0 and True are three things and list order counts."""
    if isinstance(value, dict):
        return ("dict", frozenset((key, strict(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("list", tuple(strict(item) for item in value))
    return (type(value).__name__, repr(value))


@given(values, values)
def test_canonical_json_is_injective(one: JSON, other: JSON) -> None:
    """Two values have one encoding exactly when they are the same value."""
    assert (canonical_json(one) == canonical_json(other)) == (strict(one) == strict(other))


@given(st.dictionaries(text, values, min_size=2, max_size=6))
def test_canonical_json_ignores_the_order_of_keys(value: dict[str, JSON]) -> None:
    """A mapping written in reverse order encodes to the same bytes."""
    assert canonical_json(dict(reversed(list(value.items())))) == canonical_json(value)


@given(values)
def test_canonical_json_is_json(value: JSON) -> None:
    """Any JSON reader gets the value back."""
    assert strict(json.loads(canonical_json(value))) == strict(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: "a"}, {"a": {2}}, Path("a"), b"a", "\ud800"])
def test_a_value_that_is_not_json_is_refused(value: Any) -> None:
    """Nothing is bent into JSON silently."""
    with pytest.raises(ConfigError, match="cannot be part of a digest"):
        canonical_json({"outer": [value]})


def test_a_refused_value_is_named_by_its_place() -> None:
    """The message leads to the value."""
    with pytest.raises(ConfigError, match=r"value\.layers\[1\]\.scale"):
        digest_json({"layers": [{}, {"scale": float("nan")}]})


def test_a_tree_digest_has_the_known_value(tmp_path: Path) -> None:
    """The digest of a given tree never changes while SCHEME stays."""
    write(tmp_path / "tree", {"b": b"two", "a": b"one"})
    assert digest_tree(tmp_path / "tree") == digest_json(
        {
            "a": [3, "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"],
            "b": [3, "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3"],
        }
    )


@given(files=trees, data=st.data())
def test_a_flipped_bit_changes_the_digest(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], data: st.DataObject
) -> None:
    """Any single bit of any file counts."""
    tree = write(tmp_path_factory.mktemp("tree") / "t", files)
    before = digest_tree(tree)
    name = data.draw(st.sampled_from(sorted(files)))
    content = bytearray(files[name])
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (tree / name).write_bytes(content)
    assert digest_tree(tree) != before


@given(files=trees)
def test_place_time_and_mode_do_not_count(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    """A copy elsewhere with other times and modes has the same digest."""
    base = tmp_path_factory.mktemp("trees")
    one, other = write(base / "one", files), write(base / "other", dict(reversed(files.items())))
    for path in other.iterdir():
        os.utime(path, (1, 1))
        path.chmod(0o755)
    assert digest_tree(other) == digest_tree(one)


def test_a_renamed_file_changes_the_digest(tmp_path: Path) -> None:
    """Names are part of the content."""
    assert digest_tree(write(tmp_path / "one", {"a": b"x"})) != digest_tree(write(tmp_path / "two", {"b": b"x"}))


def test_an_empty_directory_counts(tmp_path: Path) -> None:
    """Triton needs empty version directories, so losing one is a change."""
    tree = write(tmp_path / "tree", {"a": b"x"})
    before = digest_tree(tree)
    (tree / "ensemble" / "1").mkdir(parents=True)
    assert digest_tree(tree) != before
    assert "ensemble/1/" in manifest(tree)


def test_manifest_and_provenance_count_only_below_the_root(tmp_path: Path) -> None:
    """The files that describe the tree are not part of it; files of that name deeper are."""
    tree = write(tmp_path / "tree", {"a": b"x"})
    before = digest_tree(tree)
    for name in ("manifest.json", "provenance.json"):
        (tree / name).write_text("{}")
    assert digest_tree(tree) == before
    (tree / "sub").mkdir()
    (tree / "sub" / "manifest.json").write_text("{}")
    assert digest_tree(tree) != before


@pytest.mark.parametrize("target", ["a", "missing", "."])
def test_a_symlink_is_refused_by_name(tmp_path: Path, target: str) -> None:
    """A link to a file, to nothing or to a directory is an error that names it."""
    tree = write(tmp_path / "tree", {"a": b"x"})
    (tree / "link").symlink_to(target)
    with pytest.raises(IntegrityError, match="link is a symlink"):
        digest_tree(tree)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """Hashing never blocks on a named pipe."""
    tree = write(tmp_path / "tree", {"a": b"x"})
    os.mkfifo(tree / "pipe")
    with pytest.raises(IntegrityError, match="neither a file nor a directory"):
        digest_tree(tree)


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    """A missing file and a directory are both Unreadable."""
    with pytest.raises(Unreadable, match=str(tmp_path)):
        FileHasher(None).digest(tmp_path / name)


class CountingHasher(FileHasher):
    """Counts how many hashes were remembered."""

    remembered = 0

    def _remember(self, name: str, identity: tuple[int, ...], sha256: str) -> None:
        self.remembered += 1
        super()._remember(name, identity, sha256)


def backdate(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the hasher believe that it runs `seconds` later."""
    now = time.time_ns
    monkeypatch.setattr("pipeline.core.digest.time.time_ns", lambda: now() + int(seconds * 1e9))


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second hasher answers from the cache file: it does so even for content swapped under the same stat."""
    file, cache = tmp_path / "weights", tmp_path / "cache.json"
    file.write_bytes(b"one")
    backdate(monkeypatch, 10)
    digest = FileHasher(cache).digest(file)
    path, identity, _ = json.loads(cache.read_text())
    cache.write_text(json.dumps([path, identity, "0" * 64]) + "\n")
    assert FileHasher(cache).digest(file) == "sha256:" + "0" * 64
    assert FileHasher(None).digest(file) == digest


def test_a_freshly_written_file_is_not_remembered(tmp_path: Path) -> None:
    """A file touched within two seconds of being hashed could change again under the same times."""
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    hasher = CountingHasher(tmp_path / "cache.json")
    hasher.digest(file)
    assert hasher.remembered == 0


def test_an_old_mtime_does_not_make_a_fresh_file_trusted(tmp_path: Path) -> None:
    """A program can set mtime back but not ctime, and ctime counts too."""
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    age(file)
    hasher = CountingHasher(tmp_path / "cache.json")
    hasher.digest(file)
    assert hasher.remembered == 0


def test_a_rewrite_with_the_same_size_and_mtime_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stat cache also compares ctime."""
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    status = file.stat()
    backdate(monkeypatch, 10)
    hasher = CountingHasher(tmp_path / "cache.json")
    before = hasher.digest(file)
    assert hasher.remembered == 1
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hasher.digest(file) != before


def test_a_torn_cache_line_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache cut off in the middle of a line, or full of other things, is skipped line by line."""
    file, cache = tmp_path / "weights", tmp_path / "cache.json"
    file.write_bytes(b"one")
    backdate(monkeypatch, 10)
    digest = FileHasher(cache).digest(file)
    cache.write_text('{"other": 1}\n[1]\n7\n' + cache.read_text() + cache.read_text()[:20])
    assert FileHasher(cache).digest(file) == digest


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory of hashes must not fail a build."""
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    backdate(monkeypatch, 10)
    assert FileHasher(file / "cache.json").digest(file) == FileHasher(None).digest(file)
