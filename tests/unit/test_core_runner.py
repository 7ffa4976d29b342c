"""Running steps: hits, misses, early cutoff, failures and interrupts."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.artifacts import Artifact
from pipeline.core.progress import Silent
from pipeline.core.runner import StepResult, run
from pipeline.core.stage import Action, Step, StepContext
from pipeline.core.store import Store
from pipeline.errors import ConfigError, DiskFull, IntegrityError, ToolError, VerificationError
from pipeline.host.process import Tool
from tests.support.faults import SMALL_BUILD, small_build, step

pytestmark = pytest.mark.fast

fields = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), max_size=3)
tags = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["x", "y"]), max_size=3)
actions = st.builds(Action, st.sampled_from(["q", "r"]), st.integers(1, 2), fields, tags, tags)


class Notes(Silent):
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        """Keep the fact."""
        self.texts.append(text)


def writing(content: str, name: str = "file") -> Step:
    """Return a step 'write' that writes one file; the content is a parameter."""

    def work(ctx: StepContext) -> None:
        (ctx.out / name).write_text(content)

    return step("write", work, content=content)


def go(steps: tuple[Step, ...], store: Store) -> dict[str, StepResult]:
    """Run and listen to nothing."""
    return run(steps, store, Silent())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


@given(actions, actions)
def test_the_key_differs_exactly_when_a_hashed_field_differs(one: Action, other: Action) -> None:
    """Key equality is equality of name, version, params, inputs and toolchain."""
    assert (one.key == other.key) == (one == other)


def test_fields_that_only_steer_do_not_enter_the_key() -> None:
    """The work function and the disk estimate change nothing."""
    one = Step("a", 1, Artifact, {"p": 1}, {}, {}, lambda _ctx: None)
    other = Step("a", 1, Artifact, {"p": 1}, {}, {}, lambda _ctx: None, disk_bytes=10)
    assert one.action({}).key == other.action({}).key


def test_a_second_run_takes_everything_from_the_store(store: Store, tmp_path: Path) -> None:
    """Nothing runs twice, and the artifacts are the same."""
    log = tmp_path / "executions"
    first = go(small_build(log), store)
    second = go(small_build(log), store)
    assert log.read_text().split() == list(SMALL_BUILD)
    assert [result.hit for result in second.values()] == [True] * 3
    assert [r.artifact for r in first.values()] == [r.artifact for r in second.values()]


def test_a_built_step_tells_its_peak_memory_and_a_hit_does_not(store: Store) -> None:
    """What the step allocated is in the peak; where nothing ran there is no number."""

    def hungry(ctx: StepContext) -> None:
        (ctx.out / "file").write_text(str(len(block)))

    block = b"x" * (100 * 2**20)
    built, hit = (go((step("hungry", hungry),), store)["hungry"] for _ in range(2))
    assert built.peak_rss_bytes is not None
    assert built.peak_rss_bytes > len(block)
    assert hit.peak_rss_bytes is None


def test_equal_bytes_from_another_key_keep_what_follows(store: Store) -> None:
    """Early cutoff: a changed parameter that changes no byte does not rebuild the next step."""
    ran = []

    def first(ctx: StepContext) -> None:
        (ctx.out / "file").write_text("always the same")

    def second(ctx: StepContext) -> None:
        ran.append("second")
        (ctx.out / "copy").write_bytes((ctx.inputs["in"].path / "file").read_bytes())

    def steps(value: int) -> tuple[Step, ...]:
        return (step("first", first, value=value), step("second", second, inputs={"in": "first"}))

    go(steps(1), store)
    again = go(steps(2), store)
    assert (again["first"].hit, again["second"].hit) == (False, True)
    assert ran == ["second"]
    assert len(store.digests()) == 2


def test_until_stops_after_the_named_step(store: Store, tmp_path: Path) -> None:
    """Later steps do not run."""
    log = tmp_path / "executions"
    assert list(run(small_build(log), store, Silent(), until="second")) == ["first", "second"]
    assert log.read_text().split() == ["first", "second"]


def test_an_unknown_until_suggests_the_nearest_step(store: Store) -> None:
    """A misspelt step is corrected."""
    with pytest.raises(ConfigError, match=r"no step 'secnod'(.|\n)*Did you mean 'second'"):
        run(small_build(), store, Silent(), until="secnod")


def test_steps_out_of_order_are_a_bug() -> None:
    """An input must name an earlier step."""
    with pytest.raises(ValueError, match="does not come before"):
        run((step("a", lambda _ctx: None, inputs={"in": "b"}),), Store(Path("unused")), Silent())


def test_a_failure_is_not_cached_and_keeps_its_logs(store: Store) -> None:
    """The error names the kept log; the next run tries again; success removes the old failure."""
    attempts = []

    def flaky(ctx: StepContext) -> None:
        attempts.append(1)
        (ctx.out / "log").mkdir()
        (ctx.out / "log" / "detail.txt").write_text("details")
        (ctx.out / "compile.log").write_text("it broke")
        (ctx.out / "half").write_bytes(b"half an output")
        if len(attempts) == 1:
            raise VerificationError("SQNR too low")

    with pytest.raises(VerificationError, match="flaky: SQNR too low") as caught:
        go((step("flaky", flaky),), store)
    log = caught.value.log_path
    assert log is not None
    assert log.read_text() == "it broke"
    assert sorted(path.name for path in log.parent.rglob("*")) == ["compile.log", "detail.txt", "error.txt", "log"]
    assert store.digests() == ()
    assert not list((store.root / "work").iterdir())
    result = go((step("flaky", flaky),), store)["flaky"]
    assert len(attempts) == 2
    assert sorted(path.name for path in result.artifact.path.iterdir()) == ["half", "manifest.json", "provenance.json"]
    assert not log.exists()


def test_a_finding_that_stops_a_run_is_kept_and_stops_the_next_one_too(store: Store) -> None:
    """The work is done once; both runs end in the same words, and no later step runs."""
    runs = []

    def refuse(artifact: Artifact) -> None:
        raise VerificationError((artifact.path / "file").read_text())

    def work(ctx: StepContext) -> None:
        runs.append(1)
        (ctx.out / "file").write_text("SQNR too low")

    finding = replace(step("finding", work), require=refuse)
    later = step("later", lambda _ctx: runs.append(2), inputs={"in": "finding"})
    for _ in range(2):
        with pytest.raises(VerificationError, match=r"^finding: SQNR too low$"):
            go((finding, later), store)
    assert runs == [1]
    assert go((replace(finding, require=lambda _artifact: None),), store)["finding"].hit


def test_a_failing_tool_points_to_logs_that_exist(store: Store) -> None:
    """Log and reproduce script follow the move out of the staging directory, and the script runs."""

    def work(ctx: StepContext) -> None:
        Tool(argv=("sh", "-c", "echo bad >&2; exit 3"), log_path=ctx.out / "tool.log", cwd=ctx.out).run()

    with pytest.raises(ToolError) as caught:
        go((step("compile", work),), store)
    assert caught.value.log_path is not None
    assert caught.value.log_path.read_text() == "bad\n"
    script = caught.value.hint.rpartition(" ")[2]
    assert subprocess.run([script], check=False, capture_output=True).returncode == 3


def test_an_unexpected_exception_keeps_its_traceback(store: Store) -> None:
    """A bug in a step passes through unchanged, with a note that leads to the logs."""

    def work(ctx: StepContext) -> None:
        raise ZeroDivisionError(str(ctx.out))

    with pytest.raises(ZeroDivisionError) as caught:
        go((step("buggy", work),), store)
    kept = caught.value.__notes__[0].rpartition(" ")[2]
    assert "ZeroDivisionError" in (Path(kept) / "error.txt").read_text()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_nothing_and_passes_on(store: Store, stop: type[BaseException]) -> None:
    """Ctrl-C inside a step removes what was half done."""

    def work(ctx: StepContext) -> None:
        (ctx.out / "half").write_text("half")
        raise stop

    with pytest.raises(stop):
        go((step("slow", work),), store)
    assert not list((store.root / "work").iterdir())
    assert store.digests() == ()


def test_what_a_failed_run_kept_is_there_for_the_next_and_gone_after_success(store: Store) -> None:
    """A step goes on from what it left in its resume directory, and only its own key sees it."""
    found: list[list[str]] = []

    def work(ctx: StepContext) -> None:
        found.append(sorted(path.name for path in ctx.resume.iterdir()))
        (ctx.resume / f"part{len(found)}").write_text("done")
        if len(found) < 3:
            raise ToolError("stopped half-way")
        (ctx.out / "file").write_text("whole")

    for _attempt in range(2):
        with pytest.raises(ToolError, match="stopped half-way"):
            go((step("slow", work),), store)
    go((step("slow", work),), store)
    assert found == [[], ["part1"], ["part1", "part2"]]
    assert not any((store.root / "unfinished").iterdir())


def test_gc_drops_what_an_interrupted_run_kept(store: Store) -> None:
    """Unfinished work is nobody's artifact."""

    def work(ctx: StepContext) -> None:
        (ctx.resume / "part").write_text("done")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go((step("slow", work),), store)
    assert store.gc(dry_run=True) == 4
    store.gc()
    assert not any((store.root / "unfinished").iterdir())


def test_a_step_that_writes_nothing_fails(store: Store) -> None:
    """An empty artifact is a failure, not a result."""
    with pytest.raises(IntegrityError, match="wrote nothing"):
        go((step("lazy", lambda _ctx: None),), store)


@pytest.mark.parametrize("name", ["manifest.json", "provenance.json"])
def test_a_step_may_not_write_what_the_store_writes(store: Store, name: str) -> None:
    """Reserved names are refused rather than dropped."""
    with pytest.raises(IntegrityError, match=name):
        go((writing("x", name),), store)


def test_a_symlink_in_the_result_is_refused(store: Store) -> None:
    """An artifact is self-contained."""

    def work(ctx: StepContext) -> None:
        (ctx.out / "link").symlink_to("/etc/hostname")

    with pytest.raises(IntegrityError, match="link is a symlink"):
        go((step("linked", work),), store)


def test_a_full_disk_inside_a_step_is_disk_full(store: Store) -> None:
    """ENOSPC from the kernel, wrapped by a library, becomes DiskFull that names the file system."""

    def work(ctx: StepContext) -> None:
        (ctx.out / "half").write_text("half")
        try:
            with Path("/dev/full").open("wb", buffering=0) as full:
                full.write(b"x")
        except OSError as error:
            raise RuntimeError("serializer failed") from error

    with pytest.raises(DiskFull, match=r"is full \(.*free\)"):
        go((step("save", work),), store)
    assert not list((store.root / "work").iterdir())


def test_a_step_that_needs_more_than_is_free_does_not_start(store: Store) -> None:
    """The estimate is checked first."""
    ran = []
    huge = Step("huge", 1, Artifact, {}, {}, {}, lambda _ctx: ran.append(1), disk_bytes=2**62)
    with pytest.raises(DiskFull, match="are needed"):
        go((huge,), store)
    assert ran == []


def test_an_object_that_lost_a_file_is_built_again(store: Store) -> None:
    """A hit checks names and sizes; the damaged object is set aside and the listener is told."""
    artifact = go((writing("content"),), store)["write"].artifact
    (artifact.path / "file").write_text("cut")
    notes = Notes()
    result = run((writing("content"),), store, notes)["write"]
    assert not result.hit
    assert (result.artifact.path / "file").read_text() == "content"
    assert "1 missing or of another size (file)" in notes.texts[0]
    assert len(list((store.root / "quarantine").iterdir())) == 1


def test_a_hit_does_not_read_contents(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild that changes nothing hashes no file, whatever its size."""
    go(small_build(), store)

    def fail(*_args: object) -> None:
        raise AssertionError("a file was hashed")

    monkeypatch.setattr("pipeline.core.digest.hashlib.file_digest", fail)
    assert all(result.hit for result in go(small_build(), store).values())


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"made_by": "trtpipe"}', b"\xff"])
def test_a_corrupt_record_is_a_miss(store: Store, damage: bytes) -> None:
    """A record that cannot be read is built again, not trusted and not fatal."""
    go((writing("x"),), store)
    record = next((store.root / "actions").iterdir())
    record.write_bytes(damage)
    assert not go((writing("x"),), store)["write"].hit
    assert go((writing("x"),), store)["write"].hit


def test_a_record_under_a_wrong_key_is_a_miss(store: Store) -> None:
    """A record is believed only under the key that its own fields hash to."""
    go((writing("x"),), store)
    record = next((store.root / "actions").iterdir())
    record.rename(record.with_name(writing("y").action({}).key.removeprefix("sha256:") + ".json"))
    result = go((writing("y"),), store)["write"]
    assert not result.hit
    assert (result.artifact.path / "file").read_text() == "y"


def test_artifacts_do_not_depend_on_time_or_place(tmp_path: Path) -> None:
    """Two stores build the same digests."""
    one, other = (go(small_build(), Store(tmp_path / name)) for name in ("one", "other"))
    assert [r.artifact.digest for r in one.values()] == [r.artifact.digest for r in other.values()]


def test_an_input_that_exists_already_enters_the_key(store: Store, tmp_path: Path) -> None:
    """The digest of a source decides; its place does not."""

    def build(name: str, digest: str) -> StepResult:
        def work(ctx: StepContext) -> None:
            (ctx.out / "seen").write_text(ctx.inputs["source"].digest)

        source = Artifact(path=tmp_path / name, digest=digest)
        return go((step("use", work, inputs={"source": source}),), store)["use"]

    assert not build("here", "sha256:1").hit
    assert build("there", "sha256:1").hit
    assert not build("here", "sha256:2").hit
