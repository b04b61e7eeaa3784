"""Commands that send models elsewhere and fetch them."""

from __future__ import annotations

import click

from mergefs.cli.common import emit, json_option, progress, repository
from mergefs.transfer.copy import TransferReport
from mergefs.units import format_size

_as = click.option("--as", "as_", metavar="NAME", help="The ref at the receiving end; by default the same.")
_force = click.option("--force", is_flag=True, help="Move a ref that names another model there.")


@click.command()
@click.argument("ref")
@click.argument("remote")
@_as
@_force
@json_option
@click.pass_obj
def push(repo: str | None, ref: str, remote: str, as_: str | None, force: bool, as_json: bool) -> None:
    """Send the model REF to REMOTE: another repository's folder, or an fsspec URL where an archive is, or is made.

    Only what is not there yet travels; an interrupted push goes on from what has arrived.
    """
    with repository(repo) as opened, progress("sending") as tell:
        report = opened.push(ref, remote, as_=as_, force=force, progress=tell)
    _tell(report, as_json)


@click.command()
@click.argument("ref")
@click.argument("remote")
@_as
@_force
@json_option
@click.pass_obj
def pull(repo: str | None, ref: str, remote: str, as_: str | None, force: bool, as_json: bool) -> None:
    """Fetch the model REF from REMOTE, another repository's folder or an archive's fsspec URL; see push."""
    with repository(repo) as opened, progress("fetching") as tell:
        report = opened.pull(ref, remote, as_=as_, force=force, progress=tell)
    _tell(report, as_json)


def _tell(report: TransferReport, as_json: bool) -> None:
    emit(
        report,
        as_json,
        lambda: (
            f"{report.ref} is {report.manifest[:12]}: {format_size(report.bytes_sent)} travelled in"
            f" {report.blocks_sent} blocks, {report.blocks_there} were there, in {report.seconds:.1f} s"
        ),
    )
