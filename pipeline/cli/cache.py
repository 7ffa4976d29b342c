"""cache ls, show, verify, gc."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from pipeline.cli import options, output


@click.group()
def cache() -> None:
    """Look at, verify and clean the artifact store."""


@cache.command("ls")
@options.store_option
@options.json_option
def ls(store_root: Path, as_json: bool) -> None:
    """List the artifacts of the store, newest first."""
    from pipeline.core.store import Store

    records = Store(store_root).ls()
    if as_json:
        output.emit_json([record.document() for record in records])
        return
    rows = [(r.step, r.digest[7:19], output.size(r.bytes), r.created, ", ".join(r.refs)) for r in records]
    click.echo(output.table(("stage", "digest", "size", "built", "refs"), rows))


@cache.command()
@click.argument("ref")
@options.store_option
@options.json_option
def show(ref: str, store_root: Path, as_json: bool) -> None:
    """Show one artifact (a ref or the start of a digest) and its lineage back to the source."""
    from pipeline.core.store import Store

    document: dict[str, Any] = Store(store_root).show(ref)
    if as_json:
        output.emit_json(document)
        return
    click.echo(output.table(("artifact", ""), [*_facts(document)]))
    lineage = [
        (f"{'  ' * node['depth']}{node['step'] or 'source'}", node["digest"][7:19], node["path"])
        for node in document["lineage"]
    ]
    click.echo("\n" + output.table(("made from", "digest", "where"), lineage))


def _facts(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a person asks of an artifact; parameters that were left empty are not told."""
    execution = document["execution"]
    yield "stage", document["step"]
    yield "digest", document["digest"]
    yield "refs", ", ".join(document["refs"])
    yield "size", output.size(document["bytes"])
    yield "built", f"{document['created']} in {output.seconds(execution['seconds'])}"
    yield "by", shlex.join(execution["argv"])
    yield "peak memory", output.size(execution["peak_rss_bytes"])
    yield from _leaves(document["params"])
    yield from document["toolchain"].items()


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", json.dumps(value)


@cache.command()
@click.argument("refs", nargs=-1)
@options.store_option
@options.json_option
def verify(refs: tuple[str, ...], store_root: Path, as_json: bool) -> None:
    """Hash every artifact again; what changed is named and set aside. Exit code 5 when one did."""
    from pipeline.core.store import Store
    from pipeline.errors import IntegrityError

    report = Store(store_root).verify(refs)
    if as_json:
        output.emit_json(report)
    if report["corrupt"]:
        changed = ", ".join(report["corrupt"])
        raise IntegrityError(
            f"{len(report['corrupt'])} of {report['checked']} artifacts changed on disk: {changed}",
            hint="They were set aside; build again.",
        )
    if not as_json:
        click.echo(f"{report['checked']} artifacts, {output.size(report['bytes'])}: unchanged")


@cache.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@options.store_option
@options.json_option
def gc(dry_run: bool, store_root: Path, as_json: bool) -> None:
    """Remove what no named build reaches: old versions, failures, leftovers."""
    from pipeline.core.store import Store

    freed = Store(store_root).gc(dry_run=dry_run)
    if as_json:
        output.emit_json({"freed_bytes": freed, "dry_run": dry_run})
    else:
        click.echo(f"{'would free' if dry_run else 'freed'} {output.size(freed)}")
