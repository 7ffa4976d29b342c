"""A small real build of three steps, and ways to run it in a process that dies, races or runs out of disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.core.artifacts import Artifact
from pipeline.core.progress import Silent
from pipeline.core.runner import run
from pipeline.core.stage import Step, StepContext
from pipeline.core.store import Store
from pipeline.errors import DiskFull
from pipeline.host.files import write_atomic

SMALL_BUILD = ("first", "second", "third")


def step(
    name: str,
    work: Callable[[StepContext], None],
    *,
    inputs: dict[str, str | Artifact] | None = None,
    **params: str | int,
) -> Step:
    """Return a step of version 1 with one tool."""
    return Step(name, 1, Artifact, params, inputs or {}, {"tool": "1.0"}, work)


def small_build(executions: Path | None = None, pause_s: float = 0.0) -> tuple[Step, ...]:
    """Return three steps, each reading all earlier ones.

    Args:
        executions: a file to which each running step appends its name.
        pause_s: seconds to sleep between two files, so that a kill or a race hits in the middle.
    """

    def work(name: str) -> Callable[[StepContext], None]:
        def write(ctx: StepContext) -> None:
            if executions is not None:
                with executions.open("a") as log:
                    log.write(f"{name}\n")
            (ctx.out / "nested" / "empty").mkdir(parents=True)
            seen = {role: artifact.digest for role, artifact in ctx.inputs.items()}
            for part in ("a.json", "nested/b.json", "z.json"):
                (ctx.out / part).write_text(json.dumps([name, part, seen], sort_keys=True))
                time.sleep(pause_s)

        return write

    return tuple(
        step(name, work(name), inputs={earlier: earlier for earlier in SMALL_BUILD[:index]})
        for index, name in enumerate(SMALL_BUILD)
    )


def build_in_child(store: Path, die_at: int) -> tuple[bool, int]:
    """Run the small build in a forked child that kills itself (SIGKILL) at its `die_at`-th system event.

    Events are Python's audit events: every open, rename, mkdir, unlink, lock and the like, reported before
    it happens. Returns whether the child died of it, and its exit status when it did not.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            watching_memory = bool(arguments) and str(arguments[0]).startswith("/proc")
            if watching_memory or not event.startswith(("open", "os.", "fcntl.", "shutil.")):
                return
            seen += 1
            if seen > die_at:
                signal.raise_signal(signal.SIGKILL)

        try:
            sys.addaudithook(count)
            run(small_build(), Store(store), Silent())
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status), status


def fill_a_small_disk(mount: Path) -> dict[str, object]:
    """On a small file system: run out of space in a step, then free it and build again; report what was seen."""
    ballast = mount / "ballast"
    free = shutil.disk_usage(mount).free
    store = Store(mount / "store")

    def greedy(ctx: StepContext) -> None:
        (ctx.out / "tool.log").write_text("started\n")
        (ctx.out / "weights").write_bytes(b"x" * (free // 2))

    def modest(ctx: StepContext) -> None:
        (ctx.out / "index").write_bytes(b"small")

    steps = (step("modest", modest), step("greedy", greedy, inputs={"index": "modest"}))
    ballast.write_bytes(b"x" * (free * 3 // 4))
    report: dict[str, object] = {"error": None}
    try:
        run(steps, store, Silent())
    except DiskFull as error:
        report["error"] = str(error)
    try:
        write_atomic(mount / "document", b"x" * free)
    except DiskFull as error:
        report["write_atomic"] = str(error)
    report["leftovers"] = sorted(path.name for path in [*(store.root / "work").iterdir(), *mount.glob(".*")])
    report["log"] = [path.read_text() for path in (store.root / "failed").glob("*/tool.log")]
    report["objects"] = len(store.digests())
    ballast.unlink()
    results = run(steps, store, Silent())
    report["rerun"] = {name: result.hit for name, result in results.items()}
    report["corrupt"] = store.verify()["corrupt"]
    return report


def main(arguments: list[str]) -> None:
    """Serve the tests that need another process: `build STORE EXECUTIONS PAUSE_S`, `disk-full MOUNT`."""
    match arguments:
        case ["build", store, executions, pause_s]:
            results = run(small_build(Path(executions), float(pause_s)), Store(Path(store)), Silent())
            print({name: result.hit for name, result in results.items()})  # noqa: T201 - read by the test
        case ["disk-full", mount]:
            print(json.dumps(fill_a_small_disk(Path(mount))))  # noqa: T201 - read by the test
        case _:
            raise SystemExit(f"unknown arguments: {arguments}")


if __name__ == "__main__":
    main(sys.argv[1:])
