"""The repository as an fsspec file system: `mergefs://NAME/model.safetensors`, read only.

The first part of a path is a ref, a manifest's id or its beginning; the rest is a file's path in the model.
The root lists the refs. Which repository is meant is said by the option `repo`, or by a chained URL:
`mergefs://NAME/config.json::file:///path/to/repository`.

`mergefs.serve.async_filesystem` has the same for callers in an event loop.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile, make_instance
from fsspec.utils import tokenize

from mergefs.configuration import find_repository
from mergefs.errors import NotFoundError, UserError
from mergefs.hashing import Buffer, hex_digest
from mergefs.manifest import FileRecipe, Manifest
from mergefs.pipeline import available_cores, ordered
from mergefs.serve.pool import Pool
from mergefs.serve.view import View
from mergefs.store import Store

REPOSITORY_VARIABLE = "MERGEFS_REPO"
IDLE_VIEWS = 4
CACHE_BYTES_PER_VIEW = 64 << 20
SMALL_BYTES = 1 << 20
"""What is not larger lies in so few blocks that one thread decodes them."""
_CHAINED = ("fo", "target_protocol", "target_options")
_LOCAL = (None, "file", "local")


class _Surroundings:
    """What decides which repository is meant where none, or a relative path, is given."""

    def __get__(self, instance: object, owner: type) -> tuple[str | None, str]:
        return os.environ.get(REPOSITORY_VARIABLE), os.getcwd()


class MergefsFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Models as folders of files.

    A file that is open keeps the manifest that its ref named when it was opened. Models that were read lately
    stay leased, so that gc leaves them alone: up to four of them in a process, until `close` or its end.

    Args:
        repo: the repository's folder; by default that of MERGEFS_REPO, or the nearest one from the current
            folder upwards.
        fo, target_protocol, target_options: how fsspec says what a chained URL has behind `::`.

    Raises:
        NotARepositoryError: when there is none.
        UserError: when a chained URL has something else than a local folder there.
    """

    protocol = "mergefs"
    root_marker = ""
    # An instance is used again only where the same repository is meant.
    _surroundings = _Surroundings()
    _extra_tokenize_attributes = ("_surroundings",)

    def __init__(
        self,
        repo: str | os.PathLike[str] | None = None,
        *,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        **storage_options: Any,
    ) -> None:
        super().__init__(repo=repo, **storage_options)
        if target_protocol not in _LOCAL:
            raise UserError(
                f"a repository is a local folder, and '{target_protocol}' is not one's protocol: name one as"
                " mergefs://NAME/FILE::file:///FOLDER, or with repo="
            )
        given = repo or fo or os.environ.get(REPOSITORY_VARIABLE)
        self.repo = Path(given).expanduser().absolute() if given else find_repository(Path.cwd())

    def __reduce__(self) -> Any:
        # Another process may have other surroundings.
        options = {key: value for key, value in self.storage_options.items() if key not in _CHAINED}
        return make_instance, (type(self), (), {**options, "repo": str(self.repo)})

    @property
    def fsid(self) -> str:
        """The same for every file system on the same repository."""
        return f"{self.protocol}_{tokenize(str(self.repo))}"

    def close(self) -> None:
        """Give back the leases of models that no file is open in. The file system can still be used."""
        self._models.views.close_idle()

    # -- reading -------------------------------------------------------------------------------------------

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List a folder: of the root the refs, of a model its files and folders; of a file itself.

        Raises:
            FileNotFoundError: when there is nothing at `path`.
        """
        path = self._strip_protocol(path)
        found = [self._model_info(name, name, manifest) for name, manifest in self._refs()] if not path else None
        if found is None:
            own = self.info(path)
            found = [own] if own["type"] == "file" else list(self._children(path))
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Describe what is at `path`: name, size, type; in a model also manifest, created and mtime (the same, in
        seconds since 1970); for a file its sha256 (None where nobody has computed it yet).

        Raises:
            FileNotFoundError: when there is nothing.
        """
        path = self._strip_protocol(path)
        if not path:
            return {"name": "", "size": 0, "type": "directory"}
        name, inside = _split(path)
        manifest = self._manifest(name)
        file = manifest.file_by_path.get(inside)
        if file is not None:
            return self._file_info(path, manifest, file)
        if inside and not any(known.startswith(f"{inside}/") for known in manifest.file_by_path):
            raise FileNotFoundError(errno.ENOENT, f"the model '{name}' has no file '{inside}'", path)
        return self._model_info(path, name, manifest.id)

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Tell whether there is anything at `path`."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Return a file's bytes from `start` to `end`, which count from the file's end where negative.

        Raises:
            FileNotFoundError: when there is no such file.
            CorruptionError: when a block is missing or damaged.
        """
        return self._fetch_one(self._range(path, start, end))

    def cat_ranges(
        self,
        paths: list[str],
        starts: int | list[int | None] | None,
        ends: int | list[int | None] | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Return the bytes of several ranges, in their order. A block that several of them need is decoded once.

        Args:
            paths: of files, with repeats where several ranges of one are wanted.
            starts, ends: see `cat_file`: one for each path, or one for all.
            max_gap: without meaning here, where what is read at once is a block.
            on_error: `raise`, or `return` for exceptions in the places of the ranges that cannot be read.

        Raises:
            TypeError: when `paths` is not a list.
            ValueError: when there are more or fewer starts or ends than paths.
        """
        if not isinstance(paths, list):
            raise TypeError(f"paths is a {type(paths).__name__}, not a list")
        first = starts if isinstance(starts, list) else [starts] * len(paths)
        last = ends if isinstance(ends, list) else [ends] * len(paths)
        wanted: list[_Range | Exception] = []
        for path, start, end in zip(paths, first, last, strict=True):
            try:
                wanted.append(self._range(path, start, end))
            except Exception as error:
                if on_error != "return":
                    raise
                wanted.append(error)
        found = iter(self._fetch([r for r in wanted if isinstance(r, _Range)], keep_errors=on_error == "return"))
        return [next(found) if isinstance(r, _Range) else r for r in wanted]

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> MergefsFile:
        if mode != "rb":
            self._refuse()
        kwargs.pop("autocommit", None)
        kwargs.pop("size", None)
        return MergefsFile(self, self._models.views, self._readable(path), block_size=block_size, **kwargs)

    def ukey(self, path: str) -> str:
        """Return what changes when the contents at `path` change: a ref's does when it is moved."""
        info = self.info(path)
        if not info["name"]:
            return hex_digest(repr(sorted(self._refs())).encode())
        return hex_digest(f"{info['manifest']}\0{_split(info['name'])[1]}".encode())

    def checksum(self, path: str) -> int:
        """Return `ukey` as a number."""
        return int(self.ukey(path), 16)

    def created(self, path: str) -> datetime:
        """Return when the model that `path` is in was first committed; of the root, when the newest was.

        Raises:
            FileNotFoundError: when there is nothing at `path`.
        """
        info = self.info(path)
        if "created" in info:
            return _time(info["created"])
        return _time(max((self._store.manifest_time(manifest) for _, manifest in self._refs()), default=0.0))

    def modified(self, path: str) -> datetime:
        """Return the same as `created`: models do not change."""
        return self.created(path)

    # -- writing is refused --------------------------------------------------------------------------------

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(errno.EROFS, "a mergefs repository is read only here: 'mergefs ingest' adds models")

    mkdir = makedirs = rmdir = rm = rm_file = _rm = cp_file = copy = mv = _refuse
    put = put_file = pipe_file = touch = _refuse

    # -- inside --------------------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        found = super()._strip_protocol(path)
        return found if isinstance(found, list) else found.lstrip("/")

    @property
    def _models(self) -> _Models:
        return _models(self.repo)

    @property
    def _store(self) -> Store:
        return self._models.store

    def _refs(self) -> list[tuple[str, str]]:
        return list(self._store.refs().items())

    def _manifest(self, name: str) -> Manifest:
        try:
            return self._store.manifest(self._store.resolve(name))
        except NotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, str(error), name) from error

    def _readable(self, path: str) -> dict[str, Any]:
        info = self.info(path)
        if info["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return info

    def _range(self, path: str, start: int | None, end: int | None) -> _Range:
        info = self._readable(path)
        first, stop, _ = slice(start, end).indices(info["size"])
        return _Range(info["manifest"], _split(info["name"])[1], first, max(first, stop))

    def _fetch_one(self, wanted: _Range) -> bytes:
        if wanted.stop - wanted.start > SMALL_BYTES:
            found: bytes = self._fetch([wanted])[0]
            return found
        with self._models.views.using(wanted.manifest) as view:
            return view.read(wanted.path, wanted.start, wanted.stop - wanted.start)

    def _fetch(self, ranges: Sequence[_Range], *, keep_errors: bool = False) -> list[Any]:
        """Return the bytes of ranges, or for those that cannot be read the exceptions.

        Blocks are decoded on all cores, each once, in the order of the files.
        """
        with ExitStack() as stack:
            views = {
                manifest: stack.enter_context(self._models.views.using(manifest))
                for manifest in {wanted.manifest for wanted in ranges}
            }
            runs: dict[_Block, list[tuple[int, int, int]]] = {}
            for number, wanted in enumerate(ranges):
                for block, first, stop in _blocks(views[wanted.manifest], wanted):
                    runs.setdefault(block, []).append((number, first, stop))
            # What is read once is not worth driving out what is read often.
            cached = sum(block.stop - block.start for block in runs) <= CACHE_BYTES_PER_VIEW // 2

            def decode(block: _Block) -> Buffer | Exception:
                view = views[block.manifest]
                try:
                    if cached:
                        return view.read(block.path, block.start, block.stop - block.start)
                    return view.part(block.path, block.number)
                except Exception as error:
                    return error

            order = sorted(runs, key=lambda block: (block.manifest, block.path, block.number))
            threads = min(available_cores(), len(order))
            pipeline = (
                ordered(decode, order, threads=threads, window=2 * threads) if threads > 1 else map(decode, order)
            )
            results: list[Any] = [io.BytesIO() for _ in ranges]
            for block, data in zip(order, pipeline, strict=True):
                if isinstance(data, Exception) and not keep_errors:
                    raise data
                for number, first, stop in runs[block]:
                    if isinstance(data, Exception):
                        results[number] = data
                    elif isinstance(results[number], io.BytesIO):
                        results[number].write(memoryview(data)[first - block.start : stop - block.start])
        # The buffer of a BytesIO becomes the bytes without being copied.
        return [found.getvalue() if isinstance(found, io.BytesIO) else found for found in results]

    def _children(self, path: str) -> Iterator[dict[str, Any]]:
        name, inside = _split(path)
        manifest = self._manifest(name)
        below = f"{inside}/" if inside else ""
        folders = set()
        for file in manifest.files:
            if not file.path.startswith(below):
                continue
            first, slash, _ = file.path[len(below) :].partition("/")
            if not slash:
                yield self._file_info(f"{path}/{first}", manifest, file)
            elif first not in folders:
                folders.add(first)
                yield self._model_info(f"{path}/{first}", name, manifest.id)

    def _model_info(self, path: str, name: str, manifest: str) -> dict[str, Any]:
        created = self._store.manifest_time(manifest)
        return {
            "name": path,
            "size": 0,
            "type": "directory",
            "manifest": manifest,
            "created": created,
            "mtime": created,
        }

    def _file_info(self, path: str, manifest: Manifest, file: FileRecipe) -> dict[str, Any]:
        created = self._store.manifest_time(manifest.id)
        return {
            "name": path,
            "size": file.size,
            "type": "file",
            "manifest": manifest.id,
            "created": created,
            "mtime": created,
            "sha256": file.sha256 or self._store.known_sha256(manifest.id, file.path),
        }


class MergefsFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file that is open for reading; its model is leased until it is closed."""

    def __init__(
        self,
        fs: MergefsFileSystem,
        views: Pool[View],
        info: dict[str, Any],
        cache_type: str = "none",
        **kwargs: Any,
    ) -> None:
        self._views = views
        self._manifest: str = info["manifest"]
        self._inside = _split(info["name"])[1]
        views.acquire(self._manifest)
        self._is_held = True
        try:
            # The view keeps decoded blocks itself, so that a buffer here would only hold them twice.
            super().__init__(fs, info["name"], "rb", cache_type=cache_type, size=info["size"], **kwargs)
        except BaseException:
            self._release()
            raise
        self._details = info

    def close(self) -> None:
        """Close the file and give its model back."""
        super().close()
        self._release()

    def _fetch_range(self, start: int, end: int) -> bytes:
        stop = max(start, min(end, self.size))
        found: bytes = self.fs._fetch_one(_Range(self._manifest, self._inside, start, stop))
        return found

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._views.release(self._manifest)

    def __reduce__(self) -> Any:
        # Opened again, it has to be the same file even when the ref has moved.
        function, (fs, _, *rest) = super().__reduce__()
        return function, (fs, f"{self._manifest}/{self._inside}", *rest)


@dataclass(frozen=True)
class _Range:
    """Some of a file's bytes, from `start` to `stop`, which is not before it."""

    manifest: str
    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Block:
    """A block or blob of a file, and where in the file it lies."""

    manifest: str
    path: str
    number: int
    start: int
    stop: int


def _blocks(view: View, wanted: _Range) -> Iterator[tuple[_Block, int, int]]:
    """Yield the blocks that hold a range, and from where to where in the file each is needed."""
    starts, size = view.starts(wanted.path), view.files[wanted.path].size
    at = wanted.start
    number = bisect_right(starts, at) - 1
    while at < wanted.stop:
        end = starts[number + 1] if number + 1 < len(starts) else size
        stop = min(wanted.stop, end)
        yield _Block(wanted.manifest, wanted.path, number, starts[number], end), at, stop
        at = stop
        number += 1


class _Models:
    """One repository and its views that this process has open, whoever uses them."""

    _all: ClassVar[dict[tuple[int, Path], _Models]] = {}

    def __init__(self, path: Path) -> None:
        self.store = store = Store.open(path)
        self.views = Pool(
            lambda manifest: View(store, manifest, cache_bytes=CACHE_BYTES_PER_VIEW, purpose="fsspec"), IDLE_VIEWS
        )


_models_lock = threading.Lock()


def _models(path: Path) -> _Models:
    key = os.getpid(), path
    with _models_lock:
        found = _Models._all.get(key)
        if found is None:
            found = _Models._all[key] = _Models(path)
        return found


def _split(path: str) -> tuple[str, str]:
    name, _, inside = path.partition("/")
    return name, inside


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
