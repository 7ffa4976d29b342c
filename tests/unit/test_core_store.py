"""The store as people meet it: names, listing, lineage, verification, garbage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline.core.artifacts import Artifact, Engine
from pipeline.core.digest import digest_tree
from pipeline.core.progress import Silent
from pipeline.core.runner import StepResult, run
from pipeline.core.stage import StepContext
from pipeline.core.store import Store
from pipeline.errors import ConfigError, IntegrityError, StoreBusy
from pipeline.host.files import is_ours, link_or_copy
from tests.support.faults import small_build, step

pytestmark = pytest.mark.fast


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


@pytest.fixture
def built(store: Store) -> dict[str, StepResult]:
    """The small build, in the store."""
    return run(small_build(), store, Silent())


def tamper(directory: Path) -> None:
    """Change one byte and keep size and times."""
    path = directory / "a.json"
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_directory_with_other_things_is_refused(tmp_path: Path) -> None:
    """A store is never made inside somebody else's directory."""
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"not a trtpipe store.*thesis\.tex"):
        Store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_not_a_store(tmp_path: Path) -> None:
    """A file in place of the directory is a clear error."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="not a directory"):
        Store(tmp_path / "file")


def test_a_store_of_another_layout_is_refused(store: Store, built: dict[str, StepResult]) -> None:
    """A future layout is not read as today's."""
    (store.root / "trtpipe-store.json").write_text('{"layout": 99}')
    with pytest.raises(ConfigError, match="layout 99"):
        Store(store.root)


def test_looking_at_a_store_that_does_not_exist_creates_nothing(store: Store) -> None:
    """Listing is read-only."""
    assert store.ls() == ()
    assert not store.root.exists()


def test_the_store_is_tagged_as_a_cache(store: Store, built: dict[str, StepResult]) -> None:
    """Backup programs know the tag's signature."""
    assert (store.root / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


def test_an_artifact_carries_manifest_and_provenance(store: Store, built: dict[str, StepResult]) -> None:
    """The manifest's digest is the tree's, and provenance names action, parents and circumstances."""
    artifact = built["third"].artifact
    assert json.loads((artifact.path / "manifest.json").read_bytes())["digest"] == digest_tree(artifact.path)
    record = store.provenance(artifact.digest)
    assert {role: parent.digest for role, parent in record.parents.items()} == {
        name: built[name].artifact.digest for name in ("first", "second")
    }
    assert record.execution.argv
    assert record.execution.peak_rss_bytes > 2**20
    assert record.execution.host["node"]
    assert is_ours(artifact.path)


def test_ls_names_refs_steps_and_sizes(store: Store, built: dict[str, StepResult]) -> None:
    """Every object is listed once, with the bytes of its files."""
    store.set_ref("build@third", built["third"].artifact.digest)
    entries = {entry.step: entry for entry in store.ls()}
    assert sorted(entries) == ["first", "second", "third"]
    assert entries["third"].refs == ("build@third",)
    assert entries["first"].bytes == sum(
        (built["first"].artifact.path / name).stat().st_size for name in ("a.json", "nested/b.json", "z.json")
    )
    assert entries["first"].created.endswith("+00:00")


def test_ls_is_newest_first(store: Store, built: dict[str, StepResult]) -> None:
    """The last step of a build is at the top."""
    assert [entry.step for entry in store.ls()] == ["third", "second", "first"]


def test_show_follows_the_lineage_to_sources_outside_the_store(store: Store, tmp_path: Path) -> None:
    """A source that never entered the store is the last line of the lineage, with its place."""
    source = Artifact(path=tmp_path / "model", digest="sha256:" + "a" * 64)

    def work(ctx: StepContext) -> None:
        (ctx.out / "file").write_text(",".join(sorted(ctx.inputs)))

    steps = (step("quantize", work, inputs={"source": source}), step("compile", work, inputs={"quantized": "quantize"}))
    digest = run(steps, store, Silent())["compile"].artifact.digest
    lineage = store.show(digest[7:17])["lineage"]
    assert isinstance(lineage, list)
    assert [(node["depth"], node["role"], node["step"]) for node in lineage] == [
        (0, "", "compile"),
        (1, "quantized", "quantize"),
        (2, "source", None),
    ]
    assert lineage[-1]["digest"] == source.digest
    assert lineage[-1]["path"] == str(source.path)


def test_an_unknown_ref_lists_near_names(store: Store, built: dict[str, StepResult]) -> None:
    """A misspelt ref is corrected."""
    store.set_ref("smollm2-fp8@engine", built["first"].artifact.digest)
    with pytest.raises(ConfigError, match="smollm2-fp8@engine"):
        store.show("smollm2-fp9@engine")


def test_an_ambiguous_prefix_is_refused(store: Store, built: dict[str, StepResult]) -> None:
    """A prefix that fits two objects names both."""
    twin = store.path(built["first"].artifact.digest)
    twin.rename(twin.with_name("abcd1" + twin.name[5:]))
    other = store.path(built["second"].artifact.digest)
    other.rename(other.with_name("abcd2" + other.name[5:]))
    with pytest.raises(ConfigError, match="start of 2 digests"):
        store.resolve("abcd")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
def test_a_ref_name_cannot_leave_its_folder(store: Store, built: dict[str, StepResult], name: str) -> None:
    """Only plain names are refs."""
    with pytest.raises(ConfigError, match="not a ref name"):
        store.set_ref(name, built["first"].artifact.digest)


def test_a_ref_to_nothing_is_refused(store: Store, built: dict[str, StepResult]) -> None:
    """A name always names an object."""
    with pytest.raises(IntegrityError, match="not in the store"):
        store.set_ref("name", "sha256:" + "0" * 64)


def test_open_gives_the_artifact_of_a_ref(store: Store, built: dict[str, StepResult]) -> None:
    """A ref opens as the artifact it was set to."""
    store.set_ref("name", built["second"].artifact.digest)
    assert store.open("name", Artifact) == built["second"].artifact


def test_open_refuses_another_kind(store: Store, built: dict[str, StepResult]) -> None:
    """An artifact is not taken for an engine."""
    with pytest.raises(ConfigError, match="of kind 'artifact', not 'engine'"):
        store.open(built["first"].artifact.digest, Engine)


def test_open_refuses_a_damaged_object(store: Store, built: dict[str, StepResult]) -> None:
    """A missing file is found at opening."""
    (built["first"].artifact.path / "nested" / "b.json").unlink()
    with pytest.raises(IntegrityError, match=r"1 missing or of another size \(nested/b\.json\)"):
        store.open(built["first"].artifact.digest, Artifact)


def test_a_hit_sees_a_lost_empty_directory(store: Store, built: dict[str, StepResult]) -> None:
    """An empty directory is part of the artifact."""
    (built["first"].artifact.path / "nested" / "empty").rmdir()
    assert "nested/empty/" in store.damage(built["first"].artifact.digest)


def test_verify_of_an_untouched_store_finds_nothing(store: Store, built: dict[str, StepResult]) -> None:
    """Three objects are checked and none is corrupt."""
    report = store.verify()
    assert report["checked"] == 3
    assert report["corrupt"] == {}


def test_verify_names_extra_missing_and_changed_files(store: Store, built: dict[str, StepResult]) -> None:
    """A byte that changed under the same size and mtime is found, and the object is set aside."""
    artifact = built["second"].artifact
    tamper(artifact.path)
    (artifact.path / "z.json").unlink()
    (artifact.path / "intruder").write_text("x")
    assert store.verify()["corrupt"] == {
        artifact.digest: {"step": "second", "extra": ["intruder"], "missing": ["z.json"], "changed": ["a.json"]}
    }
    assert not artifact.path.exists()
    again = run(small_build(), store, Silent())
    assert [result.hit for result in again.values()] == [True, False, True]
    assert store.verify()["corrupt"] == {}


def test_verify_checks_only_the_named_refs(store: Store, built: dict[str, StepResult]) -> None:
    """Other objects are not read."""
    tamper(built["second"].artifact.path)
    store.set_ref("good", built["first"].artifact.digest)
    report = store.verify(("good",))
    assert (report["checked"], report["corrupt"]) == (1, {})


@pytest.mark.parametrize("name", ["manifest.json", "provenance.json"])
def test_verify_finds_a_broken_description(store: Store, built: dict[str, StepResult], name: str) -> None:
    """An object without its manifest or provenance is corrupt."""
    (built["first"].artifact.path / name).write_text("{}")
    assert list(store.verify()["corrupt"]) == [built["first"].artifact.digest]


@pytest.mark.parametrize(("field", "value"), [("version", 2), ("scheme", 99), ("inputs", {"source": "sha256:0"})])
def test_verify_finds_a_forged_provenance(
    store: Store, built: dict[str, StepResult], field: str, value: object
) -> None:
    """The key in a provenance must be that of its own fields, so lineage cannot be rewritten unseen."""
    path = built["first"].artifact.path / "provenance.json"
    document = json.loads(path.read_bytes())
    document["action"][field] = value
    path.write_text(json.dumps(document))
    assert list(store.verify()["corrupt"]) == [built["first"].artifact.digest]


def test_gc_keeps_what_refs_reach(store: Store, built: dict[str, StepResult]) -> None:
    """A ref keeps its object and everything that it was made from."""
    store.set_ref("second", built["second"].artifact.digest)
    dropped = next(entry for entry in store.ls() if entry.step == "third")
    assert store.gc(dry_run=True) == dropped.bytes
    assert len(store.ls()) == 3
    assert store.gc() == dropped.bytes
    assert sorted(entry.step for entry in store.ls()) == ["first", "second"]
    again = run(small_build(), store, Silent())
    assert [result.hit for result in again.values()] == [True, True, False]


def test_gc_keeps_what_the_caller_names(store: Store, built: dict[str, StepResult]) -> None:
    """`keep` counts like a ref."""
    store.gc(keep=(built["first"].artifact.digest,))
    assert [entry.step for entry in store.ls()] == ["first"]


def test_gc_without_refs_empties_the_store(store: Store, built: dict[str, StepResult]) -> None:
    """Objects, records, failures and locks go; the store stays usable."""
    (store.root / "failed" / "x").mkdir()
    (store.root / "actions" / ".half.tmp").write_text("x")
    store.gc()
    assert [path for name in ("objects", "actions", "failed", "locks") for path in (store.root / name).iterdir()] == []
    assert not any(result.hit for result in run(small_build(), store, Silent()).values())


def test_gc_does_not_count_bytes_that_a_kept_artifact_shares(store: Store) -> None:
    """A hard-linked file is freed only with its last link."""

    def big(ctx: StepContext) -> None:
        (ctx.out / "weights").write_bytes(b"x" * 100_000)

    def wrap(ctx: StepContext) -> None:
        link_or_copy(ctx.inputs["in"].path / "weights", ctx.out / "weights")
        (ctx.out / "config").write_bytes(b"x" * 10)

    results = run((step("big", big), step("wrap", wrap, inputs={"in": "big"})), store, Silent())
    store.set_ref("big", results["big"].artifact.digest)
    assert store.gc() == 10


def test_gc_stays_out_while_a_build_runs(store: Store) -> None:
    """A running build may be about to use what gc would remove."""

    def work(ctx: StepContext) -> None:
        with pytest.raises(StoreBusy, match=f"process {os.getpid()}"):
            Store(store.root).gc()
        (ctx.out / "file").write_text("x")

    run((step("build", work),), store, Silent())
