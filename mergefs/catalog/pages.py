"""Checking the pages of LMDB's file without LMDB, which trusts what it reads and may end the process over a bad page.

Every page is to be in use once or free once, every page in use to be what its place says, all counts to be right, and
all keys to be in order. What the values hold is another matter; see `environment.py`. The layout is that of LMDB 0.9
on 64-bit little-endian machines.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mergefs.errors import MergefsError

_META_PAGES = 2
_HEADER = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper; of overflow pages the last two are one count
_PAGES = struct.Struct("<I")
_NODE = struct.Struct("<HHHH")
_DB = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
_META_HEAD = struct.Struct("<IIQQ")  # magic, version, address, map size
_META_TAIL = struct.Struct("<QQ")  # last page, transaction
_META_BYTES = _META_HEAD.size + 2 * _DB.size + _META_TAIL.size
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_KINDS = _BRANCH | _LEAF | _OVERFLOW | _META
_BIG, _TABLE = 1, 2
_INTEGER_KEYS = 8
_NONE = (1 << 64) - 1
_LARGEST_MAP = 1 << 44
_ATTEMPTS = 20

FORMAT_TABLE = "format"
LAST_KEY = b"last"
"""Where every transaction leaves its own number (8 bytes), so that an earlier state is not taken for the latest."""


class PagesError(MergefsError):
    """LMDB's file is damaged."""


@dataclass(frozen=True)
class _Db:
    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflow: int
    entries: int
    root: int


@dataclass(frozen=True)
class Meta:
    """One of the two pages that say where everything is.

    Attributes:
        page_size: of all pages, in bytes.
        last: the highest number of a page.
        transaction: the number of the one that wrote this.
    """

    page_size: int
    last: int
    transaction: int
    free: _Db
    main: _Db


def check_size(path: Path) -> None:
    """Check that a file has all the pages that it says, as LMDB would map what is not there and die on it.

    Args:
        path: of `data.mdb`; nothing is checked when there is none or it is empty.

    Raises:
        PagesError: when it is cut short, or is no such file.
    """
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return
            _File(file.fileno())
    except FileNotFoundError:
        return


def check_pages(path: Path) -> frozenset[int]:
    """Check every page, without LMDB, and return the numbers of those that are in use.

    Args:
        path: of `data.mdb`.

    Raises:
        PagesError: with a sentence about the first thing that is wrong.
    """
    with open(path, "rb") as file:
        for _ in range(_ATTEMPTS):
            pages = _File(file.fileno())
            try:
                return _Audit(pages).run()
            except PagesError:
                # Others may have committed meanwhile, also between the reading of the two meta pages, and used pages
                # again that were free.
                if _File(file.fileno()).metas == pages.metas:
                    raise
    return frozenset()  # somebody commits all the time: a file that they can use is left to them


class _File:
    """Pages by their numbers."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        if sys.byteorder != "little":
            raise PagesError("checking pages is for little-endian machines")
        head = os.pread(descriptor, _HEADER.size + _META_BYTES, 0)
        first = _meta(head, 0)
        self.size = first.page_size
        second = _meta(os.pread(descriptor, _HEADER.size + _META_BYTES, self.size), 1)
        if second.page_size != self.size:
            raise PagesError("its two meta pages disagree about the size of pages")
        self.metas = (first, second)
        self.newest = max(self.metas, key=lambda meta: meta.transaction)
        if os.fstat(descriptor).st_size < (self.newest.last + 1) * self.size:
            raise PagesError("its file is cut short")

    def page(self, number: int, count: int = 1) -> bytes:
        """Return so many pages from a number on."""
        data = os.pread(self._descriptor, count * self.size, number * self.size)
        if len(data) != count * self.size:
            raise PagesError(f"page {number} is missing")
        return data


def _meta(data: bytes, number: int) -> Meta:
    if len(data) != _HEADER.size + _META_BYTES:
        raise PagesError("its file is cut short")
    own, _, flags, _, _ = _HEADER.unpack_from(data)
    magic, version, address, map_size = _META_HEAD.unpack_from(data, _HEADER.size)
    at = _HEADER.size + _META_HEAD.size
    free, main = (_Db(*_DB.unpack_from(data, at + i * _DB.size)) for i in range(2))
    last, transaction = _META_TAIL.unpack_from(data, at + 2 * _DB.size)
    page_size = free.pad
    if own != number or flags != _META or magic != _MAGIC or version != _VERSION or address:
        raise PagesError(f"meta page {number} is not one")
    if page_size < 512 or page_size > 1 << 16 or page_size & (page_size - 1):
        raise PagesError(f"meta page {number} has a page size of {page_size}")
    if map_size % page_size or map_size > _LARGEST_MAP or (last + 1) * page_size > map_size:
        raise PagesError(f"meta page {number} has a map of {map_size} bytes")
    if transaction and transaction % _META_PAGES != number:
        raise PagesError(f"meta page {number} has the number of a transaction of the other one")
    return Meta(page_size, last, transaction, free, main)


class _Audit:
    """One pass over all pages that the newest meta page leads to."""

    def __init__(self, file: _File) -> None:
        self._file = file
        self._meta = file.newest
        self._seen = bytearray(self._meta.last + 1)

    def run(self) -> frozenset[int]:
        """Check, and return the pages in use.

        Raises:
            PagesError: see `check_pages`.
        """
        older, newest = sorted(self._file.metas, key=lambda meta: meta.transaction)
        if older.transaction + 1 != newest.transaction and newest.transaction > 1:
            raise PagesError("its two meta pages are not of transactions that follow each other")
        self._take(0, _META_PAGES)
        for _, value in self._walk(self._meta.main, "its list of tables"):
            if len(value) != _DB.size:
                raise PagesError("its list of tables has something else")
        free = list(self._walk(self._meta.free, "its list of free pages"))
        used = frozenset(number for number, seen in enumerate(self._seen) if seen)
        for key, value in free:
            self._free(key, value)
        lost = self._seen.find(0)
        if lost >= 0:
            raise PagesError(f"page {lost} is neither in use nor free")
        self._check_last(newest, newest.transaction)
        # Where the write of a meta page fails, LMDB gives the page its old number back, and leaves the rest of it.
        self._check_last(older, older.transaction, newest.transaction + 1)
        return used

    def _walk(self, db: _Db, what: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries of a table, and check it; those that are tables in it are checked on the way."""
        if db.flags not in (0, _INTEGER_KEYS) or (db.pad and db is not self._meta.free):
            raise PagesError(f"{what} has unknown flags")
        if db.root == _NONE:
            if (db.depth, db.branches, db.leaves, db.overflow, db.entries) != (0, 0, 0, 0, 0):
                raise PagesError(f"{what} is empty and has counts")
            return
        counts = [0, 0, 0, 0]  # branches, leaves, overflow, entries
        previous: bytes | None = None
        integers = db.flags & _INTEGER_KEYS or db is self._meta.free
        for key, value in self._below(db.root, db.depth, counts, what, None, None, integers=bool(integers)):
            order = key[::-1] if integers else key
            if previous is not None and order <= previous:
                raise PagesError(f"the keys of {what} are not in order")
            previous = order
            yield key, value
        if counts != [db.branches, db.leaves, db.overflow, db.entries]:
            raise PagesError(f"the counts of {what} are wrong")

    def _below(
        self, number: int, depth: int, counts: list[int], what: str, low: bytes | None, high: bytes | None, *,
        integers: bool,
    ) -> Iterator[tuple[bytes, bytes]]:  # fmt: skip
        """Yield the entries below a page.

        Args:
            depth: 1 for a leaf.
            low, high: the keys below are at least this and less than that.
        """
        if depth < 1:
            raise PagesError(f"{what} is deeper than it says")
        self._take(number)
        page = self._file.page(number)
        own, _, flags, lower, upper = _HEADER.unpack_from(page)
        if own != number or flags != (_LEAF if depth == 1 else _BRANCH):
            raise PagesError(f"page {number}, of {what}, is not what it is to be")
        keys = (lower - _HEADER.size) // 2
        if lower % 2 or not _HEADER.size < lower <= upper <= self._file.size:
            raise PagesError(f"page {number}, of {what}, has no sound bounds")
        counts[0 if depth > 1 else 1] += 1
        nodes = [self._node(page, offset, number, depth) for offset in struct.unpack_from(f"<{keys}H", page, 16)]
        if sum(node[3] for node in nodes) != self._file.size - upper:
            raise PagesError(f"page {number}, of {what}, has overlapping entries")
        for place, (key, flags, data, _) in enumerate(nodes):
            order = key[::-1] if integers else key
            if depth > 1:
                lowest = low if place == 0 else order
                highest = high
                if place + 1 < keys:
                    after = nodes[place + 1][0]
                    highest = after[::-1] if integers else after
                child = int.from_bytes(data, "little")
                yield from self._below(child, depth - 1, counts, what, lowest, highest, integers=integers)
                continue
            if (low is not None and order < low) or (high is not None and order >= high):
                raise PagesError(f"page {number}, of {what}, has a key that is not looked for there")
            counts[3] += 1
            if flags == _TABLE:
                table = f"table {key.decode(errors='replace')}"
                if len(data) != _DB.size:
                    raise PagesError(f"{table} is not described")
                for _ in self._walk(_Db(*_DB.unpack(data)), table):
                    pass
            elif flags == _BIG:
                size, first = struct.unpack("<IQ", data)
                data = self._overflow(first, size, counts, what)
            elif flags:
                raise PagesError(f"page {number}, of {what}, has an entry of an unknown kind")
            yield key, data

    def _node(self, page: bytes, offset: int, number: int, depth: int) -> tuple[bytes, int, bytes, int]:
        """Return an entry: key, flags, data and the bytes that it takes. Of a big one, the data are size and place."""
        if offset % 2 or offset + _NODE.size > len(page) or offset < _HEADER.size:
            raise PagesError(f"page {number} has an entry outside of it")
        low, high, flags, key_size = _NODE.unpack_from(page, offset)
        at = offset + _NODE.size
        key = page[at : at + key_size]
        if depth > 1:
            data, flags, end = struct.pack("<HHHH", low, high, flags, 0), 0, at + key_size
        else:
            size = low | high << 16
            begin = at + key_size
            end = begin + (8 if flags & _BIG else size)
            data = page[begin:end]
            if flags == _BIG and end <= len(page):
                data = struct.pack("<I", size) + data
        if end > len(page):
            raise PagesError(f"page {number} has an entry that ends outside of it")
        return key, flags, data, (end - offset + 1) & ~1

    def _overflow(self, first: int, size: int, counts: list[int], what: str) -> bytes:
        count = (_HEADER.size + size - 1) // self._file.size + 1
        self._take(first, count)
        data = self._file.page(first, count)
        own, _, flags, _, _ = _HEADER.unpack_from(data)
        if own != first or flags != _OVERFLOW or _PAGES.unpack_from(data, 12)[0] != count:
            raise PagesError(f"page {first}, of {what}, is not the beginning of a value of {size} bytes")
        counts[2] += count
        return data[_HEADER.size : _HEADER.size + size]

    def _free(self, key: bytes, value: bytes) -> None:
        """Note the pages that a transaction has freed."""
        if len(key) != 8 or not 0 < int.from_bytes(key, "little") <= self._meta.transaction or len(value) % 8:
            raise PagesError("its list of free pages has something else")
        numbers = struct.unpack(f"<{len(value) // 8}Q", value)
        if not numbers or numbers[0] > len(numbers) - 1:
            raise PagesError("its list of free pages is shorter than it says")
        previous = _NONE
        for number in numbers[1 : 1 + numbers[0]]:
            if number >= previous:
                raise PagesError("its list of free pages is not in order")
            self._take(number)
            previous = number

    def _take(self, number: int, count: int = 1) -> None:
        """Note that pages are used, or free, which they may be once."""
        if number + count > len(self._seen):
            raise PagesError(f"page {number} is behind the last one")
        if any(self._seen[number : number + count]):
            raise PagesError(f"page {number} is used twice, or is free and used")
        self._seen[number : number + count] = b"\1" * count

    def _check_last(self, meta: Meta, *expected: int) -> None:
        """Check that what a meta page leads to was written by one of these transactions.

        The other check of its kind: a flip in the number of a transaction makes an earlier state the latest.
        """
        value = self._find(meta)
        if value is not None and int.from_bytes(value[:8], "little") not in expected:
            raise PagesError("a meta page has another transaction's number")

    def _find(self, meta: Meta) -> bytes | None:
        self._seen = bytearray(max(m.last for m in self._file.metas) + 1)
        keep, self._meta = self._meta, meta
        try:
            root = None
            for key, value in self._below(
                meta.main.root, meta.main.depth, [0] * 4, "its list of tables", None, None, integers=False
            ) if meta.main.root != _NONE else ():  # fmt: skip
                if key == FORMAT_TABLE.encode():
                    root = _Db(*_DB.unpack(value))
            if root is None or root.root == _NONE:
                return None
            self._seen = bytearray(len(self._seen))
            entries = self._below(root.root, root.depth, [0] * 4, "table format", None, None, integers=False)
            return dict(entries).get(LAST_KEY)
        finally:
            self._meta = keep
