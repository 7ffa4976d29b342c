"""Where artifacts live: content-addressed, written once, found again by what made them.

    objects/<hex>/       one artifact: its files, manifest.json, provenance.json
    actions/<hex>.json   key of an action -> record naming the object it made
    refs/<name>          a digest under a name a person uses; gc keeps what refs reach
    failed/<hex>/        what a failed action left: error.txt, logs, reproduce scripts
    unfinished/<hex>/    what an action that was interrupted can go on from; gone once it has finished
    quarantine/          objects that were found damaged
    work/<id>/           artifacts being written, each locked by its writer
    locks/, store.lock   flock files; the kernel releases them when their holder dies

A finished object appears by one rename and its record by another, so a process that dies at any moment
leaves nothing that a later run would take for finished. Two keys may name one object: then whatever
depends on it stays valid (early cutoff).
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import shutil
import stat
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pipeline.core import catalog
from pipeline.core.artifacts import Artifact
from pipeline.core.digest import MANIFEST, PREFIX, PROVENANCE, FileEntry, digest_manifest, manifest
from pipeline.core.record import Record, read_record
from pipeline.errors import ConfigError, HostError, IntegrityError
from pipeline.host.files import disk_errors, fsync, fsync_tree, write_atomic
from pipeline.host.locks import hold, try_lock

A = TypeVar("A", bound=Artifact)

LAYOUT = 1
MARKER = "trtpipe-store.json"
CACHEDIR_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# Written by trtpipe: see https://bford.info/cachedir/\n"
FOLDERS = ("objects", "actions", "refs", "failed", "unfinished", "quarantine", "work", "locks")
_OWN_NAMES = {*FOLDERS, MARKER, "CACHEDIR.TAG", "store.lock", "stat-cache.json"}
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")
_MIN_PREFIX = 4
DEFAULT_LOCK_TIMEOUT_S = 4 * 3600.0


class Store:
    """The artifact store in one directory.

    Args:
        root: its directory; made on first writing.
        lock_timeout_s: how long to wait for another process that builds the same thing.

    Raises:
        ConfigError: `root` holds something else, or a store of another layout.
    """

    def __init__(self, root: Path, *, lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S) -> None:
        self.root = root.absolute()
        self.lock_timeout_s = lock_timeout_s
        self._refuse_foreign()

    @contextmanager
    def in_use(self, on_wait: Callable[[int], None] = lambda _pid: None) -> Iterator[None]:
        """Hold the store for building: gc stays out, other builds may come in. Sweeps dead work first."""
        self._prepare()
        with hold(self.root / "store.lock", shared=True, timeout_s=self.lock_timeout_s, on_wait=on_wait):
            self._sweep()
            yield

    def lock(self, key: str, on_wait: Callable[[int], None]) -> AbstractContextManager[None]:
        """Hold the right to build `key`; raises StoreBusy after `lock_timeout_s`."""
        return hold(self.root / "locks" / _hex(key), timeout_s=self.lock_timeout_s, on_wait=on_wait)

    def find(self, key: str) -> Record | None:
        """Return the record of an action; None when there is none or it cannot be trusted."""
        try:
            record = read_record(self.root / "actions" / f"{_hex(key)}.json")
        except IntegrityError:
            return None
        return record if record.action.key == key else None

    def records(self) -> tuple[Record, ...]:
        """Return every readable record, in no order that means anything."""
        keys = (PREFIX + path.stem for path in sorted((self.root / "actions").glob("*.json")))
        return tuple(record for key in keys if (record := self.find(key)) is not None)

    def path(self, digest: str) -> Path:
        """Return the directory of an object, whether it exists or not."""
        return self.root / "objects" / _hex(digest)

    def read_manifest(self, digest: str) -> dict[str, FileEntry]:
        """Return the manifest of an object.

        Raises:
            IntegrityError: it is missing or does not belong to `digest`.
        """
        try:
            document = json.loads((self.path(digest) / MANIFEST).read_bytes())
            entries = {path: FileEntry(**entry) for path, entry in document["files"].items()}
            belongs = digest_manifest(entries) == digest
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise IntegrityError(f"{self.path(digest) / MANIFEST} cannot be read: {error}") from error
        if not belongs:
            raise IntegrityError(f"{self.path(digest) / MANIFEST} does not belong to {digest}")
        return entries

    def damage(self, digest: str) -> str:
        """Say what is wrong with an object as far as file names and sizes tell, "" when nothing is.

        Contents are not read: that is what `verify` does.
        """
        if not self.path(digest).is_dir():
            return "it is not in the store"
        try:
            entries = self.read_manifest(digest)
        except IntegrityError as error:
            return error.message
        wrong = [path for path, entry in entries.items() if not _looks_like(self.path(digest), path, entry)]
        return f"{len(wrong)} missing or of another size ({', '.join(sorted(wrong)[:5])})" if wrong else ""

    def quarantine(self, digest: str) -> None:
        """Set a damaged object aside, so that it is built again."""
        with suppress(FileNotFoundError):
            self.path(digest).rename(self.root / "quarantine" / f"{_hex(digest)}.{uuid.uuid4().hex[:8]}")

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield an empty directory to write an artifact into; removed at the end unless committed."""
        while True:
            path = self.root / "work" / uuid.uuid4().hex
            path.mkdir()
            with _directory_lock(path) as locked:
                if not locked:  # another process's sweep was faster than our lock
                    continue
                try:
                    yield path
                finally:
                    shutil.rmtree(path, ignore_errors=True)
                return

    @contextmanager
    def unfinished(self, key: str) -> Iterator[Path]:
        """Yield the directory in which an action keeps what it can go on from; removed when the block succeeds.

        The caller holds the lock of `key`, so nobody else writes there.
        """
        path = self.root / "unfinished" / _hex(key)
        path.mkdir(parents=True, exist_ok=True)
        try:
            yield path
        except BaseException:
            with suppress(OSError):  # not empty: that is what the next run goes on from
                path.rmdir()
            raise
        shutil.rmtree(path, ignore_errors=True)

    def commit(self, staging: Path, record: Callable[[str], Record]) -> Record:
        """Make a finished staging directory an object and write its record.

        Args:
            staging: from `staging()`; moved into the store, or dropped when the store has the same bytes.
            record: makes the record from the artifact's digest.

        Raises:
            IntegrityError: the step wrote nothing, a reserved name or a symlink.
            DiskFull: the file system is full; nothing was added.
        """
        for name in (MANIFEST, PROVENANCE):
            if (staging / name).exists():
                raise IntegrityError(f"the step wrote {name}, which the store writes itself")
        for log in _logs(staging):
            log.unlink()
        shutil.rmtree(staging / "log", ignore_errors=True)
        entries = manifest(staging)
        if not entries:
            raise IntegrityError("the step finished and wrote nothing")
        digest = digest_manifest(entries)
        made = record(digest)
        with disk_errors(self.root):
            if self.damage(digest):
                self.quarantine(digest)
                files = {path: {"size": entry.size, "sha256": entry.sha256} for path, entry in entries.items()}
                (staging / MANIFEST).write_bytes(
                    json.dumps({"digest": digest, "files": files}, indent=1).encode() + b"\n"
                )
                (staging / PROVENANCE).write_bytes(made.encode())
                fsync_tree(staging)
                try:
                    staging.rename(self.path(digest))
                except OSError as error:
                    # Two keys can finish the same bytes at once; then the other one's copy is there already.
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
                fsync(self.root / "objects")
            write_atomic(self.root / "actions" / f"{_hex(made.action.key)}.json", made.encode())
        shutil.rmtree(self.failure_path(made.action.key), ignore_errors=True)
        return made

    def failure_path(self, key: str) -> Path:
        """Return where a failed action leaves its logs."""
        return self.root / "failed" / _hex(key)

    def keep_failure(self, key: str, staging: Path, error: Exception) -> Path:
        """Move a failed step's logs out of its staging directory, drop the rest, and write error.txt.

        Paths inside reproduce scripts follow the move.
        """
        kept, logs = self.failure_path(key), _logs(staging)
        shutil.rmtree(kept, ignore_errors=True)
        # Guard: on a full disk only what goes first makes room for what is kept.
        for path in staging.rglob("*"):
            if not path.is_dir() and path not in logs:
                path.unlink()
        kept.mkdir()
        for log in logs:
            destination = kept / log.relative_to(staging)
            destination.parent.mkdir(parents=True, exist_ok=True)
            log.rename(destination)
        shutil.rmtree(staging, ignore_errors=True)
        with suppress(OSError):  # Guard: on a full disk the failure itself matters more than its notes.
            for script in kept.rglob("*.reproduce.sh"):
                script.write_text(script.read_text().replace(str(staging), str(kept)))
            (kept / "error.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        return kept

    def set_ref(self, name: str, digest: str) -> None:
        """Name an object, so that people find it and gc keeps it and what it was made from.

        Raises:
            ConfigError: the name has characters other than letters, digits, '.', '_', '@' and '-'.
            IntegrityError: the object is not in the store.
        """
        if not _REF.fullmatch(name):
            raise ConfigError(f"'{name}' is not a ref name", hint="Use letters, digits, '.', '_', '@' and '-'.")
        if not self.path(digest).is_dir():
            raise IntegrityError(f"ref '{name}': {digest} is not in the store")
        self._prepare()
        write_atomic(self.root / "refs" / name, f"{digest}\n".encode())

    def refs(self) -> dict[str, str]:
        """Return every ref: name -> digest."""
        paths = sorted((self.root / "refs").glob("*"))
        return {path.name: path.read_text().strip() for path in paths if _REF.fullmatch(path.name)}

    def digests(self) -> tuple[str, ...]:
        """Return the digest of every object."""
        return tuple(PREFIX + path.name for path in sorted((self.root / "objects").glob("*")))

    def resolve(self, ref: str) -> str:
        """Return the digest that a ref, a digest or the start of one (4 hex digits) means.

        Raises:
            ConfigError: nothing or more than one thing is meant; suggests near names.
        """
        refs = self.refs()
        if ref in refs:
            return refs[ref]
        prefix = ref.removeprefix(PREFIX)
        found = [digest for digest in self.digests() if _hex(digest).startswith(prefix) and len(prefix) >= _MIN_PREFIX]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(f"'{ref}' is the start of {len(found)} digests: {', '.join(found)}", hint="Give more.")
        near = difflib.get_close_matches(ref, refs, n=3, cutoff=0.5) or sorted(refs)[:10]
        hint = f"Near names: {', '.join(near)}." if near else "The store has no refs yet; `trtpipe cache ls` shows it."
        raise ConfigError(f"the store {self.root} knows no ref or digest '{ref}'", hint=hint)

    def open(self, ref: str, kind: type[A]) -> A:
        """Return the artifact that a ref or digest means.

        Raises:
            ConfigError: unknown ref, or an artifact of another kind.
            IntegrityError: the object is gone or damaged as far as names and sizes tell.
        """
        digest = self.resolve(ref)
        damage = self.damage(digest)
        if damage:
            raise IntegrityError(
                f"artifact '{ref}' ({digest}) cannot be used: {damage}",
                hint="Run `trtpipe cache verify`, then build again.",
            )
        found = self.provenance(digest).kind
        if kind is not Artifact and found != kind.kind:
            raise ConfigError(f"'{ref}' is of kind '{found}', not '{kind.kind}'")
        return kind(path=self.path(digest), digest=digest)

    def provenance(self, digest: str) -> Record:
        """Return the record inside an object; raises IntegrityError when it is unreadable."""
        return read_record(self.path(digest) / PROVENANCE)

    def ls(self) -> tuple[catalog.Entry, ...]:
        """List the objects, newest first."""
        return catalog.ls(self)

    def show(self, ref: str) -> dict[str, object]:
        """Describe one object as a JSON document, with its lineage back to the sources."""
        return catalog.show(self, ref)

    def verify(self, refs: tuple[str, ...] = ()) -> catalog.VerifyReport:
        """Hash objects again (all, or those meant by `refs`) and set aside what changed."""
        return catalog.verify(self, refs)

    def gc(self, *, dry_run: bool = False, keep: tuple[str, ...] = ()) -> int:
        """Remove what neither a ref nor `keep` reaches; return the bytes freed, or that would be.

        Raises:
            StoreBusy: a build is running.
        """
        self._prepare()
        with hold(self.root / "store.lock"):
            return catalog.gc(self, dry_run=dry_run, keep=keep)

    def _refuse_foreign(self) -> None:
        try:
            layout = json.loads((self.root / MARKER).read_bytes())["layout"]
        except FileNotFoundError:
            names = {path.name for path in self.root.iterdir()} if self.root.is_dir() else set()
            foreign = {name for name in names - _OWN_NAMES if not name.endswith(".tmp")}
            if foreign:
                raise ConfigError(
                    f"{self.root} is not a trtpipe store and holds other things, such as '{min(foreign)}'",
                    hint="Give a directory that is new or empty.",
                ) from None
            return
        except NotADirectoryError as error:
            raise ConfigError(f"{self.root} is not a directory", hint="Give another store directory.") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{self.root / MARKER} cannot be read: {error}") from error
        if layout != LAYOUT:
            raise ConfigError(
                f"{self.root} is a store of layout {layout}; this version reads layout {LAYOUT}",
                hint="Use a new store directory; artifacts are rebuilt there.",
            )

    def _prepare(self) -> None:
        try:
            for folder in FOLDERS:
                (self.root / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HostError(f"the store {self.root} cannot be written: {error.strerror}") from error
        if not (self.root / MARKER).exists():
            write_atomic(self.root / "CACHEDIR.TAG", CACHEDIR_TAG)
            write_atomic(self.root / MARKER, json.dumps({"layout": LAYOUT}).encode() + b"\n")

    def _sweep(self) -> None:
        """Remove work whose writer is dead: its lock is free."""
        for path in (self.root / "work").iterdir():
            with _directory_lock(path) as locked:
                if locked:
                    shutil.rmtree(path, ignore_errors=True)


def _hex(digest: str) -> str:
    return digest.removeprefix(PREFIX)


def _looks_like(directory: Path, name: str, entry: FileEntry) -> bool:
    try:
        status = (directory / name).lstat()
    except OSError:
        return False
    if name.endswith("/"):
        return stat.S_ISDIR(status.st_mode)
    return stat.S_ISREG(status.st_mode) and status.st_size == entry.size


def _logs(staging: Path) -> list[Path]:
    """Return the log files of a step: `log/`, and `*.log` with their reproduce scripts at the root."""
    return [
        path
        for pattern in ("log/**/*", "*.log", "*.reproduce.sh")
        for path in sorted(staging.glob(pattern))
        if path.is_file()
    ]


@contextmanager
def _directory_lock(path: Path) -> Iterator[bool]:
    """Lock a directory itself while the block runs; False when another process has it or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield False
        return
    try:
        yield try_lock(descriptor) and path.exists()
    finally:
        os.close(descriptor)
