"""build and its single stages."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import options, output
from pipeline.cli.progress import for_this_terminal

if TYPE_CHECKING:
    from pipeline.core.digest import FileHasher
    from pipeline.core.runner import StepResult
    from pipeline.core.store import Store
    from pipeline.examine import Build
    from pipeline.ladder import Rung


@click.command()
@options.config_argument
@click.option("-o", "--output", "output_dir", type=click.Path(path_type=Path), help="Repository; default build/<name>.")
@click.option(
    "--until",
    type=click.Choice(["quantize", "verify", "gate", "compile", "emit"]),
    default="emit",
    show_default=True,
    help="Last stage to run.",
)
@options.store_option
@options.json_option
def build(
    config: Path, overrides: tuple[str, ...], output_dir: Path | None, until: str, store_root: Path, as_json: bool
) -> None:
    """Run every stage of CONFIG and write the Triton model repository.

    \b
    trtpipe build build_configs/smollm2-135m/int4-awq-openvino-cpu.yaml
    trtpipe build my.yaml --set quantization.format=fp8 --until verify
    """
    _run(config, overrides, until=until, store_root=store_root, as_json=as_json, output_dir=output_dir, published=True)


def _stage_command(name: str, doc: str) -> click.Command:
    @click.command(name=name, help=doc)
    @options.config_argument
    @options.store_option
    @options.json_option
    def command(config: Path, overrides: tuple[str, ...], store_root: Path, as_json: bool) -> None:
        _run(config, overrides, until=name, store_root=store_root, as_json=as_json)

    return command


quantize = _stage_command("quantize", "Build CONFIG up to the quantized checkpoint and print where it is.")
verify = _stage_command("verify", "Build CONFIG up to the verification report and print its findings.")
compile_ = _stage_command("compile", "Build CONFIG up to the engine and print where it is.")
emit = _stage_command("emit", "Build CONFIG up to the model repository in the store, without publishing a copy.")


def _run(
    config: Path,
    overrides: Sequence[str],
    *,
    until: str,
    store_root: Path,
    as_json: bool,
    output_dir: Path | None = None,
    published: bool = False,
) -> None:
    from pipeline import stages
    from pipeline.core.runner import run
    from pipeline.ladder import choose
    from pipeline.triton.publish import publish

    ladder, store, hasher = prepare_ladder(config, overrides, store_root)
    build, progress = ladder[0].build, for_this_terminal()
    wait_without_spinning()
    tried: dict[str, StepResult] = {}
    rejected: list[dict[str, Any]] = []
    choice = None
    if len(ladder) > 1 and until != "quantize":
        chosen, others = choose(ladder, hasher, store, progress)
        build, rejected = chosen.rung.build, [each.document() for each in others]
        choice = chosen.rung.document() | {"rejected": rejected}
        tried = {name: result for name, result in chosen.results.items() if not result.hit}
    last = build.maker if until == "quantize" else until
    results = run(stages.steps(build, hasher, store.root, choice), store, progress, until=last)
    # Reused from the trial of a moment ago is built, to whoever reads the times.
    results |= {name: result for name, result in tried.items() if name in results}
    for name, result in results.items():
        store.set_ref(f"{build.config.name}@{name}", result.artifact.digest)
    repository = None
    if published and until == "emit":
        repository = output_dir or Path("build") / build.config.name
        publish(results["emit"].artifact.path, repository)
    _report(build, results, repository, rejected, as_json=as_json)


def prepare_ladder(
    config: Path, overrides: Sequence[str], store_root: Path
) -> tuple[tuple[Rung, ...], Store, FileHasher]:
    """Load a config, judge it and every step of its fallback, and print the warnings.

    Raises:
        ConfigError: the config is invalid, or it or a step cannot be built.
    """
    from pipeline.config.load import load
    from pipeline.core.digest import FileHasher
    from pipeline.core.store import Store
    from pipeline.ladder import rungs

    hasher = FileHasher(store_root / "stat-cache.json")
    ladder = rungs(load(config, overrides), hasher)
    for problem in dict.fromkeys(problem for rung in ladder for problem in rung.build.warnings):
        click.echo(f"warning: {problem}", err=True)
    return ladder, Store(store_root), hasher


def _next_step(build: Build, repository: Path) -> str:
    if build.config.engine.target == "openvino":
        return f"trtpipe serve {repository}"
    return f"on the GPU node, as {repository / 'README.md'} says; nothing of it was run here"


def wait_without_spinning() -> None:
    """Let idle OpenMP threads sleep; read once, when torch loads its runtime.

    Spinning threads cost a busy two-core machine a factor of ten and more, and gain a quiet one nothing.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


def _report(
    build: Build,
    results: dict[str, StepResult],
    repository: Path | None,
    rejected: Sequence[dict[str, Any]],
    *,
    as_json: bool,
) -> None:
    if as_json:
        output.emit_json(
            {
                "name": build.config.name,
                "stages": {name: _result_document(result) for name, result in results.items()},
                "format": build.label,
                "verification": _verification(results),
                "quality": _quality(results),
                "choice": _choice(results),
                "rejected": list(rejected),
                "repository": None if repository is None else str(repository),
            }
        )
        return
    rows = [
        (
            name,
            "reused" if result.hit else "built",
            output.seconds(result.seconds),
            "-" if result.peak_rss_bytes is None else output.size(result.peak_rss_bytes),
            output.size(_stored_bytes(result.artifact.path)),
            result.artifact.digest[7:19],
        )
        for name, result in results.items()
    ]
    click.echo("\n" + output.table(("stage", "", "time", "peak memory", "on disk", "digest"), rows))
    verification = _verification(results)
    if verification:
        click.echo("\n" + output.table(("verified", "value"), list(verification.items())))
    choice = _choice(results)
    if choice:
        groups = ", ".join(f"{name} {count}" for name, count in choice["groups"].items())
        bits = f"{choice['effective_bits']:.3f} of {choice['asked_effective_bits']:g} effective bits"
        click.echo(f"\nformats:    {bits}; groups of layers: {groups} (why: trtpipe sensitivity)")
    for step in rejected:
        click.echo(f"\nrejected:   {step['label']} ({step['verdict']}): {'; '.join(step['reasons'])}")
    quality = _quality(results)
    if quality:
        click.echo(f"\nquality:    {build.label}: {quality['verdict']}")
        for measure in quality["measures"]:
            click.echo(f"  {output.interval(measure)}")
    if repository is not None:
        click.echo(f"\nrepository: {repository}\nnext:       {_next_step(build, repository)}")
    else:
        last, result = list(results.items())[-1]
        click.echo(f"\n{last}: {_from_here(result.artifact.path)}")


def _from_here(path: Path) -> Path:
    """Return a path as short as a person would write it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _result_document(result: StepResult) -> dict[str, Any]:
    return {
        "hit": result.hit,
        "seconds": result.seconds,
        "peak_rss_bytes": result.peak_rss_bytes,
        "path": str(result.artifact.path),
        "digest": result.artifact.digest,
        "bytes": _stored_bytes(result.artifact.path),
    }


def _stored_bytes(artifact: Path) -> int:
    return sum(path.stat().st_size for path in artifact.rglob("*") if path.is_file())


def _verification(results: dict[str, StepResult]) -> dict[str, Any]:
    """What the proof found: the counts, then the end-to-end figures."""
    if "verify" not in results:
        return {}
    report = json.loads((results["verify"].artifact.path / "report.json").read_text())
    return {**report["summary"], **(report["end_to_end"] or {})}


def _choice(results: dict[str, StepResult]) -> dict[str, Any]:
    """What a budget of bits bought; empty where the config names the formats."""
    if "choose" not in results:
        return {}
    document = json.loads((results["choose"].artifact.path / "choice.json").read_text())
    groups = Counter(group["format"] for group in document["groups"])
    told = ("asked_effective_bits", "effective_bits", "bits_per_parameter", "estimated_loss_nats")
    return {name: document[name] for name in told} | {"groups": dict(sorted(groups.items()))}


def _quality(results: dict[str, StepResult]) -> dict[str, Any]:
    """What the gate decided and by which numbers; empty without a gate."""
    if "gate" not in results:
        return {}
    document: dict[str, Any] = json.loads((results["gate"].artifact.path / "quality.json").read_text())
    return document
