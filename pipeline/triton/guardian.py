"""The process between trtpipe and tritonserver: whatever happens to either, nothing is left behind.

Run by file path with the standard library only. Its orders are lines on stdin: what to start (JSON), then
"watch" once the models are loaded, then "stop"; the end of stdin means the same, for then the parent is gone,
kill -9 included. The server is ended on "stop", and after "watch" also when one of its Python stubs dies:
Triton lets the requests of a dead stub hang for ever. However it ends, its whole process group is killed and
its shared-memory regions and scratch folder are removed.

The parent is watched through a pipe because PR_SET_PDEATHSIG follows the *thread* that started a child; the
server is tied to the guardian by that signal, for here is one thread only.

Answers on stdout, one JSON object a line: {"pid": int} once started; at the end {"exit": int} with Popen's
convention (negative: the signal) and, when a stub died, {"lost": its command line}.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from io import RawIOBase
from pathlib import Path
from typing import TypedDict

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
UNLOAD_S = 3.0
UNLOADING = b"All models are stopped, unloading models"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives on Linux


class Launch(TypedDict):
    """What to start; `stop_timeout_s` is the time a clean stop may take before SIGKILL."""

    argv: list[str]
    env: dict[str, str]
    log: str
    scratch: str
    shm_prefix: str
    stop_timeout_s: float


class Event(TypedDict, total=False):
    """One answer of the guardian."""

    pid: int
    exit: int
    lost: str


def main() -> None:
    """Start the server of the first stdin line and see it to its end."""
    # Guard: unbuffered, or an order sent early would sit in a buffer where poll() does not see it.
    orders = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115 - open as long as the process
    launch: Launch = json.loads(orders.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        # A service manager signals every process of a unit; the parent decides what a signal means. A handler
        # is reset when the server starts, where SIG_IGN would be inherited.
        signal.signal(number, lambda *_: None)
    # Stubs whose server was killed become children of this process, so they can be waited for.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    with Path(launch["log"]).open("ab") as log:
        server = subprocess.Popen(
            launch["argv"],
            env=launch["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one thread only
        )
    _tell({"pid": server.pid})
    lost = _see_to_its_end(server.pid, orders)
    if lost is None:
        _stop(server.pid, Path(launch["log"]), launch["stop_timeout_s"])
    # The leader is not reaped yet, so the group's number cannot belong to anyone else.
    os.killpg(server.pid, signal.SIGKILL)
    end: Event = {"exit": server.wait()}
    if lost:
        end["lost"] = lost
    _reap_orphans()
    for region in SHARED_MEMORY.glob(launch["shm_prefix"] + "*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(launch["scratch"], ignore_errors=True)
    _tell(end)


def _see_to_its_end(pid: int, orders: RawIOBase) -> str | None:
    """Wait until the server exited (""), a stub died (its command line) or the server is to be stopped (None)."""
    exited = os.pidfd_open(pid)
    stubs: dict[int, str] = {}
    wakeup = select.poll()
    wakeup.register(exited, select.POLLIN)
    wakeup.register(orders.fileno(), select.POLLIN | select.POLLHUP)
    while True:
        ready = {descriptor for descriptor, _event in wakeup.poll()}
        if exited in ready:
            return ""
        for descriptor in ready & stubs.keys():
            return stubs[descriptor]
        if orders.readline().strip() != b"watch":
            return None
        for child in _children(pid):
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            stubs[descriptor := os.pidfd_open(child)] = command.strip()
            wakeup.register(descriptor, select.POLLIN)


def _stop(pid: int, log: Path, timeout_s: float) -> None:
    """Ask the server to finish its requests and unload; return when it did, or when the rest may be skipped.

    Triton unloads models only after the requests in flight are done, and says so. From then on nothing is lost
    by killing it: once its Python stubs have run their finalize() and gone, what is left is its own teardown in
    steps of one second; and a stub that does not go in UNLOAD_S never will. (Seen in Triton 2.51: a decoupled
    model that answered from its own threads keeps a reference and is never unloaded.)
    """
    exited = os.pidfd_open(pid)
    had_stubs = bool(_children(pid))
    start = log.stat().st_size
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    unloading = False
    while time.monotonic() < deadline:
        if select.select([exited], [], [], POLL_S)[0] or (had_stubs and not _children(pid)):
            return
        if had_stubs and not unloading and UNLOADING in _read_from(log, start):
            unloading = True
            deadline = min(deadline, time.monotonic() + UNLOAD_S)


def _read_from(file: Path, offset: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read()


def _children(pid: int) -> list[int]:
    """List the child processes of every thread of `pid`."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in listing.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # that thread ended meanwhile
            continue
    return found


def _reap_orphans() -> None:
    try:
        while True:
            os.wait()
    except ChildProcessError:
        return


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _tell(event: Event) -> None:
    try:
        os.write(sys.stdout.fileno(), json.dumps(event).encode() + b"\n")
    except BrokenPipeError:  # the parent is gone, which is one of the reasons to be here
        return


if __name__ == "__main__":
    main()
