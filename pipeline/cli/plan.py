"""plan: what a build would run, reuse and need, and how far its fallback is known."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import options, output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.core.plan import PlannedStep
    from pipeline.ladder import Outlook

_DIFFERENCE = {"openvino": "CPU differs from GPU", "vllm": "vLLM differs from what is proven"}


@click.command()
@options.config_argument
@options.store_option
@options.json_option
def plan(config: Path, overrides: tuple[str, ...], store_root: Path, as_json: bool) -> None:
    """Show what a build of CONFIG would run, reuse and need, and every step of its fallback. Runs nothing.

    A miss names the field that differs from the nearest earlier run of that stage.
    """
    from pipeline.config.load import load
    from pipeline.core.digest import FileHasher
    from pipeline.core.store import Store
    from pipeline.ladder import foresee, look, require_possible

    hasher, store = FileHasher(store_root / "stat-cache.json"), Store(store_root)
    ladder = look(load(config, overrides), hasher)
    outlooks = foresee(ladder, hasher, store)
    document = _of_build(outlooks[0]) | {"ladder": [_of_rung(each) for each in outlooks] if len(ladder) > 1 else []}
    if as_json:
        output.emit_json(document)
    else:
        _print(document)
        for label, problem in _warnings(outlooks):
            click.echo(f"\nwarning: {label}{problem}")
    require_possible(ladder)


def _of_build(outlook: Outlook) -> dict[str, Any]:
    """Say everything about one build: stages, needs, where the CPU differs, problems, and what a GPU gets."""
    from pipeline.examine import deviations, gpu_plan
    from pipeline.planner import needs as planner

    build = outlook.rung.build
    return {
        "name": build.config.name,
        "target": build.config.engine.target,
        "stages": [_of_stage(step) for step in outlook.steps],
        "needs": [asdict(need) for need in planner.needs(build.architecture, build.config)],
        "deviations": deviations(build.config),
        "problems": [asdict(problem) for problem in build.problems],
        **gpu_plan(build),
    }


def _of_rung(outlook: Outlook) -> dict[str, Any]:
    """Say it of a step of the ladder, with its fate and its size: measured when it was built, estimated else."""
    from pipeline.planner import needs as planner

    build, tried = outlook.rung.build, outlook.tried
    estimate = planner.checkpoint_bytes(build.architecture, build.config)
    return {
        **_of_build(outlook),
        **outlook.rung.document(),
        "fate": outlook.fate,
        "verdict": None if tried is None else tried.outcome,
        "checkpoint_bytes": estimate if tried is None else tried.checkpoint_bytes,
        "estimated": tried is None,
    }


def _of_stage(step: PlannedStep) -> dict[str, Any]:
    return {
        "name": step.step.name,
        "status": step.status,
        "key": step.key,
        "digest": step.digest,
        "reason": step.reason,
        "params": step.step.params,
        "toolchain": step.step.toolchain,
    }


def _warnings(outlooks: Sequence[Outlook]) -> list[tuple[str, str]]:
    """Each warning once, with the step that it is of unless it is of the config itself."""
    found: dict[str, str] = {}
    for outlook in outlooks:
        label = f"{outlook.rung.label}: " if outlook.rung.changes else ""
        for problem in outlook.rung.build.warnings:
            found.setdefault(str(problem), label)
    return [(label, problem) for problem, label in found.items()]


def _print(document: Mapping[str, Any]) -> None:
    click.echo(f"plan of '{document['name']}' for {document['target']}\n")
    rows = [(s["name"], s["status"], (s["key"] or "unknown")[7:19], s["reason"]) for s in document["stages"]]
    click.echo(output.table(("stage", "status", "key", "why"), rows))
    if document["ladder"]:
        click.echo("\n" + _ladder(document["ladder"]))
    needs = [(need["what"], output.size(need["n_bytes"]), need["why"]) for need in document["needs"]]
    click.echo("\n" + output.table(("needs", "size", "why"), needs))
    if "budget" in document:
        budget = [(row["what"], output.size(row["bytes"]), row["how"]) for row in document["budget"]["table"]]
        click.echo("\n" + output.table(("each GPU holds", "size", "why"), budget))
    if "commands" in document:
        click.echo("\ncommands that the GPU node runs (not run here):")
        for command in document["commands"]:
            click.echo("  " + shlex.join(command))
    for text in document["deviations"]:
        click.echo(f"\n{_DIFFERENCE.get(document['target'], 'not as proven')}: {text}")


def _ladder(steps: Sequence[Mapping[str, Any]]) -> str:
    """One line for each step: what a build would do with it, and which of its stages the store has."""
    rows = []
    for step in steps:
        size = output.size(step["checkpoint_bytes"])
        known = ", ".join(f"{stage['name']} {stage['status']}" for stage in step["stages"])
        impossible = sum(problem["severity"] == "error" for problem in step["problems"])
        fate = f"{step['fate']} ({step['verdict']})" if step["verdict"] else step["fate"]
        rows.append(
            (
                step["label"],
                f"about {size}" if step["estimated"] else size,
                "impossible" if impossible else fate,
                f"{impossible} problem(s)" if impossible else known,
            )
        )
    return output.table(("step", "checkpoint", "a build", "stages"), rows)
