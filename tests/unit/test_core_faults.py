"""The store under kill -9, under two builds at once, and on a full disk, all for real."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.progress import Silent
from pipeline.core.runner import run
from pipeline.core.store import Store
from pipeline.errors import StoreBusy
from tests.support.faults import SMALL_BUILD, build_in_child, small_build

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start tests.support.faults in a process of its own."""
    argv = [sys.executable, "-m", "tests.support.faults", *map(str, arguments)]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check_rerun(store: Path, expected: list[str]) -> None:
    """Build again over what a dead process left: same artifacts, whole store, no leftovers."""
    results = run(small_build(), Store(store), Silent())
    assert [result.artifact.digest for result in results.values()] == expected
    report = Store(store).verify()
    assert report["checked"] == len(expected)
    assert report["corrupt"] == {}
    assert list((store / "work").iterdir()) == []
    assert list((store / "quarantine").iterdir()) == []


def expected_digests(tmp_path: Path) -> list[str]:
    """Build undisturbed and return the digests."""
    results = run(small_build(), Store(tmp_path / "undisturbed"), Silent())
    return [result.artifact.digest for result in results.values()]


@pytest.fixture
def memory_disk() -> Iterator[Path]:
    """A directory where fsync costs nothing, for tests with hundreds of builds; any temporary one without it."""
    shm = Path("/dev/shm")  # noqa: S108 - a private directory is made inside
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_dying_before_any_file_operation_leaves_nothing_half_done(memory_disk: Path) -> None:
    """The build is killed before each of its file operations in turn, and a rerun always heals the store."""
    expected = expected_digests(memory_disk)
    deaths = 0
    while True:
        store = memory_disk / f"store-{deaths}"
        died, status = build_in_child(store, die_at=deaths)
        if not died:
            break
        check_rerun(store, expected)
        shutil.rmtree(store)
        deaths += 1
    assert os.waitstatus_to_exitcode(status) == 0
    assert deaths > 100  # opens, renames, locks and unlinks of three steps


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_dying_again_and_again_in_one_store_still_ends_well(tmp_path: Path) -> None:
    """What one dead build left does not trip the next one that dies."""
    expected = expected_digests(tmp_path)
    store = tmp_path / "store"
    for die_at in random.Random(7).sample(range(150), 25):
        build_in_child(store, die_at)
    check_rerun(store, expected)


@pytest.mark.parametrize("seed", range(4))
def test_kill_minus_nine_at_a_random_moment(tmp_path: Path, seed: int) -> None:
    """A separate process is killed somewhere inside a step."""
    expected = expected_digests(tmp_path)
    executions = tmp_path / "executions"
    process = start("build", tmp_path / "store", executions, 0.05)
    while not executions.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0, 0.4))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    check_rerun(tmp_path / "store", expected)


def test_two_builds_at_once_do_each_step_once(tmp_path: Path) -> None:
    """One process builds a step, the other waits for it and takes the hit; together they do all steps once."""
    executions = tmp_path / "executions"
    processes = [start("build", tmp_path / "store", executions, 0.2) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sorted(executions.read_text().split()) == sorted(SMALL_BUILD)
    assert Store(tmp_path / "store").verify() | {"bytes": 0} == {"checked": 3, "bytes": 0, "corrupt": {}}


def test_a_step_that_another_process_builds_for_too_long_is_busy(tmp_path: Path) -> None:
    """The waiting build says whom it waits for, then gives up and names that process."""
    executions = tmp_path / "executions"
    process = start("build", tmp_path / "store", executions, 5)
    try:
        while not executions.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        notes: list[str] = []

        class Notes(Silent):
            def note(self, text: str) -> None:
                notes.append(text)

        with pytest.raises(StoreBusy, match=f"process {process.pid} still holds"):
            run(small_build(), Store(tmp_path / "store", lock_timeout_s=0.3), Notes())
        assert notes == [f"first: waiting for process {process.pid}, which is building the same"]
    finally:
        process.kill()
        process.communicate()


def test_work_of_a_live_process_is_not_swept(tmp_path: Path) -> None:
    """A starting build leaves alone what another is still writing, however old it is."""
    executions = tmp_path / "executions"
    process = start("build", tmp_path / "store", executions, 0.1)
    try:
        while not executions.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        work = next((tmp_path / "store" / "work").iterdir())
        os.utime(work, (0, 0))
        with Store(tmp_path / "store").in_use():
            assert work.exists()
        assert process.wait() == 0, process.communicate()
    finally:
        process.kill()
        process.communicate()


def test_a_real_full_disk(tmp_path: Path) -> None:
    """On a file system of 4 MiB a step runs out of space: DiskFull, no leftovers, its log kept, and a rerun works."""
    mount = tmp_path / "disk"
    mount.mkdir()
    script = 'mount -t tmpfs -o size=4m tmpfs "$0" || exit 99; exec "$@"'
    argv = ["unshare", "-rm", "sh", "-c", script, str(mount)]
    argv += [sys.executable, "-m", "tests.support.faults", "disk-full", str(mount)]
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("the program unshare is not installed")
    if done.returncode in (1, 99) and re.search("unshare failed|permission denied|mount:", done.stderr):
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert f"{mount} (tmpfs) is full" in report["error"]
    assert "free)" in report["error"]
    assert "cache gc" in report["error"]
    assert f"{mount} (tmpfs) is full" in report["write_atomic"]
    assert report["leftovers"] == []
    assert report["log"] == ["started\n"]
    assert report["objects"] == 1
    assert report["rerun"] == {"modest": True, "greedy": False}
    assert report["corrupt"] == {}
