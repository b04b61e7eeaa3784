"""Commands that serve models as files."""

from __future__ import annotations

from pathlib import Path

import click

from mergefs.cli.common import emit, json_option, keep_freed_memory, progress, repository, threads_option
from mergefs.units import format_size, parse_size


@click.command()
@click.argument("target", nargs=-1, required=True, metavar="[REF] DIR")
@click.option("--foreground", is_flag=True, help="Serve in this process until it is interrupted.")
@click.option("--allow-other", is_flag=True, help="Let other users read the mount.")
@click.option("--log", type=click.Path(path_type=Path), metavar="FILE", help="Where the serving process logs.")
@json_option
@click.pass_obj
def mount(
    repo: str | None,
    target: tuple[str, ...],
    foreground: bool,
    allow_other: bool,
    log: Path | None,
    as_json: bool,
) -> None:
    """Mount the model REF at DIR; or, with DIR alone, everything as DIR/refs/NAME and DIR/manifests/HASH."""
    from mergefs.serve.mount import mount as start

    if len(target) > 2:
        raise click.UsageError("mount takes a ref and a directory, or a directory alone")
    *ref, directory = target
    with repository(repo) as opened:
        path = opened.path
        if ref:
            opened.resolve(ref[0])
    info = start(
        path,
        ref[0] if ref else None,
        Path(directory),
        foreground=foreground,
        allow_other=allow_other,
        log=log,
    )
    emit(info, as_json, lambda: f"mounted at {info.directory} (process {info.pid})")


@click.command()
@click.argument("directory")
@json_option
@click.pass_obj
def umount(repo: str | None, directory: str, as_json: bool) -> None:
    """End the mount at DIRECTORY."""
    from mergefs.serve.mount import umount as stop

    stop(Path(directory))
    emit({"directory": directory}, as_json, lambda: f"unmounted {directory}")


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
