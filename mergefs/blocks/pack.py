"""Packs: immutable files that hold encoded blocks. The layout is in spec/format.md.

magic | payload, payload, ... | records | footer
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from mergefs.blocks.geometry import MOST_BLOCK_ELEMENTS
from mergefs.errors import CorruptionError
from mergefs.hashing import Buffer, Hasher, digest

MAGIC = b"mfspack1"
FOOTER_MAGIC = b"mfsends1"
CHECK_BYTES = 16
NO_BASE = bytes(32)
MOST_TIERS = 4

_RECORD = struct.Struct("<32s32s16sQIIBBBB")
_FOOTER = struct.Struct("<QII32s8s")
RECORD_BYTES = _RECORD.size


class Record(NamedTuple):
    """Where one tier of one block lies in a pack.

    Attributes:
        block: the block's id (32 bytes).
        base: the id of the block that is needed to decode it, or NO_BASE.
        check: the first 16 bytes of the payload's hash.
        offset, length: the payload's place in the pack, in bytes.
        raw_length: bytes of the decoded block.
        encoding, dtype: the numbers of the encoding and the element type.
        tier, tiers: which tier of how many this payload is.
    """

    block: bytes
    base: bytes
    check: bytes
    offset: int
    length: int
    raw_length: int
    encoding: int
    dtype: int
    tier: int = 0
    tiers: int = 1

    def pack(self) -> bytes:
        """Return the record's 100 bytes."""
        return _RECORD.pack(*self)

    @classmethod
    def unpack(cls, data: Buffer) -> Record:
        """Read a record from its bytes."""
        return cls._make(_RECORD.unpack(data))


class PackWriter:
    """Writes one pack into a temporary file; `finish` makes it durable and tells its name.

    Used as a context manager, it removes the file unless `finish` was called.
    """

    def __init__(self, path: Path, *, sync: bool = True) -> None:
        self.path = path
        self.records: list[Record] = []
        self._sync = sync
        self._hasher = Hasher()
        self._file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115
        self._offset = 0
        self._finished = False
        self._write(MAGIC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self._file.close()
            self.path.unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._offset

    def append(
        self,
        block: bytes,
        payload: Buffer,
        *,
        raw_length: int,
        encoding: int,
        dtype: int,
        base: bytes = NO_BASE,
        tier: int = 0,
        tiers: int = 1,
    ) -> Record:
        """Add one payload and return its record."""
        record = Record(
            block,
            base,
            digest(payload)[:CHECK_BYTES],
            self._offset,
            len(payload),
            raw_length,
            encoding,
            dtype,
            tier,
            tiers,
        )
        self._write(payload)
        self.records.append(record)
        return record

    def append_as(self, record: Record, payload: Buffer) -> None:
        """Add a payload that another pack has, with what its record there says."""
        self.append(
            record.block,
            payload,
            raw_length=record.raw_length,
            encoding=record.encoding,
            dtype=record.dtype,
            base=record.base,
            tier=record.tier,
            tiers=record.tiers,
        )

    def finish(self) -> str:
        """Write the records and the footer, make the file durable, return its id (hexadecimal)."""
        start = self._offset
        table = b"".join(record.pack() for record in self.records)
        self._write(table)
        self._write(_FOOTER.pack(start, len(self.records), 0, digest(table), FOOTER_MAGIC))
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())
        self._file.close()
        self._finished = True
        return str(self._hasher.hexdigest())

    def _write(self, data: Buffer) -> None:
        self._hasher.update(data)
        self._file.write(data)
        self._offset += len(data)


def read_records(path: Path) -> list[Record]:
    """Read the records at the end of a pack.

    Raises:
        CorruptionError: when the pack has no whole footer, or its records are not what the footer says.
        FileNotFoundError: when there is no such file.
    """
    with path.open("rb") as file:

        def read(offset: int, size: int) -> bytes:
            file.seek(offset)
            return file.read(size)

        if read(0, len(MAGIC)) != MAGIC:
            raise CorruptionError(f"{path.name} is not a pack or is cut short")
        return read_table(path.name, path.stat().st_size, read)


def read_table(name: str, size: int, read: Callable[[int, int], bytes]) -> list[Record]:
    """Read the records of a pack from wherever it lies: only its end is looked at.

    Args:
        name: how messages call it.
        size: its bytes.
        read: returns so many bytes from an offset.

    Raises:
        CorruptionError: see `read_records`.
    """
    if size < len(MAGIC) + _FOOTER.size:
        raise CorruptionError(f"{name} is not a pack or is cut short")
    start, count, reserved, table_hash, magic = _FOOTER.unpack(read(size - _FOOTER.size, _FOOTER.size))
    if magic != FOOTER_MAGIC or reserved or start + count * RECORD_BYTES + _FOOTER.size != size:
        raise CorruptionError(f"{name} has no whole footer")
    table = read(start, count * RECORD_BYTES)
    if digest(table) != table_hash:
        raise CorruptionError(f"{name}: its table of blocks is damaged")
    records = [Record.unpack(table[at : at + RECORD_BYTES]) for at in range(0, count * RECORD_BYTES, RECORD_BYTES)]
    for record in records:
        if record.offset < len(MAGIC) or record.offset + record.length > start:
            raise CorruptionError(f"{name}: a record points outside the pack")
        if not record.tier < record.tiers <= MOST_TIERS:
            raise CorruptionError(f"{name}: a record is of tier {record.tier} of {record.tiers}")
        if record.raw_length > largest_block(MOST_BLOCK_ELEMENTS):
            raise CorruptionError(f"{name}: a record is of a block of {record.raw_length} bytes, which no block has")
    return records


def hash_file(path: Path) -> str:
    """Return the hash of a file's bytes, read in pieces of 1 MiB."""
    hasher = Hasher()
    for piece in pieces(path):
        hasher.update(piece)
    return str(hasher.hexdigest())


def pieces(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    """Yield a file's bytes in pieces of `size`."""
    with path.open("rb") as file:
        while piece := file.read(size):
            yield piece


def largest_block(block_elements: int) -> int:
    """Return how many bytes a block can have, whatever a record claims: elements have at most eight."""
    return 8 * block_elements


def pack_name(pack: bytes) -> str:
    """Return the object name of a pack."""
    text = pack.hex()
    return f"packs/{text[:2]}/{text}.pack"
