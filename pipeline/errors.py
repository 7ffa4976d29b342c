"""Every way trtpipe can fail, each with its own exit code.

    TrtpipeError
    ├── ConfigError          3   the config is invalid or asks for an illegal combination
    ├── HostError            4   this machine lacks a tool, driver, GPU class or memory
    │   └── DiskFull        20   a file system ran out of space
    ├── IntegrityError       5   an artifact is not what its manifest says
    │   ├── SourceNotFound  21   the source checkpoint does not exist or cannot be fetched
    │   ├── Unreadable      22   a file exists and cannot be read
    │   ├── BadSafetensors  23   truncated or malformed safetensors
    │   ├── BadGGUF         24   truncated or malformed GGUF
    │   ├── BadTokenizer    25   tokenizer and weights do not belong together
    │   └── UnsafeCheckpoint 26  pickle weights, or remote code that the config does not allow
    ├── ToolError            6   ModelOpt, OpenVINO or trtllm-build failed
    ├── VerificationError    7   the checkpoint does not compute what its source computes
    ├── ServeError           8   the server did not become ready
    │   ├── PortInUse       27   a port is taken by another process
    │   └── ServerDied      28   tritonserver exited while loading or serving
    ├── MeasurementError     9   a measurement cannot tell what was asked of it
    ├── GateFailed          10   a sound measurement found less quality than allowed: a verdict, not a fault
    ├── RequestError        29   a running server refused or failed a request
    ├── StoreBusy           75   another live build holds the lock; safe to try again
    └── Interrupted        130   stopped by the user; a rerun goes on behind what was finished

Library code raises these and only cli/ prints and exits. Exit code 1 is a bug of ours, 2 a wrong
command line (Click's own). This module imports nothing else of the project.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One finding of a check: what is wrong, where, and what to do.

    `where` is "file:line key.path" for a config, an artifact path or a tensor name otherwise.
    """

    message: str
    where: str = ""
    hint: str = ""
    severity: Severity = "error"

    def __str__(self) -> str:
        """Say it in one line: where, what, what to do."""
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} {self.hint}" if self.hint else text


class TrtpipeError(Exception):
    """A failure that a user can act on.

    Args:
        message: what failed, with the offending value and where.
        hint: one next action.
        problems: every finding, when a check collected several.
        log_path: the full log of an external tool or server.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        problems: Sequence[Problem] = (),
        log_path: Path | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.problems = tuple(problems)
        self.log_path = log_path

    def __str__(self) -> str:
        """Say what failed, then every problem, the log and the next action."""
        lines = [self.message]
        lines += [f"  {problem}" for problem in self.problems]
        if self.log_path is not None:
            lines.append(f"  full log: {self.log_path}")
        if self.hint:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)


class ConfigError(TrtpipeError):
    """The config is invalid or asks for an illegal combination; lists every problem."""

    exit_code = 3


class HostError(TrtpipeError):
    """This machine lacks a tool, driver, GPU class or memory."""

    exit_code = 4


class DiskFull(HostError):
    """A file system ran out of space, or would."""

    exit_code = 20


class IntegrityError(TrtpipeError):
    """An artifact is not what its manifest says."""

    exit_code = 5


class SourceNotFound(IntegrityError):
    """The source checkpoint does not exist or cannot be fetched from here."""

    exit_code = 21


class Unreadable(IntegrityError):
    """A file exists and cannot be read."""

    exit_code = 22


class BadSafetensors(IntegrityError):
    """A safetensors file is truncated or malformed."""

    exit_code = 23


class BadGGUF(IntegrityError):
    """A GGUF file is truncated, malformed or of a kind that is not supported."""

    exit_code = 24


class BadTokenizer(IntegrityError):
    """Tokenizer and weights do not belong together."""

    exit_code = 25


class UnsafeCheckpoint(IntegrityError):
    """Pickle weights, or remote code that the config does not allow by name."""

    exit_code = 26


class ToolError(TrtpipeError):
    """A tool that trtpipe drives (ModelOpt, OpenVINO, trtllm-build) failed."""

    exit_code = 6


class VerificationError(TrtpipeError):
    """The quantized checkpoint does not compute what its source computes."""

    exit_code = 7


class ServeError(TrtpipeError):
    """The server did not become ready in time."""

    exit_code = 8


class PortInUse(ServeError):
    """A port is taken by another process."""

    exit_code = 27


class ServerDied(ServeError):
    """tritonserver exited while loading or serving."""

    exit_code = 28


class MeasurementError(TrtpipeError):
    """A measurement is invalid, or its confidence interval lies on both sides of the limit."""

    exit_code = 9


class GateFailed(TrtpipeError):
    """A sound measurement found less quality than the config allows: a verdict, not a fault."""

    exit_code = 10


class RequestError(TrtpipeError):
    """A running server refused or failed a request."""

    exit_code = 29


class StoreBusy(TrtpipeError):
    """Another live build holds the lock; safe to try again."""

    exit_code = 75


class Interrupted(TrtpipeError):
    """Stopped by the user; a rerun goes on behind what was finished."""

    exit_code = 130
