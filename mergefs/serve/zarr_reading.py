"""What reading is for every Zarr store here, whatever its values come from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from mergefs import hashing

Result = TypeVar("Result")


class ReadingStore(Store):
    """The part of a Zarr store that reads and lists.

    Subclasses answer on any thread: `_value`, `_size` and `_keys` may read from the disk.
    """

    def _value(self, key: str) -> hashing.Buffer | None:
        """Return a key's value, or None where there is no such key."""
        raise NotImplementedError

    def _size(self, key: str) -> int | None:
        """Return the length of a key's value without making it, or None where there is no such key."""
        raise NotImplementedError

    def _keys(self, prefix: str) -> Iterable[str]:
        """Return the keys that begin with `prefix`."""
        raise NotImplementedError

    def _names(self, folder: str) -> Iterable[str]:
        """Return the names directly below a folder (no slash at its end; the root is empty)."""
        raise NotImplementedError

    # -- reading -------------------------------------------------------------------------------------------

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return a key's value, or a range of it; None where there is no such key.

        Raises:
            CorruptionError: when a block is missing or damaged.
            TypeError: when `byte_range` is no ByteRequest.
        """
        selected = _selection(byte_range)
        value = await self._aside(self._value, key)
        return None if value is None else prototype.buffer.from_bytes(selected(memoryview(value)))

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Do what `get` does, on this thread.

        Raises: see `get`.
        """
        selected = _selection(byte_range)
        value = self._value(key)
        made = prototype or default_buffer_prototype()
        return None if value is None else made.buffer.from_bytes(selected(memoryview(value)))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return the value or None of each key and range, in their order."""
        return await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges))

    async def exists(self, key: str) -> bool:
        """Tell whether there is such a key."""
        return await self._aside(self._size, key) is not None

    async def getsize(self, key: str) -> int:
        """Return the length of a key's value.

        Raises:
            FileNotFoundError: when there is no such key.
        """
        size = await self._aside(self._size, key)
        if size is None:
            raise FileNotFoundError(key)
        return size

    @property
    def supports_listing(self) -> bool:
        """Keys can be listed."""
        return True

    async def list(self) -> AsyncIterator[str]:
        """Yield every key."""
        for key in await self._aside(self._keys, ""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield every key that begins with `prefix`."""
        for key in await self._aside(self._keys, prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below `prefix`."""
        for name in await self._aside(self._names, prefix.strip("/")):
            yield name

    # -- inside --------------------------------------------------------------------------------------------

    async def _aside(self, call: Callable[[str], Result], key: str) -> Result:
        await self._ensure_open()
        return await asyncio.to_thread(call, key)


def _selection(wanted: ByteRequest | None) -> Callable[[memoryview], memoryview]:
    if wanted is None:
        return lambda data: data
    if isinstance(wanted, RangeByteRequest):
        return lambda data: data[wanted.start : wanted.end]
    if isinstance(wanted, OffsetByteRequest):
        return lambda data: data[wanted.offset :]
    if isinstance(wanted, SuffixByteRequest):
        return lambda data: data[max(0, len(data) - wanted.suffix) :]
    raise TypeError(f"Unexpected byte_range, got {wanted!r}.")
