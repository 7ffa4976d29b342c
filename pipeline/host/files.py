"""Files that are either all there or not there, and what to say when a disk is full.

Everything is written beside its destination, flushed to the disk, and then renamed: a process that
dies leaves the old state or the new one.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import DiskFull, HostError, TrtpipeError

MIB = 2**20
# A directory that trtpipe wrote holds this file, made by "trtpipe"; only such a directory may be replaced.
OWNERSHIP_FILE = "provenance.json"
OWNER = "trtpipe"

_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or all of the new.

    Raises:
        DiskFull: the file system is full; the old content stays.
    """
    staging = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with disk_errors(path.parent):
        try:
            with staging.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            staging.replace(path)
            fsync(path.parent)
        finally:
            staging.unlink(missing_ok=True)


def commit_directory(staging: Path, final: Path) -> None:
    """Put the directory `staging` where `final` is, in one step; what was there before is removed.

    Both lie in one file system. Nothing is replaced that trtpipe did not write: `final` must be absent,
    empty, or carry our provenance.json.

    Raises:
        HostError: `final` is a file or somebody else's directory; nothing was changed.
        DiskFull: the file system is full; `final` is as it was.
    """
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise HostError(f"{final} exists and is not a directory", hint="Name another output directory.")
    if final.is_dir() and any(final.iterdir()) and not is_ours(final):
        raise HostError(
            f"{final} is not empty and was not written by trtpipe, so it is not replaced",
            hint="Name another output directory, or remove this one yourself.",
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(final.parent):
        fsync_tree(staging)
        if final.is_dir():
            _exchange(staging, final)
            shutil.rmtree(staging)
        else:
            staging.rename(final)
        fsync(final.parent)


def is_ours(directory: Path) -> bool:
    """Tell whether trtpipe wrote this directory."""
    try:
        document = json.loads((directory / OWNERSHIP_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("made_by") == OWNER


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories atomically; where the kernel cannot, in three renames."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(one), None, str(other))
    aside = one.with_name(f"{one.name}.old")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def link_or_copy(source: Path, destination: Path) -> None:
    """Hard-link a file, or every file of a tree, and copy where linking is not possible.

    A linked file shares its bytes: link only from and to places where nobody edits in place, such as
    from an artifact into a new one. Parents of `destination` are made; a symlink is copied as the file
    it points to.
    """
    with disk_errors(destination.parent):
        if source.is_dir():
            destination.mkdir(parents=True, exist_ok=True)
            for child in sorted(source.iterdir()):
                link_or_copy(child, destination / child.name)
            return
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source.resolve(), destination)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise
            shutil.copyfile(source, destination)


def fsync(path: Path) -> None:
    """Flush one file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Flush a directory and everything below it to the disk."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            fsync(Path(folder, name))
        fsync(Path(folder))


def require_free_space(path: Path, n_bytes: int) -> None:
    """Check before heavy work that the file system of `path` can take `n_bytes` more.

    Raises:
        DiskFull: it cannot; names the file system, what is free and what is needed.
    """
    place = _nearest_existing(path)
    free = shutil.disk_usage(place).free
    if free < n_bytes:
        raise DiskFull(
            f"{_file_system(place)} has {format_bytes(free)} free and {format_bytes(n_bytes)} are needed for {path}",
            hint=_DISK_HINT,
        )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, met anywhere inside, into DiskFull that names the file system of `path`.

    Libraries hide the cause in different ways: an OSError somewhere in the chain, only its text, or a
    vague failure beside a file system with nothing left; all three are recognised.
    """
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        if _means_full(error, path):
            place = _nearest_existing(path)
            free = format_bytes(shutil.disk_usage(place).free)
            raise DiskFull(
                f"{_file_system(place)} is full ({free} free) while writing below {path}", hint=_DISK_HINT
            ) from error
        raise


_DISK_HINT = "Free space there (`trtpipe cache gc` removes what no build needs) or use a store on another disk."


def _means_full(error: BaseException, path: Path) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _OUT_OF_SPACE:
            return True
        if os.strerror(errno.ENOSPC) in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, TrtpipeError):
        return False
    return shutil.disk_usage(_nearest_existing(path)).free < MIB


def _nearest_existing(path: Path) -> Path:
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place


def _file_system(path: Path) -> str:
    """Name the mount point and device of a path, such as "/data (/dev/sda1)"."""
    mount = path.resolve()
    while not mount.is_mount():
        mount = mount.parent
    with suppress(OSError):
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            device, mounted_at = line.split()[:2]
            if mounted_at.replace("\\040", " ") == str(mount):
                return f"{mount} ({device})"
    return str(mount)


def format_bytes(n_bytes: float) -> str:
    """Format a size with a binary unit, such as "1.5 GiB"."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:  # noqa: PLR2004 - the base of binary units
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
