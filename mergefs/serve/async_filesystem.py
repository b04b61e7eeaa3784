"""The file system for callers in an event loop: decoding runs on threads, so that the loop is never held up."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from fsspec.asyn import AbstractAsyncStreamedFile
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from mergefs.serve.filesystem import MergefsFile, MergefsFileSystem


class AsyncMergefsFileSystem(AsyncFileSystemWrapper):  # type: ignore[misc]
    """`MergefsFileSystem` with coroutines: `_ls`, `_info`, `_cat_file`, `_cat_ranges`, `open_async` and the others.

    Args:
        repo: the repository's folder; see `MergefsFileSystem`.
        asynchronous: whether it is used inside an event loop; without, its methods without an underscore block.
        storage_options: see `MergefsFileSystem`.

    Raises:
        NotARepositoryError: when there is no repository.
    """

    def __init__(
        self, repo: str | os.PathLike[str] | None = None, *, asynchronous: bool = True, **storage_options: Any
    ) -> None:
        super().__init__(fs=MergefsFileSystem(repo, **storage_options), asynchronous=asynchronous)
        # Older wrappers make a coroutine of this generator; that of AsyncFileSystem goes over what `_ls` gives.
        self.__dict__.pop("_walk", None)

    def __reduce__(self) -> Any:
        # Another process may have other surroundings.
        return _again, (str(self.sync_fs.repo), self.asynchronous)

    async def open_async(self, path: str, mode: str = "rb", **kwargs: Any) -> AsyncMergefsFile:
        """Open a file for reading; its `read` and `close` are coroutines.

        Raises:
            FileNotFoundError: when there is no such file.
            OSError: when it is to be written.
            ValueError: when it is to be read as text.
        """
        if "b" not in mode:
            raise ValueError(f"a file is read in the mode 'rb' here, not '{mode}'")
        file = await asyncio.to_thread(self.sync_fs.open, path, mode, **kwargs)
        return AsyncMergefsFile(self, file)


class AsyncMergefsFile(AbstractAsyncStreamedFile):  # type: ignore[misc]
    """A file that is open for reading in an event loop; its model is leased until it is closed."""

    def __init__(self, fs: AsyncMergefsFileSystem, file: MergefsFile) -> None:
        super().__init__(fs, file.path, "rb", cache_type="none", size=file.size)
        self._file = file

    async def close(self) -> None:
        """Close the file and give its model back."""
        self._file.close()
        self.closed = True

    def __del__(self) -> None:
        self._file.close()

    async def _fetch_range(self, start: int, end: int) -> bytes:
        found: bytes = await asyncio.to_thread(self._file._fetch_range, start, min(end, self.size))
        return found


def _again(repo: str, asynchronous: bool) -> AsyncMergefsFileSystem:
    return AsyncMergefsFileSystem(repo, asynchronous=asynchronous)
