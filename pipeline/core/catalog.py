"""Looking at a store and cleaning it: list, describe, verify, collect garbage. `Store` is the way in."""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from pipeline.core.digest import MANIFEST, PROVENANCE, manifest
from pipeline.core.record import Parent
from pipeline.errors import IntegrityError

if TYPE_CHECKING:
    from pipeline.core.store import Store


@dataclass(frozen=True)
class Entry:
    """One object in a listing.

    step, kind: "?" when its provenance is unreadable.
    bytes: total size of its files.
    created: when it was built first, ISO 8601 in UTC.
    """

    refs: tuple[str, ...]
    step: str
    kind: str
    digest: str
    bytes: int
    created: str

    def document(self) -> dict[str, object]:
        """Return it as JSON."""
        return asdict(self)


class Difference(TypedDict):
    """How a tree differs from its manifest: relative paths, sorted."""

    step: str
    extra: list[str]
    missing: list[str]
    changed: list[str]


class VerifyReport(TypedDict):
    """What `verify` saw: objects checked, their bytes, and digest -> difference of the corrupt ones."""

    checked: int
    bytes: int
    corrupt: dict[str, Difference]


def ls(store: Store) -> tuple[Entry, ...]:
    """List the objects, newest first."""
    return tuple(sorted((_entry(store, digest) for digest in store.digests()), key=lambda e: e.created, reverse=True))


def show(store: Store, ref: str) -> dict[str, object]:
    """Describe one object, with its lineage: itself and everything it was made from, depth first."""
    digest = store.resolve(ref)
    entry = _entry(store, digest)
    record = store.provenance(digest)
    return {
        **entry.document(),
        "path": str(store.path(digest)),
        "params": record.action.params,
        "toolchain": record.action.toolchain,
        "execution": asdict(record.execution),
        "lineage": list(_lineage(store, "", Parent(digest, entry.kind, entry.step, str(store.path(digest))), 0)),
    }


def _entry(store: Store, digest: str) -> Entry:
    refs = tuple(name for name, target in store.refs().items() if target == digest)
    size = sum(path.lstat().st_size for path in _files([store.path(digest)]))
    try:
        record = store.provenance(digest)
    except IntegrityError:
        return Entry(refs, "?", "?", digest, size, "")
    return Entry(refs, record.action.step, record.kind, digest, size, record.execution.finished_at)


def _lineage(store: Store, role: str, node: Parent, depth: int) -> Iterator[dict[str, object]]:
    yield {"depth": depth, "role": role, **asdict(node)}
    if not store.path(node.digest).is_dir():
        return
    for parent_role, parent in sorted(store.provenance(node.digest).parents.items()):
        yield from _lineage(store, parent_role, parent, depth + 1)


def verify(store: Store, refs: Iterable[str]) -> VerifyReport:
    """Hash objects again; a corrupt one is moved to quarantine/."""
    digests = sorted({store.resolve(ref) for ref in refs}) or store.digests()
    report = VerifyReport(checked=0, bytes=0, corrupt={})
    for digest in digests:
        entry = _entry(store, digest)
        difference = _difference(store, digest, entry.step)
        report["checked"] += 1
        report["bytes"] += entry.bytes
        if difference is not None:
            report["corrupt"][digest] = difference
            store.quarantine(digest)
    return report


def _difference(store: Store, digest: str, step: str) -> Difference | None:
    try:
        recorded = store.read_manifest(digest)
        store.provenance(digest)
        found = manifest(store.path(digest))
    except IntegrityError as error:
        return Difference(step=step, extra=[], missing=[], changed=[error.message])
    if found == recorded:
        return None
    return Difference(
        step=step,
        extra=sorted(found.keys() - recorded.keys()),
        missing=sorted(recorded.keys() - found.keys()),
        changed=sorted(path for path in found.keys() & recorded.keys() if found[path] != recorded[path]),
    )


def gc(store: Store, *, dry_run: bool, keep: Iterable[str]) -> int:
    """Remove what nothing reaches. The caller holds the store alone, so no work in it is alive."""
    records = store.records()
    reached = _reachable(store, keep)
    garbage = [store.path(digest) for digest in store.digests() if digest not in reached]
    for folder in ("failed", "unfinished", "quarantine", "work"):
        garbage += sorted((store.root / folder).iterdir())
    freed = _freed_bytes(garbage)
    if dry_run:
        return freed
    for record in records:
        if record.digest not in reached:
            (store.root / "actions" / f"{record.action.key.partition(':')[2]}.json").unlink(missing_ok=True)
    for folder in ("actions", "refs", "locks"):
        for path in (store.root / folder).glob("*" if folder == "locks" else ".*.tmp"):
            path.unlink(missing_ok=True)
    for path in garbage:
        # Guard: an object is moved away whole before it is deleted, so that dying here leaves no half of one.
        doomed = store.root / "work" / uuid.uuid4().hex
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return freed


def _reachable(store: Store, keep: Iterable[str]) -> set[str]:
    """Return what refs and `keep` mean, and everything those were made from, under every record of them."""
    parents: dict[str, set[str]] = {}
    for record in store.records():
        parents.setdefault(record.digest, set()).update(record.action.inputs.values())
    reached: set[str] = set()
    pending = [*store.refs().values(), *(store.resolve(ref) for ref in keep)]
    while pending:
        digest = pending.pop()
        if digest not in reached:
            reached.add(digest)
            pending += parents.get(digest, ())
    return reached


def _freed_bytes(trees: Iterable[Path]) -> int:
    """Return what removing the trees gives back: a hard-linked file counts only when its last link goes."""
    seen: Counter[tuple[int, int]] = Counter()
    freed = 0
    for path in _files(trees):
        status = path.lstat()
        inode = (status.st_dev, status.st_ino)
        seen[inode] += 1
        if seen[inode] == status.st_nlink:
            freed += status.st_size
    return freed


def _files(trees: Iterable[Path]) -> Iterator[Path]:
    for tree in trees:
        if tree.is_dir():
            yield from (
                path for path in tree.rglob("*") if not path.is_dir() and path.name not in (MANIFEST, PROVENANCE)
            )
        else:
            yield tree
