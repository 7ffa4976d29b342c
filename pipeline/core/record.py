"""What is written down about a finished step: actions/<key>.json in the store, provenance.json in the artifact.

One document serves both: the store finds an artifact by it, and whoever meets the artifact elsewhere
can trace it to its source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.core.digest import JSON, PREFIX, SCHEME
from pipeline.core.stage import Action
from pipeline.errors import ConfigError, IntegrityError


@dataclass(frozen=True)
class Parent:
    """An input: its digest, kind, the step that made it (None when it came from outside) and where it lay."""

    digest: str
    kind: str
    step: str | None
    path: str


@dataclass(frozen=True)
class Execution:
    """Circumstances of a run that do not decide its result. Times are ISO 8601 in UTC."""

    host: Mapping[str, str]
    argv: tuple[str, ...]
    started_at: str
    finished_at: str
    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class Record:
    """One finished step: what was asked, what came out, from what and how."""

    action: Action
    kind: str
    digest: str
    parents: Mapping[str, Parent]
    execution: Execution

    def document(self) -> dict[str, JSON]:
        """Return the JSON document; `parse` reads it back."""
        return {
            "made_by": "trtpipe",
            "key": self.action.key,
            "action": self.action.document(),
            "kind": self.kind,
            "digest": self.digest,
            "parents": {role: asdict(parent) for role, parent in self.parents.items()},
            "execution": asdict(self.execution) | {"argv": list(self.execution.argv)},
        }

    def encode(self) -> bytes:
        """Return the document as indented UTF-8 JSON."""
        return json.dumps(self.document(), indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def read_record(path: Path) -> Record:
    """Read a record and check that its key belongs to its content.

    Raises:
        IntegrityError: the file is missing, not a record, of another scheme, or was changed.
    """
    try:
        document = json.loads(path.read_bytes())
        action = document["action"]
        scheme = action.pop("scheme")
        record = Record(
            action=Action(**action),
            kind=document["kind"],
            digest=document["digest"],
            parents={role: Parent(**parent) for role, parent in document["parents"].items()},
            execution=Execution(**document["execution"] | {"argv": tuple(document["execution"]["argv"])}),
        )
        genuine = scheme == SCHEME and record.action.key == document["key"] and record.digest.startswith(PREFIX)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise IntegrityError(f"{path} is not a record of a step: {error}") from error
    if not genuine:
        raise IntegrityError(f"{path} was changed, or comes from another version of trtpipe")
    return record
