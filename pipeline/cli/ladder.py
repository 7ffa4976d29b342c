"""ladder: the config and every step of its fallback, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import options, output
from pipeline.cli.build import prepare_ladder, wait_without_spinning
from pipeline.cli.progress import for_this_terminal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.measure.speed import Speed

FAILED = {"unproven": "fails verify", "unjudged": "cannot be judged"}
SHOWN = {"perplexity_increase": "{:+.2%}", "kl_nats": "{:.3g}", "top1_agreement": "{:.1%}"}


@click.command()
@options.config_argument
@options.store_option
@click.option(
    "--speed/--no-speed",
    default=True,
    show_default=True,
    help="Also compile every step and measure it, where its target runs here: on a CPU some 10 s a sample of a small "
    "model, times steps, times repeats.",
)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Samples of each step's speed.")
@click.option(
    "--concurrency", type=click.IntRange(2), default=8, show_default=True, help="Requests at once, besides one alone."
)
@options.json_option
def ladder(
    config: Path,
    overrides: tuple[str, ...],
    store_root: Path,
    speed: bool,
    repeats: int,
    concurrency: int,
    as_json: bool,
) -> None:
    """Build CONFIG and each step of its fallback until verify, and compare size, speed and quality.

    Quality stands with its confidence interval, speed with the lowest and highest of the repeats. The arrow marks
    what a build would take.

    \b
    trtpipe ladder my.yaml
    trtpipe ladder my.yaml --no-speed --json
    """
    from pipeline.ladder import Effort, climb, measure_speed

    rungs, store, hasher = prepare_ladder(config, overrides, store_root)
    wait_without_spinning()
    progress = for_this_terminal()
    tried = list(climb(rungs, hasher, store, progress))
    steps = [each.document() for each in tried]
    chosen = next((number for number, step in enumerate(steps) if step["accepted"]), None)
    document: dict[str, Any] = {"name": rungs[0].build.config.name, "steps": steps, "chosen": chosen}
    if speed:
        effort = Effort(repeats=repeats, concurrency=concurrency)
        speeds = measure_speed(tried, effort, hasher, store, progress)
        for step, measured in zip(steps, speeds, strict=True):
            step["speed"] = {"not_run": measured} if isinstance(measured, str) else measured.document()
        document["machine"] = _machine(speeds)
    if as_json:
        output.emit_json(document)
        return
    for table in _tables(document):
        click.echo(f"\n{table}")
    if chosen is None:
        click.echo("\nno step passes the quality gate")


def _machine(speeds: Sequence[Speed | str]) -> dict[str, Any]:
    """Say where speed was measured, and what else that machine did meanwhile."""
    from pipeline.host.probe import probe

    host = probe()
    rounds = [each for speed in speeds if not isinstance(speed, str) for each in speed.rounds]
    busy = [each.busy_elsewhere for each in rounds if each.busy_elsewhere is not None]
    return {
        "cpu": host.cpu_model,
        "usable_cores": host.usable_cores,
        "openvino_genai": host.versions.get("openvino-genai"),
        "cores_busy_elsewhere": {"low": min(busy), "high": max(busy)} if busy else None,
    }


def _tables(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the comparison, then the spread of quality and of speed."""
    steps: Sequence[Mapping[str, Any]] = document["steps"]
    loads = next((step["speed"]["loads"] for step in steps if "loads" in step.get("speed", {})), ())
    columns = [f"tok/s at {load['concurrency']}" for load in loads]
    if not loads and "machine" in document:
        columns = ["tok/s"]
    header = ("", "step", "checkpoint", *columns, "perplexity", "increase", "KL (nats)", "top-1", "verdict")
    rows = [_row(step, len(columns), number == document["chosen"]) for number, step in enumerate(steps)]
    yield output.table(header, rows)
    quality = [
        (step["label"], measure["metric"], *_spread(measure, "estimate", SHOWN.get(measure["metric"], "{:.3g}")))
        for step in steps
        for measure in step.get("measures", ())
    ]
    if quality:
        yield output.table(("step", "quality", "estimate", "interval"), quality)
    if loads:
        yield output.table(("step", "requests", "speed", "median", "range"), list(_speed_rows(steps)))
        yield _where(document["machine"], steps, loads[0])
    for step in steps:
        if "not_run" in step.get("speed", {}):
            yield f"speed of {step['label']}: {step['speed']['not_run']}"


def _row(step: Mapping[str, Any], speed_columns: int, chosen: bool) -> Sequence[str]:
    measures = {measure["metric"]: measure for measure in step.get("measures", ())}
    speed = ["not run"] * speed_columns
    if "loads" in step.get("speed", {}):
        speed = [f"{load['decode_tokens_per_s']['median']:.4g}" for load in step["speed"]["loads"]]
    quality = [style.format(measures[name]["estimate"]) if measures else "-" for name, style in SHOWN.items()]
    perplexity = f"{step['perplexity']:.4g}" if measures else "-"
    verdict = FAILED.get(step["verdict"], step["verdict"])
    return (
        "→" if chosen else "",
        step["label"],
        output.size(step["checkpoint_bytes"]),
        *speed,
        perplexity,
        *quality,
        verdict,
    )


def _speed_rows(steps: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    names = {
        "ttft_ms": "time to first token (ms)",
        "decode_tokens_per_s": "decode (tokens/s)",
        "output_tokens_per_s": "prompt and decode (tokens/s)",
    }
    for step in steps:
        for load in step["speed"].get("loads", ()):
            for metric, words in names.items():
                spread = _spread(load[metric], "median", "{:.4g}")
                yield step["label"], f"{load['requests']} at once", words, *spread


def _spread(values: Mapping[str, Any], middle: str, style: str) -> tuple[str, str]:
    low, high = ("?" if values[end] is None else style.format(values[end]) for end in ("low", "high"))
    return style.format(values[middle]), f"[{low}, {high}]"


def _where(machine: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], load: Mapping[str, Any]) -> str:
    """Say on what the times were measured: they hold there and nowhere else."""
    repeats = next(step["speed"]["repeats"] for step in steps if "loads" in step["speed"])
    busy = machine["cores_busy_elsewhere"]
    others = f"; other processes kept {busy['low']:.1f} to {busy['high']:.1f} cores busy meanwhile" if busy else ""
    return (
        f"speed: {repeats} samples of each, in turns; prompts of {load['input_tokens']} tokens, answers of "
        f"{load['output_tokens']}; engine in process (OpenVINO GenAI {machine['openvino_genai']})\n"
        f"on {machine['cpu']}, {machine['usable_cores']} cores{others}"
    )
