"""A session's journal: one line for each change, each with a checksum, so that a torn end is seen."""

from __future__ import annotations

import errno
import json
import os
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mergefs.backend import flush_folder
from mergefs.json_input import load_json

Record = list[Any]
"""What a line holds: the name of a change and its operands, in JSON's types."""

BEGIN = "begin"
FLUSH = "flush"
SYNC = "sync"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Journal:
    """Appends records to a journal. Safe to use from many threads.

    What has been appended survives the process, however it ends. What was appended before `mark` survives the
    machine too.

    Args:
        path: of the journal; it is replaced.
        records: what it begins with, all at once.
        sync: whether anything is flushed to the disk.
    """

    def __init__(self, path: Path, records: Iterable[Record], *, sync: bool = True) -> None:
        self._sync = sync
        self._lock = threading.Lock()
        new = path.with_name(f"{path.name}.new")
        with open(new, "wb") as file:
            file.write(_line([BEGIN, boot_id()]))
            file.writelines(map(_line, records))
            file.write(_line([FLUSH]) + _line([SYNC]))
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(new, path)
        if sync:
            flush_folder(path.parent)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def append(self, *record: Any) -> None:
        """Append one record."""
        line = _line(list(record))
        with self._lock:
            written = os.write(self._descriptor, line)
            if written < len(line):
                # A half line would hide what comes after it.
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def begin_mark(self) -> None:
        """Say that what was appended so far is about to be flushed; what comes from now on is not part of the mark."""
        self.append(FLUSH)

    def mark(self) -> None:
        """Say that everything before `begin_mark`, files included, is on the disk."""
        self.append(SYNC)
        if self._sync:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def replay(path: Path) -> list[Record]:
    """Return the records of a journal, without marks; [] where there is none.

    Reading ends at the first line that is torn. After the machine has been down, it ends at the last mark, because
    nobody knows which contents behind it reached the disk.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    records: list[Record] = []
    flushed = marked = 0
    same_boot = True
    for line in lines:
        record = _parse(line)
        if record is None:
            break
        if record[0] == BEGIN:
            same_boot = record[1:] == [boot_id()]
        elif record[0] == FLUSH:
            flushed = len(records)
        elif record[0] == SYNC:
            marked = flushed
        else:
            records.append(record)
    return records if same_boot else records[:marked]


def boot_id() -> str:
    """Return what is another after the machine has been down; empty where nobody knows."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _line(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parse(line: bytes) -> Record | None:
    check, _, text = line.partition(b" ")
    if check != b"%08x" % zlib.crc32(text):
        return None
    try:
        record = load_json(text)
    except ValueError:
        return None
    return record if isinstance(record, list) and record else None
