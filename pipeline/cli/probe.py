"""probe: how good a format would be on this model, without building it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import options, output
from pipeline.cli.build import prepare_ladder, wait_without_spinning
from pipeline.cli.progress import for_this_terminal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.core.artifacts import SourceCheckpoint
    from pipeline.core.digest import FileHasher
    from pipeline.core.store import Store
    from pipeline.examine import Build
    from pipeline.quantize.trial import Trial, TrialFormat

FORMATS = ("nf4", "int2", "int3", "int4_wo", "int8_wo", "fp8", "fp8_rowwise")
HEADER = ("format", "how", "bits", "weight error", "perplexity", "increase", "KL (nats)", "top-1")


@click.command()
@options.config_argument
@click.option(
    "--format",
    "formats",
    type=click.Choice(FORMATS),
    multiple=True,
    default=("nf4",),
    show_default=True,
    help="What the weights are rounded to; may be given several times.",
)
@click.option(
    "--block-size",
    type=click.IntRange(16, 4096),
    help="Weights that share a scale; default 64 for nf4, quantization.group_size for integers.",
)
@click.option("--double-quant", is_flag=True, help="nf4: round the scales too, as QLoRA does.")
@options.store_option
@options.json_option
def probe(
    config: Path,
    overrides: tuple[str, ...],
    formats: tuple[TrialFormat, ...],
    block_size: int | None,
    double_quant: bool,
    store_root: Path,
    as_json: bool,
) -> None:
    """Round the weights of CONFIG's model to a format and score it as verify does; nothing is calibrated or written.

    Also for formats that are not built, such as nf4 and int2. Rows of the same model that were built and
    verified before stand below.

    \b
    trtpipe probe my.yaml --format nf4 --double-quant
    trtpipe probe my.yaml --format int4_wo --format int3 --format int2
    """
    from pipeline.errors import ConfigError
    from pipeline.quantize.trial import try_formats

    rungs, store, hasher = prepare_ladder(config, overrides, store_root)
    build = rungs[0].build
    if build.made is not None:
        raise ConfigError(
            f"a probe rounds 16-bit weights, and the source is quantized already ({build.made.method})",
            hint="Name the 16-bit checkpoint it was made from as the source.",
        )
    wait_without_spinning()
    source = _source(build, store, hasher)
    found = try_formats(
        source.path,
        [_trial(each, build, block_size, double_quant=double_quant) for each in dict.fromkeys(formats)],
        dtype=build.config.engine.dtype,
        excluded=build.config.quantization.exclude,
        limits=build.config.verify,
        progress=for_this_terminal(),
    )
    rows = [each.document() for each in found]
    known = [row for row in _known(store, source.digest) if row["tokens"] == rows[0]["tokens"]]
    if as_json:
        output.emit_json({"name": build.config.name, "probed": rows, "verified": known})
        return
    cells = [_row(row, "weights rounded") for row in rows] + [_row(row, "built, verified") for row in known]
    click.echo("\n" + output.table(HEADER, cells))
    click.echo(f"\n16-bit source: perplexity {rows[0]['source_perplexity']:.4g} on {rows[0]['tokens']} tokens")


def _trial(name: TrialFormat, build: Build, block_size: int | None, *, double_quant: bool) -> Trial:
    from pipeline.errors import ConfigError
    from pipeline.quantize.trial import NF4_BLOCK, Trial

    if name == "nf4":
        size = block_size or NF4_BLOCK
        if size & (size - 1) or size < NF4_BLOCK // 2:
            raise ConfigError(f"nf4 has no blocks of {size}", hint="--block-size: 32, 64, 128, ... up to 4096.")
        return Trial(format=name, block_size=size, double_quant=double_quant)
    return Trial(format=name, block_size=block_size or build.config.quantization.group_size)


def _source(build: Build, store: Store, hasher: FileHasher) -> SourceCheckpoint:
    """The checkpoint as a Hugging Face directory; a GGUF file is imported, as a build would."""
    from pipeline import stages
    from pipeline.core.artifacts import SourceCheckpoint
    from pipeline.core.runner import run

    if not build.source.needs_import:
        return SourceCheckpoint(path=build.source.location, digest=build.source.digest)
    results = run(stages.steps(build, hasher, store.root), store, for_this_terminal(), until="import")
    artifact = results["import"].artifact
    return SourceCheckpoint(path=artifact.path, digest=artifact.digest)


def _known(store: Store, source: str) -> Iterator[Mapping[str, Any]]:
    """What verify found of checkpoints of the same source that are in the store, best first."""
    rows = {}
    for record in store.records():
        if record.action.step != "verify" or record.action.inputs.get("source") != source:
            continue
        report = json.loads((store.path(record.digest) / "report.json").read_text("utf-8"))
        if report["end_to_end"] is not None:
            group = f" (groups of {report['group_size']})" if report["group_size"] else ""
            rows[record.digest] = {"format": report["format"], "label": f"{report['format']}{group}"} | report[
                "end_to_end"
            ]
    yield from sorted(rows.values(), key=lambda row: (row["mean_kl_nats"], row["label"]))


def _row(row: Mapping[str, Any], how: str) -> tuple[str, ...]:
    return (
        row["label"],
        how,
        f"{row['bits_per_weight']:.3g}" if "bits_per_weight" in row else "-",
        f"{row['median_weight_error']:.3g}" if "median_weight_error" in row else "-",
        f"{row['perplexity']:.4g}",
        f"{row['perplexity_increase']:+.1%}",
        f"{row['mean_kl_nats']:.3g}",
        f"{row['top1_agreement']:.1%}",
    )
