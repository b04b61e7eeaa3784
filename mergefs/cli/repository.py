"""Commands about the repository as a whole."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergefs.blocks.exact import CODINGS
from mergefs.cli.common import emit, json_option, keep_freed_memory, progress, repository, syncs, threads_option
from mergefs.configuration import DEFAULT_EXACT, find_repository
from mergefs.gc import REWRITE_ABOVE
from mergefs.repository import Repository
from mergefs.units import format_size, parse_size

if TYPE_CHECKING:
    from mergefs.fsck import Problem


@click.command()
@click.argument("directory")
@click.option("--block-size", default="1MiB", show_default=True, help="Of 2-byte elements.")
@click.option(
    "--exact",
    type=click.Choice(CODINGS),
    default=DEFAULT_EXACT,
    show_default=True,
    help="Coding of experts' exact tiers: fast, small (less room, slower), quick (most room, least time).",
)
@json_option
def init(directory: str, block_size: str, exact: str, as_json: bool) -> None:
    """Make a repository in DIRECTORY, which is empty or does not exist yet."""
    made = Repository.init(directory, parse_size(block_size), exact=exact, sync=syncs())
    value = {
        "repository": str(made.path),
        "block_size": made.config["block_size"],
        "exact": made.exact,
        "version": made.config["version"],
    }
    made.close()
    emit(value, as_json, lambda: f"made the repository {value['repository']}")


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be freed.")
@click.option(
    "--rewrite-above",
    type=click.FloatRange(0, 1),
    default=REWRITE_ABOVE,
    show_default=True,
    help="Rewrite a pack when more than this share of it is dead.",
)
@json_option
@click.pass_obj
def gc(repo: str | None, dry_run: bool, rewrite_above: float, as_json: bool) -> None:
    """Free the blocks that neither a ref nor a live process needs."""
    if math.isnan(rewrite_above):
        raise click.BadParameter("it is a share from 0 to 1", param_hint="--rewrite-above")
    with repository(repo) as opened:
        report = opened.gc(dry_run=dry_run, rewrite_above=rewrite_above)
    emit(
        report,
        as_json,
        lambda: (
            f"{'would free' if dry_run else 'freed'} {format_size(report.freed_bytes)}:"
            f" {report.blocks_freed} blocks, {report.manifests_freed} manifests,"
            f" {report.packs_removed} packs removed, {report.packs_rewritten} rewritten;"
            f" {format_size(report.live_bytes)} are in use"
            + (f", {format_size(report.waste_bytes)} wait in packs" if report.waste_bytes else "")
            + (f"; sessions keep the models that they change: {report.sessions}" if report.sessions else "")
        ),
    )


@click.command()
@click.option("--exact", type=click.Choice(CODINGS), help="The coding from now on; by default the one of before.")
@threads_option
@json_option
@click.pass_obj
def repack(repo: str | None, exact: str | None, threads: int | None, as_json: bool) -> None:
    """Write the last tiers of stored experts in the repository's coding: small, or fast to read."""
    keep_freed_memory()
    with repository(repo) as opened, progress("repacking", in_bytes=False) as tell:
        report = opened.repack(exact, threads=threads, progress=tell)
    emit(
        report,
        as_json,
        lambda: (
            f"{report.blocks_repacked} blocks are '{report.exact}' now and took {report.seconds:.1f} s:"
            f" {format_size(report.stored_bytes_before)} of packs became {format_size(report.stored_bytes_after)}"
            if report.blocks_repacked
            else f"every block is '{report.exact}' already"
        ),
    )


@click.command()
@click.option("--read-data", is_flag=True, help="Read every block and compare it with its id.")
@click.option("--repair", is_flag=True, help="Read every block, and mend what can be mended.")
@json_option
@click.pass_obj
def fsck(repo: str | None, read_data: bool, repair: bool, as_json: bool) -> None:
    """Check the repository; exit with 1 when something is wrong. Nothing is changed without --repair.

    --repair puts damaged files into the folder 'quarantine' and forgets the blocks that are lost. These come back when
    a checkpoint that has them is ingested again, or a merge that derives them is run again.
    """
    from mergefs.configuration import mend_configuration
    from mergefs.fsck import FsckReport, catalog_damage

    path = Path(repo) if repo else find_repository(Path.cwd())
    mended_first = mend_configuration(path.absolute(), sync=syncs()) if repair else None
    if mended_first:
        click.echo(f"mergefs: {mended_first}", err=True)
    damage = catalog_damage(path) if (path / "catalog" / "data.mdb").is_file() else None
    if damage is not None:
        # LMDB is not asked to open it: it may end the process over it.
        broken = FsckReport((damage,), 0, 0, 0, 0, read_data)
        emit({"ok": False, **vars(broken)}, as_json, lambda: _line(damage))
        sys.exit(1)
    with repository(repo) as opened, progress("checking", in_bytes=False) as tell:
        if repair:
            mended = opened.repair(progress=tell)
            problems, value = mended.left, {"ok": mended.ok, **vars(mended)}
            summary = (
                f"{len(mended.found)} errors found; {mended.blocks_found} blocks had another copy,"
                f" {mended.blocks_moved} were saved from damaged packs, {mended.blocks_dropped} are lost"
            )
        else:
            report = opened.fsck(read_data=read_data, progress=tell)
            problems, value = report.errors, {"ok": report.ok, **vars(report)}
            summary = f"{report.manifests} manifests, {report.blocks} blocks and {report.packs} packs checked"
    lines = [_line(problem) for problem in problems]
    lines.append(f"{summary}: {len(problems) or 'no'} errors{' left' if repair else ''}")
    if repair and (lost := sorted({name for problem in problems for name in problem.affects})):
        lines.append(f"to have them whole, ingest again, or merge again: {', '.join(lost)}")
    emit(value, as_json, lambda: "\n".join(lines))
    if problems:
        sys.exit(1)


def _line(problem: Problem) -> str:
    affects = f" (affects {', '.join(problem.affects)})" if problem.affects else ""
    return f"{problem.kind} {problem.name}: {problem.message}{affects}"


@click.group()
def catalog() -> None:
    """The catalog: the index of packs and manifests, and of what they are called."""


@catalog.command("rebuild")
@json_option
@click.pass_obj
def catalog_rebuild(repo: str | None, as_json: bool) -> None:
    """Make the catalog anew from packs, manifests and the copies of refs; the earlier one is kept beside it.

    Statistics are not in any other file: ingest experts again with --base to have them at hand, or they are measured
    when a merge needs them.
    """
    from mergefs.rebuild import rebuild

    report = rebuild(Path(repo) if repo else find_repository(Path.cwd()), sync=syncs())
    lines = [
        *report.lost,
        f"{report.blocks} blocks in {report.packs} packs, {report.manifests} models, {report.refs} refs",
    ]
    if report.recovered:
        lines.append(f"there were no copies of refs: models are called {', '.join(report.recovered)} now")
    if report.kept:
        lines.append(f"the earlier catalog is {report.kept}")
    emit(report, as_json, lambda: "\n".join(lines))
    if report.lost:
        sys.exit(1)


@click.command()
@json_option
@click.pass_obj
def migrate(repo: str | None, as_json: bool) -> None:
    """Bring a repository that an earlier mergefs made to the format of this one.

    No model changes, nor its id. Interrupted, it goes on when it is run again. Exits with 1 when blocks were found to
    be damaged; they are left for 'mergefs fsck --repair'.
    """
    from mergefs.migration.run import migrate as run

    keep_freed_memory()
    with progress("migrating", in_bytes=False) as tell:
        report = run(Path(repo) if repo else find_repository(Path.cwd()), sync=syncs(), progress=tell)
    lines = [f"block {block} is damaged: 'mergefs fsck --repair' says what it affects" for block in report.damaged]
    if report.before == report.version:
        lines.append(f"{report.repository} has version {report.version} already")
    else:
        lines.append(
            f"{report.repository} had version {report.before} and has version {report.version} now:"
            f" {report.blocks_rewritten} blocks were written anew, {report.refs_copied} refs copied,"
            f" {report.statistics_dropped} statistics dropped, in {report.seconds:.1f} s"
        )
    emit(report, as_json, lambda: "\n".join(lines))
    if report.damaged:
        sys.exit(1)


@click.command()
@json_option
@click.pass_obj
def stats(repo: str | None, as_json: bool) -> None:
    """Show how much the repository holds."""
    with repository(repo) as opened:
        report = opened.stats()
    share = f" ({report.stored_bytes / report.raw_bytes:.1%})" if report.raw_bytes else ""
    emit(
        report,
        as_json,
        lambda: (
            f"{report.refs} refs, {report.manifests} models of {format_size(report.raw_bytes)},"
            f" stored in {format_size(report.stored_bytes)}{share}: {report.blocks} blocks in {report.packs} packs"
        ),
    )
