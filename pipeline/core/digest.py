"""The only place that decides what "the same" means: canonical JSON, file hashes, tree digests.

Every digest is "sha256:<64 hex>". A tree digest covers sorted relative POSIX paths, sizes and
contents; it never sees times, owners, modes or where the tree lies. An empty directory counts (Triton
needs some); `manifest.json` and `provenance.json` at the root do not, because they describe the tree.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pipeline.errors import ConfigError, IntegrityError, Unreadable

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

SCHEME = 1  # Part of every key: raise it when any digest here would change, and every cache entry becomes a miss.
MANIFEST = "manifest.json"
PROVENANCE = "provenance.json"
PREFIX = "sha256:"

# A file whose clock stands within this of the moment it was hashed may change again unseen ("racy git"
# in git's documentation); file systems with 2 s time stamps exist.
RACY_NS = 2_000_000_000


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 (hex) of one file; an empty directory has size 0 and the hash of nothing."""

    size: int
    sha256: str


Manifest: TypeAlias = Mapping[str, FileEntry]
EMPTY_DIRECTORY = FileEntry(0, hashlib.sha256().hexdigest())


def canonical_json(value: JSON) -> bytes:
    """Encode a JSON value in the one way that digests use: sorted keys, no spaces, UTF-8.

    Two values that differ (also 1 and 1.0, or 1 and true) encode differently; the order of keys and
    list versus tuple do not matter.

    Raises:
        ConfigError: the value is not JSON: another type, a key that is not text, NaN, an infinity or
            text that is not Unicode. The message names the place.
    """
    plain = _plain(value, "value")
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_json(value: JSON) -> str:
    """Return the digest of `canonical_json(value)`."""
    return PREFIX + hashlib.sha256(canonical_json(value)).hexdigest()


def digest_manifest(entries: Manifest) -> str:
    """Return the digest of a tree from its manifest."""
    return digest_json({path: [entry.size, entry.sha256] for path, entry in entries.items()})


def digest_tree(directory: Path, hasher: FileHasher | None = None) -> str:
    """Return the digest of a directory; see the module for what it covers.

    Raises:
        IntegrityError: a symlink or another thing that is neither file nor directory is inside.
    """
    return digest_manifest(manifest(directory, hasher))


def manifest(directory: Path, hasher: FileHasher | None = None) -> dict[str, FileEntry]:
    """Hash every file below `directory`: relative POSIX path -> size and SHA-256.

    Args:
        directory: the root of the tree.
        hasher: remembers hashes of files that did not change; None reads every byte.

    Raises:
        IntegrityError: the tree holds a symlink, a socket or the like; names it.
        Unreadable: a file cannot be read.
    """
    hasher = hasher or FileHasher(None)
    return dict(sorted(_entries(directory, "", hasher)))


def _entries(directory: Path, prefix: str, hasher: FileHasher) -> Iterator[tuple[str, FileEntry]]:
    try:
        with os.scandir(directory) as scan:
            children = list(scan)
    except OSError as error:
        raise Unreadable(f"{directory}: cannot be listed: {error.strerror}") from error
    if not children and prefix:
        yield prefix, EMPTY_DIRECTORY
    for child in children:
        name = prefix + child.name
        if name in (MANIFEST, PROVENANCE):
            continue
        if child.is_symlink():
            raise IntegrityError(
                f"{child.path} is a symlink; an artifact holds only files and directories",
                hint="Put the file it points to there instead.",
            )
        if child.is_dir():
            yield from _entries(Path(child.path), f"{name}/", hasher)
        elif child.is_file():
            yield name, hasher.entry(Path(child.path))
        else:
            raise IntegrityError(
                f"{child.path} is neither a file nor a directory; an artifact holds only those", hint="Remove it."
            )


def _plain(value: object, where: str) -> object:
    """Copy a JSON value into dict and list, refusing what json.dumps would bend silently."""
    match value:
        case None | bool() | int():
            return value
        case float() if math.isfinite(value):
            return value
        case str():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"{where}: {value!r} is not Unicode text and cannot be part of a digest") from error
            return value
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise ConfigError(f"{where}: the key {key!r} is not text and cannot be part of a digest")
            return {_plain(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        case _:
            raise ConfigError(f"{where}: {value!r} ({type(value).__name__}) is not JSON and cannot be part of a digest")


class FileHasher:
    """SHA-256 of files, with a memory of those whose stat did not change since they were hashed.

    The memory only saves time: an entry counts while path, size, mtime, ctime and inode are all the
    same, and a file touched within two seconds of being hashed is not remembered. The cache file is
    lines of JSON that processes append to; a torn or foreign line is skipped, and a cache that cannot
    be written is no error.

    Args:
        cache_file: where to remember; None reads every byte every time.
    """

    def __init__(self, cache_file: Path | None) -> None:
        self._cache_file = cache_file
        self._known = {} if cache_file is None else _read_cache(cache_file)

    def digest(self, path: Path) -> str:
        """Return "sha256:<hex>" of one file's content, following a symlink."""
        return PREFIX + self.entry(path).sha256

    def entry(self, path: Path) -> FileEntry:
        """Return size and SHA-256 of one file, following a symlink.

        Raises:
            Unreadable: the file is missing, not a file or not readable.
            IntegrityError: the file changed while it was read.
        """
        try:
            before = path.stat()
            if not stat.S_ISREG(before.st_mode):
                raise Unreadable(f"{path}: not a file")
            name, identity = str(path.absolute()), _identity(before)
            known = self._known.get(name)
            if known is not None and known[0] == identity:
                return FileEntry(before.st_size, known[1])
            started_ns = time.time_ns()
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            after = path.stat()
        except OSError as error:
            raise Unreadable(f"{path}: cannot be read: {error.strerror}") from error
        if _identity(after) != identity:
            raise IntegrityError(f"{path} changed while it was being read", hint="Wait for its writer and run again.")
        if max(before.st_mtime_ns, before.st_ctime_ns) + RACY_NS < started_ns:
            self._remember(name, identity, sha256)
        return FileEntry(before.st_size, sha256)

    def _remember(self, name: str, identity: tuple[int, ...], sha256: str) -> None:
        self._known[name] = (identity, sha256)
        if self._cache_file is None:
            return
        line = json.dumps([name, list(identity), sha256]) + "\n"
        with suppress(OSError):  # Guard: a full or read-only disk must not fail a build over a memory of hashes.
            self._cache_file.parent.mkdir(parents=True, exist_ok=True)
            with self._cache_file.open("a", encoding="utf-8") as file:
                file.write(line)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)


def _read_cache(cache_file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    known: dict[str, tuple[tuple[int, ...], str]] = {}
    try:
        lines = cache_file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return known
    for line in lines:
        with suppress(ValueError, TypeError):
            name, identity, sha256 = json.loads(line)
            known[name] = (tuple(identity), sha256)
    return known
