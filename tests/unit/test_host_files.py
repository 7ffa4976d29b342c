"""Files that are all there or not there."""

from __future__ import annotations

import ctypes
import errno
import json
import os
from pathlib import Path

import pytest

from pipeline.errors import DiskFull, HostError, StoreBusy, VerificationError
from pipeline.host.files import (
    commit_directory,
    disk_errors,
    format_bytes,
    link_or_copy,
    require_free_space,
    write_atomic,
)
from pipeline.host.locks import hold

pytestmark = pytest.mark.fast


def directory(path: Path, content: str, *, ours: bool = True) -> Path:
    """Make a directory with one file, with or without our provenance."""
    path.mkdir(parents=True)
    (path / "file").write_text(content)
    if ours:
        (path / "provenance.json").write_text(json.dumps({"made_by": "trtpipe"}))
    return path


def test_write_atomic_replaces_content(tmp_path: Path) -> None:
    """The new content is there and nothing else is."""
    write_atomic(tmp_path / "file", b"old")
    write_atomic(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"new")]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full at flushing, the old file stays and the temporary one goes."""
    write_atomic(tmp_path / "file", b"old")

    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pipeline.host.files.os.fsync", fail)
    with pytest.raises(DiskFull):
        write_atomic(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


@pytest.mark.parametrize("before", ["absent", "empty", "ours"])
def test_a_directory_is_committed(tmp_path: Path, before: str) -> None:
    """It takes the place of nothing, of an empty directory, or of an earlier one of ours."""
    final = tmp_path / "deep" / "final"
    if before == "empty":
        final.mkdir(parents=True)
    if before == "ours":
        directory(final, "old")
        (final / "stale").write_text("x")
    commit_directory(directory(tmp_path / "staging", "new"), final)
    assert sorted(path.name for path in final.iterdir()) == ["file", "provenance.json"]
    assert (final / "file").read_text() == "new"
    assert not (tmp_path / "staging").exists()


def test_a_directory_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    """A non-empty directory without our provenance stays as it is."""
    final = directory(tmp_path / "final", "precious", ours=False)
    (final / "provenance.json").write_text('{"made_by": "somebody"}')
    with pytest.raises(HostError, match="was not written by trtpipe"):
        commit_directory(directory(tmp_path / "staging", "new"), final)
    assert (final / "file").read_text() == "precious"
    assert (tmp_path / "staging" / "file").read_text() == "new"


@pytest.mark.parametrize("kind", ["file", "symlink"])
def test_only_a_directory_is_replaced(tmp_path: Path, kind: str) -> None:
    """A file or a link at the destination is refused."""
    final = tmp_path / "final"
    if kind == "file":
        final.write_text("x")
    else:
        final.symlink_to(directory(tmp_path / "elsewhere", "x"))
    with pytest.raises(HostError, match="is not a directory"):
        commit_directory(directory(tmp_path / "staging", "new"), final)


def test_directories_swap_where_the_kernel_cannot_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback of three renames ends in the same state."""

    class NoExchange:
        @staticmethod
        def renameat2(*_args: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr("pipeline.host.files.ctypes.CDLL", lambda *_args, **_kwargs: NoExchange)
    final = directory(tmp_path / "final", "old")
    commit_directory(directory(tmp_path / "staging", "new"), final)
    assert (final / "file").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final"]


def test_link_or_copy_shares_the_bytes_of_a_tree(tmp_path: Path) -> None:
    """Files are linked, empty directories kept, symlinks followed."""
    source = directory(tmp_path / "source", "x")
    (source / "1").mkdir()
    (source / "alias").symlink_to("file")
    link_or_copy(source, tmp_path / "copy")
    assert (tmp_path / "copy" / "file").samefile(source / "file")
    assert (tmp_path / "copy" / "1").is_dir()
    assert not (tmp_path / "copy" / "alias").is_symlink()
    assert (tmp_path / "copy" / "alias").read_text() == "x"


def test_link_or_copy_copies_across_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a hard link is impossible the bytes are copied."""

    def fail(*_args: object) -> None:
        raise OSError(errno.EXDEV, "cross-device link")

    monkeypatch.setattr("pipeline.host.files.os.link", fail)
    source = directory(tmp_path / "source", "x")
    link_or_copy(source / "file", tmp_path / "deep" / "file")
    assert (tmp_path / "deep" / "file").read_text() == "x"
    assert not (tmp_path / "deep" / "file").samefile(source / "file")


def test_free_space_is_required_of_the_nearest_existing_parent(tmp_path: Path) -> None:
    """A path that does not exist yet is judged by its file system; the message has both numbers."""
    require_free_space(tmp_path / "new" / "store", 1)
    with pytest.raises(DiskFull, match=r"has .* free and 4294967296\.0 GiB are needed for .*new/store"):
        require_free_space(tmp_path / "new" / "store", 2**62)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "no space"),
        OSError(errno.EDQUOT, "quota"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_every_shape_of_a_full_disk_is_recognised(tmp_path: Path, error: Exception) -> None:
    """An errno or its text, direct or as the cause of another exception."""
    with pytest.raises(DiskFull, match="is full"), disk_errors(tmp_path):
        raise error
    with pytest.raises(DiskFull, match="is full"), disk_errors(tmp_path):
        raise ValueError("outer") from error


def test_other_errors_pass(tmp_path: Path) -> None:
    """A failure that is not about space keeps its type."""
    with pytest.raises(VerificationError), disk_errors(tmp_path):
        raise VerificationError("SQNR")
    with pytest.raises(PermissionError), disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "denied")


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**29, "1.5 GiB"), (2**41, "2048.0 GiB")],
)
def test_sizes_read_as_binary_units(n_bytes: int, text: str) -> None:
    """Bytes are told in the unit that fits."""
    assert format_bytes(n_bytes) == text


def test_a_lock_excludes_and_is_released(tmp_path: Path) -> None:
    """A second holder is refused with the first one's process id until the first lets go."""
    busy = pytest.raises(StoreBusy, match=f"process {os.getpid()} still holds")
    with hold(tmp_path / "lock"), busy, hold(tmp_path / "lock"):
        pass
    with hold(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_shared_holders_exclude_only_the_exclusive(tmp_path: Path) -> None:
    """Builds share the store; what wants it alone must wait."""
    with hold(tmp_path / "lock", shared=True), hold(tmp_path / "lock", shared=True):
        alone = hold(tmp_path / "lock")
        with pytest.raises(StoreBusy):
            alone.__enter__()
