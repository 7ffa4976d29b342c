"""explain, matrix: what a failure means, and what goes together."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import click

from pipeline.cli import options, output

SHOWN = 5


@click.command()
@click.argument("log", type=click.Path(path_type=Path, allow_dash=True))
@options.json_option
def explain(log: Path, as_json: bool) -> None:
    r"""Turn the LOG of a failed stage ('-' reads stdin) into cause, evidence and next step.

    Knows calibration, export, trtllm-build, Triton and request failures. Causes come before consequences.
    """
    from pipeline.explain.explain import explain as explain_lines
    from pipeline.explain.explain import read_lines

    lines: Iterable[str] = sys.stdin if str(log) == "-" else read_lines(log)
    explanations = explain_lines(lines)
    if as_json:
        output.emit_json([asdict(explanation) for explanation in explanations])
        return
    for explanation in explanations[:SHOWN]:
        click.echo(f"{explanation.kind} [{explanation.id}]: {explanation.cause}")
        click.echo(f"  line {explanation.line_number}: {explanation.evidence}")
        for number, text in explanation.other_lines:
            click.echo(f"  line {number}: {text}")
        click.echo(f"  next: {explanation.next_step}" + (f" (key {explanation.key})" if explanation.key else ""))
        click.echo(f"  source: {explanation.source}\n" if explanation.source else "")
    if len(explanations) > SHOWN:
        click.echo(f"and {len(explanations) - SHOWN} more; --json shows all")


@click.command()
@click.argument("architectures", nargs=-1)
@click.option("--format", "formats", multiple=True, help="Quantization format.")
@click.option("--gpu", "gpus", multiple=True, help="H100, H200, A100, L40S, L4.")
@click.option("--target", "targets", multiple=True, help="tensorrt_llm or tensorrt_llm_llmapi.")
@click.option("--toolchain", "toolchains", multiple=True, help="TensorRT-LLM version or image tag.")
@click.option("--driver", help="Installed driver; images that need a newer branch are left out.")
@click.option(
    "--sources",
    is_flag=True,
    help="What becomes of every format and every checkpoint made elsewhere on every target (one --gpu; default H100).",
)
@click.option("--all", "everything", is_flag=True, help="Also what is refused, and why.")
@options.json_option
def matrix(
    architectures: tuple[str, ...],
    formats: tuple[str, ...],
    gpus: tuple[str, ...],
    targets: tuple[str, ...],
    toolchains: tuple[str, ...],
    driver: str | None,
    sources: bool,
    everything: bool,
    as_json: bool,
) -> None:
    """Show what goes together: ARCHITECTURES x precision x GPU x toolchain x driver, with end-of-life dates.

    \b
    trtpipe matrix Llama --gpu A100
    trtpipe matrix Qwen --format fp8 --driver 575.57.08 --all
    trtpipe matrix --sources
    """
    if sources:
        _sources(formats, gpus, targets, as_json=as_json)
        return
    from pipeline.targets.tensorrt_llm.matrix import HEADER, Filters, rows

    found = rows(
        Filters(
            architectures=architectures or ("LlamaForCausalLM",),
            formats=formats,
            gpus=gpus,
            targets=targets,
            toolchains=toolchains or ("1.2.1", "1.0.0"),
            driver=driver,
            only_working=not everything,
        )
    )
    if as_json:
        output.emit_json([asdict(row) for row in found])
    else:
        click.echo(output.table(HEADER, [row.cells() for row in found]))


def _sources(formats: tuple[str, ...], gpus: tuple[str, ...], targets: tuple[str, ...], *, as_json: bool) -> None:
    from pipeline.config.legality import gpus as known
    from pipeline.coverage import HEADER, rows
    from pipeline.errors import ConfigError

    gpu = gpus[0] if gpus else "H100"
    if len(gpus) > 1 or gpu not in known():
        raise ConfigError("--sources judges one GPU", hint=f"Known: {', '.join(known())}.")
    found = [
        row
        for row in rows(gpu)  # type: ignore[arg-type]
        if (not formats or row.format in formats) and (not targets or row.target in targets)
    ]
    if as_json:
        output.emit_json([row.document() for row in found])
    else:
        click.echo(output.table(HEADER, [row.cells() for row in found]))
