"""doctor: what this machine can do, and which extra brings what is missing."""

from __future__ import annotations

from dataclasses import asdict

import click

from pipeline.cli import options, output


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
        output.emit_json(
            {"host": asdict(host), "abilities": [asdict(finding) for finding in findings], "versions": versions}
        )
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
    click.echo(
        output.table(
            ("tool", "version"), [(name, versions.get(name, "not installed")) for name in abilities.distributions()]
        )
    )
