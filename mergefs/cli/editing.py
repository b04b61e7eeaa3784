"""Commands that change models: sessions that are mounted, committed and discarded."""

from __future__ import annotations

from pathlib import Path

import click

from mergefs.cli.common import emit, json_option, keep_freed_memory, repository, table, threads_option
from mergefs.units import format_size


@click.command()
@click.argument("target", nargs=-1, required=True, metavar="[REF] DIR")
@click.option("--resume", metavar="SESSION", help="Go on with a session: its id, or where it was mounted.")
@click.option("--foreground", is_flag=True, help="Serve in this process until it is interrupted.")
@click.option("--allow-other", is_flag=True, help="Let other users in.")
@click.option("--log", type=click.Path(path_type=Path), metavar="FILE", help="Where the serving process logs.")
@json_option
@click.pass_obj
def edit(
    repo: str | None,
    target: tuple[str, ...],
    resume: str | None,
    foreground: bool,
    allow_other: bool,
    log: Path | None,
    as_json: bool,
) -> None:
    """Mount the model REF at DIR for writing. 'mergefs commit DIR --as NAME' makes a model of the result."""
    from mergefs.edit.mount import edit as start

    *ref, directory = target
    if len(ref) + (resume is not None) != 1:
        raise click.UsageError("edit takes a ref and a directory, or --resume SESSION and a directory")
    with repository(repo) as opened:
        info = start(
            opened,
            Path(directory),
            ref[0] if ref else None,
            resume=resume,
            foreground=foreground,
            allow_other=allow_other,
            log=log,
        )
    emit(
        info,
        as_json,
        lambda: f"session {info.session} of {info.manifest[:12]} is mounted at {info.directory} (process {info.pid})",
    )


@click.command()
@click.argument("session", metavar="DIR|SESSION")
@click.option("--as", "name", metavar="NAME", help="The result's name; by default the one that was opened.")
@click.option("--force", is_flag=True, help="Also where that name was moved since the session was begun.")
@threads_option
@json_option
@click.pass_obj
def commit(repo: str | None, session: str, name: str | None, force: bool, threads: int | None, as_json: bool) -> None:
    """Make a model of what was changed at DIR. The mount and the session end with that."""
    from mergefs.edit.mount import commit as finish

    keep_freed_memory()
    with repository(repo) as opened:
        report = finish(opened, session, name, force=force, threads=threads)
    moved = f"\n'{report.ref}' named {report.previous[:12]} before" if report.previous else ""
    emit(
        report,
        as_json,
        lambda: (
            f"{report.ref} is {report.manifest[:12]}: {report.blocks_new} new blocks took"
            f" {format_size(report.stored_bytes)}, {report.blocks_kept + report.blocks_reused} are shared,"
            f" in {report.seconds:.1f} s{moved}"
        ),
    )


@click.command()
@click.argument("session", metavar="DIR|SESSION")
@json_option
@click.pass_obj
def discard(repo: str | None, session: str, as_json: bool) -> None:
    """Drop what was changed at DIR. The mount and the session end with that."""
    from mergefs.edit.mount import discard as drop

    with repository(repo) as opened:
        identity = drop(opened, session)
    emit({"session": identity}, as_json, lambda: f"discarded session {identity}")


@click.command()
@json_option
@click.pass_obj
def sessions(repo: str | None, as_json: bool) -> None:
    """List the sessions that are neither committed nor discarded."""
    from mergefs.inspection import ago

    with repository(repo) as opened:
        found = opened.sessions()
    rows = [
        [
            session.id,
            session.ref or session.manifest[:12],
            ago(session.created),
            "in use" if session.in_use else "interrupted",
            "" if session.directory is None else str(session.directory),
        ]
        for session in found
    ]
    emit({"sessions": found}, as_json, lambda: table(rows))
