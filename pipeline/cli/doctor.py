"""doctor: what this machine can do, and which extra brings what is missing."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from pipeline.cli import options, output

if TYPE_CHECKING:
    from pipeline.host.probe import HostProfile


@click.command()
@options.json_option
def doctor(as_json: bool) -> None:
    """Show this machine's CPU, memory, GPUs and tools, and what brings the rest.

    Nothing is loaded or changed; versions come from package metadata.
    """
    from pipeline.host import abilities
    from pipeline.host.probe import probe, toolchain

    host = probe()
    versions = toolchain(*abilities.distributions())
    findings = abilities.judge(versions)
    if as_json:
        document = {"host": asdict(host), "abilities": [asdict(finding) for finding in findings], "versions": versions}
        output.emit_json(document | {"formats": _formats(), "toolchains": _toolchains(host)})
        return
    machine = [
        ("CPU", f"{host.cpu_model}, {host.usable_cores} usable core(s)"),
        ("instructions", " ".join(host.cpu_flags)),
        ("memory", f"{output.size(host.memory_available_bytes)} of {output.size(host.memory_total_bytes)} free"),
        *[(f"GPU {gpu.name}", f"SM {gpu.sm}, driver {gpu.driver}") for gpu in host.gpus],
    ]
    if not host.gpus:
        machine.append(("GPU", f"none ({host.gpus_note}); the openvino target builds and serves on the CPU"))
    click.echo(output.table(("machine", ""), machine))
    click.echo()
    rows = [
        (
            finding.what,
            finding.state,
            finding.remedy + (f" (missing: {', '.join(finding.missing)})" if finding.missing else ""),
        )
        for finding in findings
    ]
    click.echo(output.table(("can it", "", "what brings it"), rows))
    click.echo()
    newest = max((gpu.sm or 0 for gpu in host.gpus), default=0)
    formats = _formats()
    cells = [
        (name, *(_where(kv_caches, newest) for kv_caches in by_target.values())) for name, by_target in formats.items()
    ]
    click.echo(output.table(("format", *next(iter(formats.values()))), cells))
    click.echo("Where each format runs, with its KV cache formats. Any machine makes and verifies the checkpoints.\n")
    toolchains = [tuple(each.values()) for each in _toolchains(host)]
    click.echo(output.table(("TensorRT-LLM", "image", "CUDA", "driver", "on this machine"), toolchains))
    click.echo()
    click.echo(
        output.table(
            ("tool", "version"), [(name, versions.get(name, "not installed")) for name in abilities.distributions()]
        )
    )


def _toolchains(host: HostProfile) -> list[dict[str, str]]:
    """Hold this machine against each toolchain that engines are built with."""
    from pipeline.targets.tensorrt_llm.toolchains import check_host, find, table

    rows = []
    for version in table().default:
        toolchain = find(version)
        problems = check_host(host, toolchain)
        rows.append(
            {
                "tensorrt_llm": version,
                "image": toolchain.image,
                "cuda": toolchain.cuda,
                "driver": f"R{toolchain.driver_branch} or newer",
                "verdict": "; ".join(str(problem) for problem in problems) or "fits",
            }
        )
    return rows


def _formats() -> dict[str, dict[str, dict[str, int]]]:
    """Return format -> target -> KV cache format -> the least SM; 0 needs no GPU, absent is refused."""
    from typing import get_args

    from pipeline.config import deployment, schema
    from pipeline.config.legality import least_sm

    return {
        name: {
            target: {
                kv_cache: sm
                for kv_cache in get_args(schema.KVCacheFormat)
                if (sm := least_sm(target, name, kv_cache)) is not None
            }
            for target in get_args(deployment.TargetName)
        }
        for name in get_args(schema.Format)
    }


def _where(kv_caches: dict[str, int], newest_sm: int) -> str:
    """Say where a format runs for one target, and which KV caches need more than that."""
    if not kv_caches:
        return "no"
    least = min(kv_caches.values())
    same = [name for name, sm in kv_caches.items() if sm == least]
    more = [f"({name} {sm}+)" for name, sm in kv_caches.items() if sm > least]
    where = "here" if least <= newest_sm else f"SM {least}+"
    return f"{where}: {' '.join([*same, *more])}"
