"""sensitivity: what each format would cost each layer, and what a budget buys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import options, output
from pipeline.cli.build import prepare_ladder, wait_without_spinning
from pipeline.cli.progress import for_this_terminal
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.quantize.choice import Choice, Table

MIB = 2**20


class Budgets(click.ParamType[tuple[float, ...]]):
    """Numbers with commas between them."""

    name = "bits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Turn "4.5,6" into numbers."""
        try:
            return tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"'{value}' is not a list of numbers such as 4.5,5,6,8.", param, ctx)


@click.command()
@options.config_argument
@click.option(
    "--budgets", type=Budgets(), metavar="BITS,…", help="Effective bits of the curve; default 9 between ends."
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw it into FILE.svg or FILE.html.")
@options.store_option
@options.json_option
def sensitivity(
    config: Path,
    overrides: tuple[str, ...],
    budgets: tuple[float, ...] | None,
    plot: Path | None,
    store_root: Path,
    as_json: bool,
) -> None:
    """Score the candidates of a CONFIG with format auto; show what its budget buys, and why.

    Layers come in the order of what their narrowest candidate costs. Nothing is quantized.

    \b
    trtpipe sensitivity my.yaml --budgets 4.5,5,6,8
    trtpipe sensitivity my.yaml --set quantization.auto.effective_bits=6 --plot layers.html
    """
    from pipeline import stages
    from pipeline.core.runner import run
    from pipeline.quantize.choice import Table
    from pipeline.quantize.sensitivities import read

    if plot is not None and plot.suffix not in {".svg", ".html"}:
        raise click.BadParameter(f"'{plot}' ends with neither .svg nor .html.", param_hint="--plot")
    rungs, store, hasher = prepare_ladder(config, overrides, store_root)
    build = rungs[0].build
    auto = build.config.quantization.auto
    if build.config.quantization.format != "auto" or auto.effective_bits is None:
        raise ConfigError(
            f"quantization.format is {build.config.quantization.format}, so nothing is chosen",
            hint="Set quantization.format: auto, with quantization.auto.effective_bits and candidates.",
        )
    wait_without_spinning()
    result = run(stages.steps(build, hasher, store.root), store, for_this_terminal(), until="score")["score"]
    table = Table(read(result.artifact.path))
    choice = table.choose(auto.effective_bits)
    curve = [table.choose(bits) for bits in budgets or _evenly(table)]
    if plot is not None:
        from pipeline.quantize.sensitivity_chart import html, svg

        draw = svg if plot.suffix == ".svg" else html
        plot.write_text(draw(choice, curve, f"{build.config.name} at {choice.asked:g} effective bits"), "utf-8")
    if as_json:
        curve_document = [_point(each) for each in curve]
        output.emit_json({"name": build.config.name, "choice": choice.document(), "curve": curve_document})
        return
    _print(choice, curve)
    if plot is not None:
        click.echo(f"\nchart: {plot}")


def _evenly(table: Table) -> list[float]:
    """Nine budgets from the lowest to 16 bit."""
    return [table.lowest + (16 - table.lowest) * step / 8 for step in range(9)]


def _point(choice: Choice) -> dict[str, Any]:
    return {
        "asked_effective_bits": choice.asked,
        "effective_bits": choice.effective_bits,
        "bits_per_parameter": choice.bits_per_parameter,
        "estimated_loss_nats": choice.loss,
        "groups": dict(Counter(option.format for option in choice.taken)),
    }


def _print(choice: Choice, curve: Sequence[Choice]) -> None:
    candidates = choice.sensitivities.candidates
    rows = [
        (
            group["name"],
            f"{group['weights'] * 2 / MIB:.3g}",
            *(f"{scored.scores[name]:.2e}" for name in candidates),
            group["format"],
            group["reason"],
        )
        for group, scored in zip(choice.document()["groups"], choice.sensitivities.groups, strict=True)
    ]
    rows.sort(key=lambda row: -float(row[2]))
    costs = (f"{name} (nats)" for name in candidates)
    click.echo(output.table(("layers", "MiB at 16 bit", *costs, "chosen", "why"), rows))
    points = [
        (
            f"{each.asked:.4g}",
            f"{each.effective_bits:.3f}",
            f"{each.bits_per_parameter:.3f}",
            f"{each.loss:.3g}",
            ", ".join(f"{name} {count}" for name, count in _point(each)["groups"].items()),
        )
        for each in curve
    ]
    header = ("budget", "effective bits", "bits per parameter", "estimated loss (nats)", "groups")
    click.echo("\n" + output.table(header, points))
    click.echo(
        f"\nchosen: {choice.effective_bits:.3f} effective bits of {choice.asked:g} "
        f"({choice.effective_bits_of_all:.3f} over all linear layers, {choice.bits_per_parameter:.3f} over the model), "
        f"estimated loss {choice.loss:.3g} nats"
    )
