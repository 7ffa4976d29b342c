"""What a step is: a function from artifacts to one artifact, and everything that decides its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline.core.artifacts import Artifact
from pipeline.core.digest import JSON, SCHEME, digest_json
from pipeline.core.progress import Progress

A = TypeVar("A", bound=Artifact)
Inputs = Mapping[str, str | Artifact]
"""Role -> name of an earlier step, or an artifact that exists already."""


@dataclass(frozen=True)
class StepContext:
    """What a running step gets.

    inputs: role -> artifact, to be read only.
    out: an empty directory; the step writes here and nowhere else, and what it leaves is the artifact.
        Symlinks are refused. `log/` and `*.log` at its root are not part of the artifact: they are
        dropped when the step succeeds and kept when it fails.
    progress: who listens.
    resume: a directory of this action's own that outlives a failed or killed run and is removed after a
        successful one. What lies there is of the same version, params, inputs and tools; it may be cut short
        unless it was written atomically. The artifact's bytes must not depend on it.
    """

    inputs: Mapping[str, Artifact]
    out: Path
    progress: Progress
    resume: Path

    def input(self, role: str, kind: type[A]) -> A:
        """Return the artifact of a role, which is of this kind."""
        artifact = self.inputs[role]
        if not isinstance(artifact, kind):
            raise TypeError(f"{role} is {type(artifact).__name__}, expected {kind.__name__}")
        return artifact


@dataclass(frozen=True)
class Step:
    """One step of a build.

    Everything that can change the bytes of the result is in `version`, `params`, `inputs` and
    `toolchain`; what only steers the execution (threads, verbosity) must not change them and stays out.

    name: unique within a build.
    version: raised when the code would write other bytes for the same inputs.
    output: the artifact's type.
    params: JSON.
    inputs: what it reads.
    toolchain: distribution or tool -> version.
    run: does the work.
    disk_bytes: an estimate of what the step writes, checked against free space before it starts; not
        part of the key.
    require: raises when no later step may run on what this one made. Asked each time, built or found: so a
        finding is kept like any other result, and refuses every run alike.
    """

    name: str
    version: int
    output: type[Artifact]
    params: Mapping[str, JSON]
    inputs: Inputs
    toolchain: Mapping[str, str]
    run: Callable[[StepContext], None]
    disk_bytes: int = 0
    require: Callable[[Artifact], None] = lambda _artifact: None

    def action(self, inputs: Mapping[str, str]) -> Action:
        """Return what this step does once the digests of its inputs (role -> digest) are known."""
        return Action(self.name, self.version, self.params, inputs, self.toolchain)


@dataclass(frozen=True)
class Action:
    """The hashed description of one run of a step; equal actions make equal artifacts."""

    step: str
    version: int
    params: Mapping[str, JSON]
    inputs: Mapping[str, str]
    toolchain: Mapping[str, str]

    def document(self) -> dict[str, JSON]:
        """Return the fields that the key covers."""
        return {
            "scheme": SCHEME,
            "step": self.step,
            "version": self.version,
            "params": self.params,
            "inputs": self.inputs,
            "toolchain": self.toolchain,
        }

    @property
    def key(self) -> str:
        """The digest "sha256:<hex>" of the action."""
        return digest_json(self.document())


def check_steps(steps: tuple[Step, ...]) -> None:
    """Refuse a list of steps that is not a plan.

    Raises:
        ValueError: two steps share a name, or an input names a step that does not come before.
    """
    seen: set[str] = set()
    for step in steps:
        if step.name in seen:
            raise ValueError(f"two steps are named '{step.name}'")
        for role, source in step.inputs.items():
            if isinstance(source, str) and source not in seen:
                raise ValueError(f"step '{step.name}' takes '{role}' from '{source}', which does not come before it")
        seen.add(step.name)
