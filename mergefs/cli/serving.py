"""Commands that serve models as files."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergefs.cli.common import emit, json_option, keep_freed_memory, progress, repository, table, threads_option
from mergefs.units import format_size, parse_size

if TYPE_CHECKING:
    from mergefs.serve.mount_table import MountState


@click.command()
@click.argument("target", nargs=-1, required=True, metavar="[REF] DIR")
@click.option("--foreground", is_flag=True, help="Serve in this process until it is interrupted.")
@click.option("--allow-other", is_flag=True, help="Let other users read the mount.")
@click.option("--log", type=click.Path(path_type=Path), metavar="FILE", help="Where the serving process logs.")
@click.option("--cache-size", metavar="SIZE", help="Decoded blocks kept in memory; default 256MiB.")
@click.option("--keep", metavar="SIZE", help="Derived blocks of lazy merges kept in a file; default none.")
@click.option("--store", is_flag=True, help="Store derived blocks of lazy merges in packs.")
@json_option
@click.pass_obj
def mount(
    repo: str | None,
    target: tuple[str, ...],
    foreground: bool,
    allow_other: bool,
    log: Path | None,
    cache_size: str | None,
    keep: str | None,
    store: bool,
    as_json: bool,
) -> None:
    """Mount the model REF at DIR; or, with DIR alone, everything as DIR/refs/NAME and DIR/manifests/HASH."""
    from mergefs.serve.mount import DEFAULT_CACHE_BYTES
    from mergefs.serve.mount import mount as start

    sizes = {
        "cache_size": parse_size(cache_size) if cache_size is not None else DEFAULT_CACHE_BYTES,
        "keep": parse_size(keep) if keep is not None else 0,
    }
    if len(target) > 2:
        raise click.UsageError("mount takes a ref and a directory, or a directory alone")
    *ref, directory = target
    with repository(repo) as opened:
        path, sync, check_blocks = opened.path, opened.sync, opened.check_blocks
        if ref:
            opened.resolve(ref[0])
    info = start(
        path,
        ref[0] if ref else None,
        Path(directory),
        foreground=foreground,
        allow_other=allow_other,
        log=log,
        store=store,
        sync=sync,
        check_blocks=check_blocks,
        **sizes,
    )
    if info.cleared:
        click.echo(f"mergefs: cleared a mount away that a dead process had left at {info.directory}", err=True)
    emit(info, as_json, lambda: f"mounted at {info.directory} (process {info.pid})")


@click.command()
@click.argument("directory")
@json_option
@click.pass_obj
def umount(repo: str | None, directory: str, as_json: bool) -> None:
    """End the mount at DIRECTORY."""
    from mergefs.serve.mount import umount as stop

    stale = stop(Path(directory))
    what = "cleared away what a dead process had left at" if stale else "unmounted"
    emit({"directory": directory, "stale": stale}, as_json, lambda: f"{what} {directory}")


@click.command()
@json_option
@click.pass_obj
def mounts(repo: str | None, as_json: bool) -> None:
    """List what mergefs has mounted on this machine, of this repository and of others."""
    from mergefs.serve.mount_table import mounts as find

    found = find()
    emit({"mounts": found}, as_json, lambda: _listed(found))


def _listed(found: list[MountState]) -> str:
    """Lay out mounts for people."""
    if not found:
        return "nothing is mounted"
    head = ("directory", "model", "repository", "user", "process", "since", "served", "cache hits")
    return table([head, *map(_row, found)], right={4, 6, 7})


def _row(mount: MountState) -> tuple[str, ...]:
    who = (mount.user, str(mount.pid))
    if mount.since is None or mount.cache is None:
        hint = f"stale: 'mergefs umount {mount.directory}' clears it away" if mount.state == "stale" else mount.state
        return (str(mount.directory), "?", "?", *who, hint, "", "")
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(mount.since))
    wanted = mount.cache["hits"] + mount.cache["misses"]
    hits = f"{mount.cache['hits'] / wanted:.0%}" if wanted else "-"
    served = format_size(mount.bytes_served or 0)
    return (str(mount.directory), mount.ref or "(all)", mount.repository or "?", *who, since, served, hits)


@click.command()
@click.argument("ref")
@click.argument("directory")
@click.option("--shard-size", metavar="SIZE", help="Put the weights into shards of at most SIZE, such as 5GB.")
@click.option("--dtype", help="Convert float tensors: bfloat16, float16 or float32.")
@click.option("--verify", is_flag=True, help="Read everything again and compare it.")
@threads_option
@json_option
@click.pass_obj
def export(
    repo: str | None,
    ref: str,
    directory: str,
    shard_size: str | None,
    dtype: str | None,
    verify: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Write the model REF as an ordinary Hugging Face directory.

    DIRECTORY is a new folder, or the URL of one that fsspec can write to. An export that was interrupted goes on when
    it is given once more.
    """
    keep_freed_memory()
    with repository(repo) as opened, progress("exporting") as tell:
        report = opened.export(
            ref,
            directory,
            shard_size=None if shard_size is None else parse_size(shard_size),
            dtype=dtype,
            verify=verify,
            threads=threads,
            progress=tell,
        )
    kept = f" ({report.files_kept} of them were there from before)" if report.files_kept else ""
    verified = ", read back and found right," if report.verified else ""
    emit(
        report,
        as_json,
        lambda: (
            f"wrote {report.files} files{kept}, {format_size(report.bytes)}, to {report.directory}{verified}"
            f" in {report.seconds:.1f} s"
        ),
    )


@click.command("verify-export")
@click.argument("ref")
@click.argument("directory")
@click.option("--shard-size", metavar="SIZE", help="That of the export; without it, tensors may lie in any files.")
@click.option("--dtype", help="That of the export; without it, it is taken from what is there.")
@threads_option
@json_option
@click.pass_obj
def verify_export(
    repo: str | None,
    ref: str,
    directory: str,
    shard_size: str | None,
    dtype: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Compare DIRECTORY, a folder or an fsspec URL, with the model REF that was exported to it.

    Exits with 1 when a file or a tensor is missing, is there and should not be, or has other bytes.
    """
    keep_freed_memory()
    with repository(repo) as opened, progress("comparing") as tell:
        report = opened.verify_export(
            ref,
            directory,
            shard_size=None if shard_size is None else parse_size(shard_size),
            dtype=dtype,
            threads=threads,
            progress=tell,
        )
    lines = [f"missing: {path}" for path in report.missing]
    lines += [f"not the model's: {path}" for path in report.extra]
    for found in report.different:
        lines.append(f"different: {found.path}" + (f" (tensors {', '.join(found.tensors)})" if found.tensors else ""))
    lines += [f"missing tensor: {name}" for name in report.missing_tensors]
    lines += [f"not the model's tensor: {name}" for name in report.extra_tensors]
    what = f"{report.files} files, {format_size(report.bytes)}, compared by {report.compared}"
    result = f"they are {report.manifest[:12]}" if report.ok else f"they are not {report.manifest[:12]}"
    lines.append(f"{what} in {report.seconds:.1f} s: {result}")
    emit({"ok": report.ok, **vars(report)}, as_json, lambda: "\n".join(lines))
    if not report.ok:
        sys.exit(1)
