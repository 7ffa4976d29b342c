"""Running somebody else's program: logged, bounded in time, reproducible, and never left behind."""

from __future__ import annotations

import codecs
import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import HostError, ToolError

TAIL_LINES = 20
TERM_GRACE_S = 5.0
_POLL_S = 0.2
_CHUNK_BYTES = 65536


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One run of an external program.

    argv: program and arguments; no shell is involved.
    log_path: where stdout and stderr go together; `<log>.reproduce.sh` beside it runs the same again.
    cwd: working directory; None is the current one.
    env: what differs from this process's environment; None as a value removes a variable.
    timeout_s: seconds until the program is killed; None waits for ever.
    """

    argv: tuple[str, ...]
    log_path: Path
    cwd: Path | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    timeout_s: float | None = None

    @property
    def reproduce_path(self) -> Path:
        """The script that runs the same command alone."""
        return self.log_path.with_suffix(".reproduce.sh")

    def run(self, on_line: Callable[[str], None] = lambda _line: None) -> None:
        """Run the program to its end.

        Args:
            on_line: called with each line as it comes, without its end; a carriage return ends one too.

        Raises:
            HostError: the program does not exist here.
            ToolError: it exited with another code than 0 or ran out of time; carries the last 20 lines,
                the log and the reproduce script. Its whole process group is dead by then.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._write_reproduce()
        started = time.monotonic()
        tail: deque[str] = deque(maxlen=TAIL_LINES)

        def take(line: str) -> None:
            tail.append(line)
            on_line(line)

        with self._started() as process:
            finished = self._pump(process, take, started)
        code: int = process.returncode
        seconds = time.monotonic() - started
        if not finished:
            raise self._failed(f"did not end within {self.timeout_s:.0f} s and was stopped", tail)
        if code != 0:
            how = f"exited {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
            raise self._failed(f"{how} after {seconds:.0f} s", tail)

    def _failed(self, how: str, tail: deque[str]) -> ToolError:
        lines = "".join(f"\n  | {line}" for line in tail) or " It printed nothing."
        return ToolError(
            f"{Path(self.argv[0]).name} {how}. Last lines:{lines}",
            hint=f"Run it alone: {self.reproduce_path}",
            log_path=self.log_path,
        )

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start the program as leader of its own process group and end that group on the way out."""
        environment = os.environ | {name: value for name, value in self.env.items() if value is not None}
        for name in [name for name, value in self.env.items() if value is None]:
            environment.pop(name, None)
        try:
            process = subprocess.Popen(
                self.argv,
                cwd=self.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (FileNotFoundError, PermissionError) as error:
            raise HostError(
                f"'{self.argv[0]}' cannot be started: {error.strerror}", hint="Install it or put it on PATH."
            ) from error
        with process:
            try:
                yield process
            finally:
                end_process_group(process)

    def _pump(self, process: subprocess.Popen[bytes], take: Callable[[str], None], started: float) -> bool:
        """Copy output to the log until the program ends; False when its time ran out."""
        assert process.stdout is not None  # noqa: S101 - stdout=PIPE above
        descriptor = process.stdout.fileno()
        decoder, pending = codecs.getincrementaldecoder("utf-8")("replace"), ""
        with self.log_path.open("wb") as log:
            while True:
                # Read the state first: what a program printed before it ended is then in the pipe already.
                ended = process.poll() is not None
                readable = select.select([descriptor], [], [], 0 if ended else _POLL_S)[0]
                chunk = os.read(descriptor, _CHUNK_BYTES) if readable else b""
                log.write(chunk)
                log.flush()
                *lines, pending = re.split(r"\r\n|\n|\r", pending + decoder.decode(chunk))
                for line in filter(None, lines):
                    take(line)
                if not chunk and ended:
                    break
                if self.timeout_s is not None and time.monotonic() - started > self.timeout_s:
                    return False
                if readable and not chunk:
                    with suppress(subprocess.TimeoutExpired):  # it closed its output and still works
                        process.wait(_POLL_S)
        if pending:
            take(pending)
        return True

    def _write_reproduce(self) -> None:
        lines = ["#!/bin/sh", "# Runs the same command again, alone.", "set -e"]
        lines.append(f"cd {shlex.quote(str(self.cwd or Path.cwd()))}")
        for name, value in sorted(self.env.items()):
            lines.append(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
        lines.append(f"exec {shlex.join(self.argv)}")
        self.reproduce_path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.reproduce_path.chmod(0o755)


def end_process_group(process: subprocess.Popen[bytes], grace_s: float = TERM_GRACE_S) -> None:
    """Stop a process that leads its own group, and every process in that group.

    Asks with SIGTERM, waits `grace_s` for the leader, then kills what is left. The group must have been
    made with start_new_session=True.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
