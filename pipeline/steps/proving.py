"""Steps that prove the quantized checkpoint and judge it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pipeline.core.artifacts import (
    Artifact,
    QualityVerdict,
    QuantizedCheckpoint,
    SourceCheckpoint,
    VerificationReport,
)
from pipeline.core.digest import FileHasher
from pipeline.core.stage import Inputs, Step, StepContext
from pipeline.errors import VerificationError
from pipeline.examine import Build
from pipeline.host.files import write_atomic
from pipeline.host.probe import toolchain
from pipeline.measure.gate import judge
from pipeline.steps.identity import file_identity, reference_identity


def verify(build: Build, inputs: Inputs, hasher: FileHasher) -> Step:
    """Prove with an independent reader that the checkpoint computes what its source computes.

    Tensors and layers are held to `source`, which was quantized; text and tasks to `original`, where that is another.
    """
    limits, quality = build.config.verify, build.config.quality
    if quality.limited:
        limits = limits.model_copy(update={"num_tokens": max(limits.num_tokens, quality.num_tokens)})

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.verify import verify

        quantized = ctx.input("quantized", QuantizedCheckpoint)
        # A refusal is a result too: its report is kept, and `require` says it to whoever would go on.
        with suppress(VerificationError):
            verify(
                ctx.input("source", SourceCheckpoint),
                quantized,
                limits,
                out=ctx.out,
                progress=ctx.progress,
                tasks=quality.tasks,
                original=ctx.input("original", SourceCheckpoint) if "original" in ctx.inputs else None,
            )

    def require(verification: Artifact) -> None:
        from pipeline.quantize.proof import require_proven

        require_proven(verification.path)

    return Step(
        name="verify",
        version=4,
        output=VerificationReport,
        params=limits.model_dump(mode="json")
        | {
            "dataset": file_identity(limits.dataset, hasher),
            "reference": reference_identity(limits.reference, hasher),
            "tasks": [[path.name, hasher.digest(path)] for path in quality.tasks],
        },
        inputs=inputs,
        toolchain=toolchain("torch", "transformers"),
        run=run,
        require=require,
    )


def gate(build: Build, inputs: Inputs, choice: Mapping[str, Any]) -> Step:
    """Judge what verify measured by the limits of `quality`; nothing is compiled that does not pass."""
    quality = build.config.quality
    told: dict[str, Any] = {"format": build.label, "rejected": [], **choice}

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.proof import read_report

        verdict = judge(read_report(ctx.input("verification", VerificationReport).path), quality)
        verdict.require_accepted()
        checkpoint = ctx.input("quantized", QuantizedCheckpoint)
        document = verdict.document() | told | {"checkpoint_bytes": checkpoint.weight_bytes}
        write_atomic(ctx.out / "quality.json", (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())

    return Step(
        name="gate",
        version=2,
        output=QualityVerdict,
        params={"quality": quality.model_dump(mode="json", exclude={"num_tokens", "tasks"}), "choice": told},
        inputs=inputs,
        toolchain={},
        run=run,
    )
