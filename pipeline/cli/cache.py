"""cache ls, show, verify, gc."""

from __future__ import annotations

from pathlib import Path

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

    document = Store(store_root).show(ref)
    if as_json:
        output.emit_json(document)
        return
    for key, value in document.items():
        click.echo(f"{key:12} {value}")


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
