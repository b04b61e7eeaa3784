"""An archive: a repository's objects behind an fsspec URL, without a catalog, as one side of a transfer.

It holds packs, manifests and plans by the names that they have in a repository, and refs as the copies there. What
blocks it has is read from the ends of its packs. See spec/transfer.md.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import fsspec

from mergefs.blocks.pack import NO_BASE, PackWriter, Record, pack_name, read_table
from mergefs.catalog.tables import Location
from mergefs.configuration import LARGEST_BLOCK_SIZE
from mergefs.errors import CorruptionError, FormatVersionError, NotFoundError, RefMovedError, UserError
from mergefs.hashing import hex_digest, is_hex_id, is_hex_prefix
from mergefs.json_input import load_json
from mergefs.manifest import Manifest, decode
from mergefs.parts import positive
from mergefs.refs import check_ref_name, decode_ref_copy, encode_ref_copy, ref_copy_name
from mergefs.store import manifest_name, plan_name
from mergefs.transfer.placing import placing
from mergefs.transfer.side import Model, Receiver, Side

CONFIG = "mergefs-archive.json"
FORMAT = "mergefs-archive"
VERSION = 2
"""Version 1 differs in nothing but that its packs have no exact tiers of nibbles, which who knows only that would take
for damage."""
PACK_BYTES = 64 << 20
_LARGEST_GAP = 64 << 10
_LONGEST = 8 << 20
_TAIL = 32 << 10
"""Bytes that are read of the end of a pack: the tables of most are in them."""
_ATTEMPTS = 8
"""So often a ref is looked at again that others move at the same time."""


class Archive(Side):
    """See `Side`.

    Args:
        url: of a folder, which is made on the first push.
        block_elements: what an archive that is made is to have; None to open one that is there.
        sync: flush what is written to the disk, where it is a folder of this machine.

    Raises:
        NotFoundError: when there is none, and none is to be made.
        UserError: when there is something else, or no file system for the URL.
        FormatVersionError: when a newer mergefs made it.
    """

    def __init__(self, url: str, block_elements: int | None = None, *, sync: bool = True) -> None:
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"{url}: {error}") from error
        self._root = self._root.rstrip("/")
        self._files.invalidate_cache()  # file systems are shared by all of a process, with what they once listed
        self._placing = placing(self._files, sync=sync)
        self._url = url
        self._tables: dict[bytes, dict[int, Location]] | None = None
        config = self._read(CONFIG)
        if config is None:
            if block_elements is None:
                raise NotFoundError(f"{url} is no archive of mergefs: 'mergefs push' makes one")
            if self._files.exists(self._root) and self._files.ls(self._root):
                raise UserError(f"{url} is not empty and no archive of mergefs: name a new folder")
            self._block_elements = block_elements
            made = {"format": FORMAT, "version": VERSION, "block_elements": block_elements, "created": time.time()}
            self._write(CONFIG, json.dumps(made).encode())
            return
        try:
            found = load_json(config)
            if found["format"] != FORMAT:
                raise ValueError("it does not say that it is one")
            if type(found["version"]) is not int or not 1 <= found["version"] <= VERSION:
                raise FormatVersionError(f"{url} has version {found['version']!r}: upgrade mergefs")
            self._block_elements = positive(found["block_elements"])
            if self._block_elements > LARGEST_BLOCK_SIZE // 2:
                raise ValueError(f"blocks of {self._block_elements} elements")
            if block_elements is not None and found["version"] < VERSION:
                # What will be pushed may need it.
                self._write(CONFIG, json.dumps(found | {"version": VERSION}).encode())
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{url}/{CONFIG} is not an archive's: {error}") from error

    @property
    def block_elements(self) -> int:
        """See `Side.block_elements`."""
        return self._block_elements

    def ref(self, name: str) -> str | None:
        """Return the id of the manifest that a ref names, or None."""
        check_ref_name(name)
        data = self._read(ref_copy_name(name))
        return None if data is None else str(decode_ref_copy(data)["manifest"])

    def resolve(self, name: str) -> str:
        """See `Side.resolve`."""
        if is_hex_id(name) and self._read(manifest_name(name)) is not None:
            return name
        found = None if is_hex_prefix(name) and is_hex_id(name) else self.ref(name)
        if found is None:
            raise NotFoundError(f"'{name}' is neither a ref nor a manifest of {self._url}")
        return found

    def manifest(self, identity: str) -> Manifest:
        """See `Side.manifest`."""
        return decode(self._object(manifest_name(identity), identity, "manifest"))

    def plan(self, identity: str) -> bytes:
        """See `Side.plan`."""
        return self._object(plan_name(identity), identity, "plan")

    def tiers(self, block: bytes) -> tuple[Location, ...]:
        """See `Side.tiers`."""
        found = self._known().get(block, {})
        if not found or sorted(found) != list(range(found[min(found)].record.tiers)):
            return ()
        return tuple(found[tier] for tier in sorted(found))

    def payloads(self, locations: Iterable[Location]) -> list[bytes]:
        """See `Side.payloads`. What lies close together is read at once."""
        wanted = list(locations)
        groups: list[list[int]] = []
        for place in sorted(range(len(wanted)), key=lambda i: (wanted[i].pack, wanted[i].record.offset)):
            if groups and self._joins(wanted, groups[-1], place):
                groups[-1].append(place)
            else:
                groups.append([place])
        paths = [self._path(pack_name(wanted[group[0]].pack)) for group in groups]
        starts = [wanted[group[0]].record.offset for group in groups]
        stops = [wanted[group[-1]].record.offset + wanted[group[-1]].record.length for group in groups]
        found: dict[int, bytes] = {}
        for group, start, data in zip(groups, starts, self._ranges(paths, starts, stops), strict=True):
            for member in group:
                at = wanted[member].record.offset - start
                found[member] = data[at : at + wanted[member].record.length]
        return [found[place] for place in range(len(wanted))]

    def _joins(self, wanted: Sequence[Location], group: list[int], place: int) -> bool:
        first, last, following = wanted[group[0]], wanted[group[-1]], wanted[place]
        gap = following.record.offset - last.record.offset - last.record.length
        size = following.record.offset + following.record.length - first.record.offset
        return following.pack == last.pack and 0 <= gap <= _LARGEST_GAP and size <= _LONGEST

    def sending(self, identities: Iterable[str]) -> AbstractContextManager[object]:
        """See `Side.sending`: nothing of an archive is ever collected."""
        return nullcontext()

    @contextmanager
    def receiving(self) -> Iterator[Receiver]:
        """See `Side.receiving`."""
        with tempfile.TemporaryDirectory(prefix="mergefs-push-") as scratch:
            receiver = _Receiver(self, Path(scratch))
            try:
                yield receiver
            finally:
                receiver.close()

    # -- inside --------------------------------------------------------------------------------------------

    def put_object(self, name: str, data: bytes) -> int:
        """Store an object that is not there; return how many bytes were written."""
        if self._files.exists(self._path(name)):
            return 0
        self._write(name, data)
        return len(data)

    def put_pack(self, identity: str, path: Path, records: Sequence[Record]) -> None:
        """Store a finished pack, and know its blocks from now on."""
        path_there = self._path(pack_name(bytes.fromhex(identity)))
        self._placing.put_file(path, path_there, self._path(f"tmp/{identity}"))
        self._enter(bytes.fromhex(identity), records)

    def check_ref(self, name: str, manifest: str, *, replace: bool) -> str | None:
        """Return what a ref names, or None.

        Raises:
            RefMovedError: when it names another manifest, and is not to be replaced.
        """
        old = self.ref(name)
        if old not in (None, manifest) and not replace:
            raise RefMovedError(
                f"'{name}' names {str(old)[:12]} there, another model: move it with --force, or give another name with"
                " --as"
            )
        return old

    def set_ref(self, name: str, manifest: Manifest, *, replace: bool) -> None:
        """Have a ref name a manifest: one that there is not yet, or that names this manifest, or any with `replace`.

        Raises:
            RefMovedError: when it names another one.
        """
        for _ in range(_ATTEMPTS):
            with self._placing.slot(self._path(ref_copy_name(name))) as slot:
                old = self.check_ref(name, manifest.id, replace=replace)
                about = {"raw_bytes": manifest.raw_bytes}
                entry = {"manifest": manifest.id, "time": time.time(), "previous": old, "about": about}
                if old == manifest.id or slot.write(encode_ref_copy(entry), new=old is None):
                    return
        raise RefMovedError(f"'{name}' is moved there by others again and again: try once more")

    def _known(self) -> dict[bytes, dict[int, Location]]:
        if self._tables is None:
            self._tables = {}
            listed = self._files.glob(self._path("packs/*/*.pack"), detail=True)
            sizes = {path: int(listed[path]["size"]) for path in sorted(listed) if is_hex_id(Path(path).stem)}
            starts = [max(0, size - _TAIL) for size in sizes.values()]
            # All at once: object stores answer many requests in the time of one.
            for (path, size), tail in zip(
                sizes.items(), self._ranges([*sizes], starts, [*sizes.values()]), strict=True
            ):
                self._enter(bytes.fromhex(Path(path).stem), self._records(path, size, tail))
        return self._tables

    def _enter(self, pack: bytes, records: Iterable[Record]) -> None:
        tables = self._known()
        whole = {block for block in {record.block for record in records} if self.tiers(block)}
        for record in records:
            if record.block not in whole:
                tables.setdefault(record.block, {})[record.tier] = Location(pack, record)

    def _records(self, path: str, size: int, tail: bytes) -> list[Record]:
        start = size - len(tail)

        def read(offset: int, length: int) -> bytes:
            if offset >= start:
                return tail[offset - start : offset - start + length]
            return bytes(self._files.cat_file(path, start=offset, end=offset + length))

        return read_table(Path(path).name, size, read)

    def _ranges(self, paths: Sequence[str], starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        return [
            bytes(data) for data in self._files.cat_ranges(list(paths), list(starts), list(stops), on_error="raise")
        ]

    def _object(self, name: str, identity: str, what: str) -> bytes:
        data = self._read(name)
        if data is None or hex_digest(data) != identity:
            raise CorruptionError(f"{what} {identity} of {self._url} is {'missing' if data is None else 'damaged'}")
        return data

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _read(self, name: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def _write(self, name: str, data: bytes) -> None:
        self._placing.put(self._path(name), data)


class _Receiver(Receiver):
    def __init__(self, archive: Archive, scratch: Path) -> None:
        self._archive = archive
        self._scratch = scratch
        self._open: PackWriter | None = None
        self._count = 0
        self._added = 0

    def has(self, block: bytes) -> bool:
        return bool(self._archive.tiers(block))

    def stands_alone(self, block: bytes) -> bool:
        return bool(self._archive.tiers(block)[0].record.base == NO_BASE)

    def add(self, records: Sequence[Record], payloads: Sequence[bytes]) -> None:
        if self._open is None:
            self._count += 1
            self._open = PackWriter(self._scratch / str(self._count), sync=False)
        for record, payload in zip(records, payloads, strict=True):
            self._open.append_as(record, payload)
        if self._open.size >= PACK_BYTES:
            self._close()

    def close(self) -> None:
        """Drop the pack that is not finished."""
        if self._open is not None:
            self._open.__exit__(None, None, None)

    def _close(self) -> None:
        if self._open is not None:
            pack, self._open = self._open, None
            self._archive.put_pack(pack.finish(), pack.path, pack.records)
            self._added += pack.path.stat().st_size
            pack.path.unlink()

    def publish(self, model: Model, name: str, *, replace: bool) -> None:
        self._close()
        self._archive.check_ref(name, model.manifest.id, replace=replace)
        if model.plan is not None:
            self._added += self._archive.put_object(plan_name(model.plan[0]), model.plan[1])
        for manifest in (*model.others, model.manifest):
            self._added += self._archive.put_object(manifest_name(manifest.id), manifest.encoded)
        self._archive.set_ref(name, model.manifest, replace=replace)

    @property
    def added_bytes(self) -> int:
        return self._added


def is_url(text: str) -> bool:
    """Tell whether a place is behind an fsspec URL, rather than a path."""
    return "://" in text or "::" in text
