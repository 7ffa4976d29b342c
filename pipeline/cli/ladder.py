"""ladder: the config and every step of its fallback, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import options, output
from pipeline.cli.build import prepare_ladder, wait_without_spinning
from pipeline.cli.progress import for_this_terminal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FAILED = {"unproven": "fails verify", "unjudged": "cannot be judged"}
SHOWN = ("perplexity_increase", "kl_nats", "top1_agreement")


@click.command()
@options.config_argument
@options.store_option
@options.json_option
def ladder(config: Path, overrides: tuple[str, ...], store_root: Path, as_json: bool) -> None:
    """Build CONFIG and each step of its fallback until verify, and compare size and quality.

    Every figure stands with its confidence interval [low, high]. The arrow marks what a build would take.

    \b
    trtpipe ladder my.yaml
    """
    from pipeline.ladder import climb

    rungs, store, hasher = prepare_ladder(config, overrides, store_root)
    wait_without_spinning()
    steps = [tried.document() for tried in climb(rungs, hasher, store, for_this_terminal())]
    chosen = next((number for number, step in enumerate(steps) if step["accepted"]), None)
    if as_json:
        output.emit_json({"name": rungs[0].build.config.name, "steps": steps, "chosen": chosen})
        return
    header = ("", "step", "checkpoint", "perplexity", "increase", "KL (nats)", "top-1", "verdict")
    click.echo("\n" + output.table(header, [_row(step, number == chosen) for number, step in enumerate(steps)]))
    for step in steps:
        for measure in step.get("measures", ()):
            if measure["metric"] not in SHOWN:
                click.echo(f"  {step['label']}: {output.interval(measure)}")
    if chosen is None:
        click.echo("\nno step passes the quality gate")


def _row(step: Mapping[str, Any], chosen: bool) -> Sequence[str]:
    verdict = FAILED.get(step["verdict"], step["verdict"])
    head = ("→" if chosen else "", step["label"], output.size(step["checkpoint_bytes"]))
    if not step.get("measures"):
        return (*head, "-", "-", "-", "-", verdict)
    measures = {measure["metric"]: measure for measure in step["measures"]}
    increase, kl, agreement = (measures[name] for name in SHOWN)
    perplexity = f"{step['perplexity']:.4g}"
    return (*head, perplexity, _shown(increase, "{:+.2%}"), _shown(kl, "{:.3g}"), _shown(agreement, "{:.1%}"), verdict)


def _shown(measure: Mapping[str, Any], style: str) -> str:
    low, high = ("?" if measure[end] is None else style.format(measure[end]) for end in ("low", "high"))
    return f"{style.format(measure['estimate'])} [{low}, {high}]"
