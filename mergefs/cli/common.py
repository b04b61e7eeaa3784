"""What every command shares: finding the repository, printing the result, showing progress."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from mergefs.cli import printable
from mergefs.configuration import find_repository
from mergefs.errors import UserError
from mergefs.repository import Repository
from mergefs.units import format_size

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
threads_option = click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="Default: all cores.")


def open_repository(given: str | None) -> Repository:
    """Open the repository that was given, or the nearest one upwards from the working folder.

    Where this user may not write to it, it is open for reading only.
    """
    if given == "":
        raise UserError("the repository's folder is given as an empty text: name a folder, or leave -R away")
    path = Path(given) if given else find_repository(Path.cwd())
    catalog = path / "catalog"
    readonly = catalog.is_dir() and not os.access(catalog, os.W_OK)
    check_blocks = click.get_current_context().find_root().params["check_blocks"]
    return Repository.open(path, readonly=readonly, sync=syncs(), check_blocks=check_blocks)


def syncs() -> bool:
    """Tell whether the command that runs flushes what it writes: not with --no-sync."""
    return not click.get_current_context().find_root().params["no_sync"]


@contextmanager
def repository(given: str | None) -> Iterator[Repository]:
    """Open the repository for one command."""
    found = open_repository(given)
    try:
        yield found
    finally:
        found.close()


def emit(value: Any, as_json: bool, text: Callable[[], str]) -> None:
    """Print a result: one JSON object, or text for people."""
    if as_json:
        click.echo(json.dumps(plain(value), ensure_ascii=True))
    else:
        click.echo(printable(text(), keep="\n\t"))


def plain(value: Any) -> Any:
    """Return a result in JSON's types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, os.PathLike) else value


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Lay rows out in columns; those in `right` are aligned to the right."""
    if not rows:
        return ""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if c in right else cell.ljust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def keep_freed_memory() -> None:
    """Tell glibc to keep freed buffers instead of handing each back to the kernel.

    Commands that work block by block free and take megabytes thousands of times; clearing fresh pages for them
    took a quarter of such a command's time. What is kept is bounded by what is in use at once. Does nothing with
    other C libraries.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 256 << 20)
        library.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


@contextmanager
def progress(label: str, *, in_bytes: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar on stderr while something runs, when stderr is a terminal; yield what is to be told.

    Args:
        label: what runs.
        in_bytes: whether what it is told are bytes, which are then shown, and how many a second.
    """
    if not sys.stderr.isatty():
        yield None
        return
    last = 0.0
    began = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < 0.1 and done < total:
            return
        last = now
        share = done / total if total else 1.0
        left = (now - began) * (1 - share) / share if share else 0.0
        bar = "#" * int(30 * share)
        rate = done / max(now - began, 1e-3)
        sizes = f" {format_size(done)} of {format_size(total)}, {format_size(int(rate))}/s," if in_bytes else ""
        click.echo(f"\r{label} [{bar:<30}] {share:4.0%},{sizes} {left:.0f} s left\x1b[K", err=True, nl=False)

    try:
        yield tell
    finally:
        click.echo("\r\x1b[K", err=True, nl=False)
