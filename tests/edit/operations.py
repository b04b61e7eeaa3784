"""A seeded checker of file systems: random operations on a real folder, and on a model of it in memory, compared.

It does what fsx of xfstests does (reads, writes, truncations, mappings, holes, each compared at once) on several files
that are open several times, and changes their names meanwhile. Any folder can be checked: without a session,

    python tests/edit/operations.py FOLDER [SEED [OPERATIONS]]
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

PAGE = mmap.PAGESIZE
LARGEST = 300_000
MOST_FILES = 24
MOST_OPEN = 12
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_uint]


class DifferenceError(AssertionError):
    """The folder is not what the model says."""


@dataclass(eq=False)
class Data:
    """What a file holds, whatever it is called now.

    Attributes:
        bytes: its contents.
        first: where changes may begin.
        is_fixed: whether its size and name stay.
    """

    bytes: bytearray = field(default_factory=bytearray)
    first: int = 0
    is_fixed: bool = False


@dataclass(eq=False)
class Opened:
    """An open descriptor."""

    fd: int
    data: Data
    appends: bool


class Checker:
    """Runs random operations.

    Args:
        root: the folder; it holds exactly `files`.
        seed: of the random numbers.
        files: what is there; those in `fixed` keep their names and sizes.
        fixed: paths, and where changes may begin in these files.
    """

    def __init__(self, root: Path, seed: int, files: dict[str, bytes], fixed: dict[str, int] | None = None) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.files = {path: Data(bytearray(data)) for path, data in files.items()}
        for path, first in (fixed or {}).items():
            self.files[path].first, self.files[path].is_fixed = first, True
        self.folders = {path.rpartition("/")[0] for path in files} - {""}
        self.open: list[Opened] = []
        self.done: dict[str, int] = {}
        self.log: list[str] = []

    def run(self, operations: int, verify_every: int = 500) -> None:
        """Run so many operations, with everything compared now and then and at the end.

        Raises:
            DifferenceError: at the first difference, with what was done before.
        """
        names, weights = zip(*WEIGHTS.items(), strict=True)
        for number in range(operations):
            name = self.random.choices(names, weights)[0]
            try:
                getattr(self, f"_{name}")()
                self.done[name] = self.done.get(name, 0) + 1
                if number % verify_every == verify_every - 1:
                    self.verify()
            except Exception as error:
                last = "\n".join(self.log[-12:])
                raise DifferenceError(f"operation {number} ({name}): {error!r}; the last ones:\n{last}") from error
        self.verify()

    def verify(self) -> None:
        """Compare everything: names, sizes and contents, by path and by open descriptor."""
        found, folders = set(), set()
        for folder, subfolders, names in os.walk(self.root):
            below = Path(folder).relative_to(self.root)
            folders |= {(below / name).as_posix() for name in subfolders}
            found |= {(below / name).as_posix() for name in names}
        _equal(found, set(self.files), "names")
        _equal(folders, self.folders, "folders")
        for path, data in self.files.items():
            with open(self.root / path, "rb") as file:
                if self.random.random() < 0.5:
                    _libc.sync_file_range(file.fileno(), 0, 0, 7)
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                _same(file.read(), data.bytes, path)
        for opened in self.open:
            _same(
                os.pread(opened.fd, 2 * LARGEST, 0) if _readable(opened) else opened.data.bytes, opened.data.bytes, ""
            )

    def close(self) -> None:
        """Close every descriptor."""
        while self.open:
            os.close(self.open.pop().fd)

    def contents(self) -> dict[str, bytes]:
        """Return what the folder has to hold."""
        return {path: bytes(data.bytes) for path, data in self.files.items()}

    # -- contents ------------------------------------------------------------------------------------------

    def _write(self) -> None:
        opened = self._writable()
        if opened is None:
            return
        data = self._bytes()
        if opened.appends:
            self._note("append", opened, len(data))
            os.write(opened.fd, data)
            opened.data.bytes.extend(data)
            return
        offset, data = self._fit(opened.data, data)
        self._note("write", opened, offset, len(data))
        _equal(os.pwrite(opened.fd, data, offset), len(data), "written")
        _put(opened.data, offset, data)

    def _read(self) -> None:
        opened = self._any()
        if opened is None or not _readable(opened):
            return
        offset, size = self._range(opened.data)
        self._note("read", opened, offset, size)
        _same(os.pread(opened.fd, size, offset), opened.data.bytes[offset : offset + size], "read")

    def _map_read(self) -> None:
        opened = self._any()
        if opened is None or not opened.data.bytes or not _readable(opened):
            return
        self._note("map_read", opened)
        with mmap.mmap(opened.fd, len(opened.data.bytes), mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            offset, size = self._range(opened.data)
            _same(mapped[offset : offset + size], opened.data.bytes[offset : offset + size], "mapped")

    def _map_write(self) -> None:
        opened = self._writable()
        if opened is None or not opened.data.bytes or not _readable(opened):
            return
        size = len(opened.data.bytes)
        first = opened.data.first
        offset = self.random.randrange(first, size)
        data = self._bytes()[: size - offset]
        self._note("map_write", opened, offset, len(data))
        with mmap.mmap(opened.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            mapped[offset : offset + len(data)] = data
            if self.random.random() < 0.3:
                mapped.flush()
        _put(opened.data, offset, data)

    def _truncate(self) -> None:
        opened = self._writable()
        if opened is None or opened.data.is_fixed:
            return
        size = self.random.choice([0, self.random.randrange(LARGEST), len(opened.data.bytes) // 2])
        self._note("truncate", opened, size)
        os.ftruncate(opened.fd, size)
        _resize(opened.data, size)

    def _truncate_path(self) -> None:
        path = self._path(fixed=False)
        if path is not None:
            size = self.random.randrange(LARGEST)
            self._note("truncate_path", path, size)
            os.truncate(self.root / path, size)
            _resize(self.files[path], size)

    def _punch(self) -> None:
        opened = self._writable()
        if opened is None or opened.appends or len(opened.data.bytes) <= opened.data.first:
            return
        offset = self.random.randrange(opened.data.first, len(opened.data.bytes))
        size = self.random.randrange(1, 70_000)
        self._note("punch", opened, offset, size)
        _equal(_libc.fallocate(opened.fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size), 0, "fallocate")
        stop = min(offset + size, len(opened.data.bytes))
        opened.data.bytes[offset:stop] = bytes(stop - offset)

    def _allocate(self) -> None:
        opened = self._writable()
        if opened is None or opened.data.is_fixed:
            return
        offset, size = self.random.randrange(LARGEST // 2), self.random.randrange(1, LARGEST // 2)
        self._note("allocate", opened, offset, size)
        os.posix_fallocate(opened.fd, offset, size)
        _resize(opened.data, max(len(opened.data.bytes), offset + size))

    def _copy_range(self) -> None:
        source, target = self._any(), self._writable()
        if source is None or target is None or target.appends or source.data is target.data or not _readable(source):
            return
        offset, size = self._range(source.data)
        expected = bytes(source.data.bytes[offset : offset + size])
        place, expected = self._fit(target.data, expected)
        self._note("copy_range", source, target, offset, place, len(expected))
        at = 0
        while at < len(expected):
            copied = os.copy_file_range(source.fd, target.fd, len(expected) - at, offset + at, place + at)
            _equal(copied > 0, True, "copied")
            at += copied
        if expected:
            _put(target.data, place, expected)

    def _sync(self) -> None:
        opened = self._any()
        if opened is not None:
            self.random.choice([os.fsync, os.fdatasync])(opened.fd)

    def _forget(self) -> None:
        """Have the kernel forget what it has cached of a file, so that reads reach the file system."""
        opened = self._any()
        if opened is not None:
            _libc.sync_file_range(opened.fd, 0, 0, 7)  # writes dirty pages, and waits for them
            os.posix_fadvise(opened.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    # -- names ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        path = self._path()
        if path is None:
            return
        if len(self.open) >= MOST_OPEN:
            self._close()
        data = self.files[path]
        flags = self.random.choice([os.O_RDONLY, os.O_RDWR, os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_APPEND])
        if data.is_fixed:
            flags &= ~os.O_APPEND
        elif self.random.random() < 0.1 and flags != os.O_RDONLY:
            flags |= os.O_TRUNC
            data.bytes.clear()
        self._note("open", path, flags)
        self.open.append(Opened(os.open(self.root / path, flags), data, bool(flags & os.O_APPEND)))

    def _close(self) -> None:
        if self.open:
            os.close(self.open.pop(self.random.randrange(len(self.open))).fd)

    def _create(self) -> None:
        path = self._new_path()
        if len(self.files) >= MOST_FILES:
            return
        self._note("create", path)
        there = path in self.files or path in self.folders
        with _expected(errno.EEXIST if there else None):
            os.close(os.open(self.root / path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644))
        if not there:
            self.files[path] = Data()

    def _replace(self) -> None:
        """What careful programs do: a new file, flushed, then renamed over the old one."""
        path, data = self._path(fixed=False), self._bytes()
        if path is None:
            return
        self._note("replace", path, len(data))
        new = self.root / f"{path}.new"
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.root / path)
        self.files[path] = Data(bytearray(data))

    def _unlink(self) -> None:
        path = self._path(fixed=False)
        if path is not None:
            self._note("unlink", path)
            os.unlink(self.root / path)
            del self.files[path]

    def _rename(self) -> None:
        new = self._new_path()
        old = self.random.choice(sorted({*self.files, *self.folders}) or [new])
        if old not in self.files and old not in self.folders:
            return
        if old in self.files and self.files[old].is_fixed:
            return
        if new in self.files and self.files[new].is_fixed:
            return
        if old in self.folders and any(p.startswith(f"{old}/") and d.is_fixed for p, d in self.files.items()):
            return
        self._note("rename", old, new)
        below = any(path.startswith(f"{new}/") for path in (*self.files, *self.folders))
        wrong = None
        if new.startswith(f"{old}/"):
            wrong = errno.EINVAL
        elif old.startswith(f"{new}/"):
            wrong = errno.ENOTEMPTY
        elif old != new and new in self.folders and old in self.files:
            wrong = errno.EISDIR
        elif old != new and new in self.files and old in self.folders:
            wrong = errno.ENOTDIR
        elif old != new and new in self.folders and below:
            wrong = errno.ENOTEMPTY
        try:
            with _expected(wrong):
                os.rename(self.root / old, self.root / new)
        except DifferenceError:
            if not (self._unnamed() and new in self.folders and not below):
                raise
            return  # a file that was removed from there is still open
        if wrong is None and old != new:
            self.files.pop(new, None)
            self.files = {_moved(path, old, new): data for path, data in self.files.items()}
            self.folders = {_moved(path, old, new) for path in self.folders}

    def _mkdir(self) -> None:
        path = self._new_path()
        if path.count("/") < 3:
            self._note("mkdir", path)
            there = path in self.files or path in self.folders
            with _expected(errno.EEXIST if there else None):
                os.mkdir(self.root / path)
            self.folders |= set() if there else {path}

    def _rmdir(self) -> None:
        if self.folders:
            path = self.random.choice(sorted(self.folders))
            full = any(other.startswith(f"{path}/") for other in (*self.files, *self.folders))
            # A file that was removed from there and is still open may hold the folder, as with NFS.
            self._note("rmdir", path)
            try:
                os.rmdir(self.root / path)
            except OSError as error:
                _equal(error.errno, errno.ENOTEMPTY, "error")
                _equal(full or bool(self._unnamed()), True, "full")
            else:
                _equal(full, False, "full")
                self.folders.discard(path)

    def _stat(self) -> None:
        path = self._path()
        if path is not None:
            found = os.stat(self.root / path)
            _equal(found.st_size, len(self.files[path].bytes), "size")
        for opened in self.open[:2]:
            _equal(os.fstat(opened.fd).st_size, len(opened.data.bytes), "size of what is open")

    def _list(self) -> None:
        folder = self.random.choice(["", *sorted(self.folders)])
        names = {p.rpartition("/")[2] for p in (*self.files, *self.folders) if p.rpartition("/")[0] == folder}
        _equal(set(os.listdir(self.root / folder)), names, f"names in '{folder}'")

    def _absent(self) -> None:
        path = self._new_path()
        if path not in self.files and path not in self.folders:
            for call in (os.stat, os.unlink, os.rmdir, os.listdir):
                with _expected(errno.ENOENT):
                    call(self.root / path)

    # -- choosing ------------------------------------------------------------------------------------------

    def _any(self) -> Opened | None:
        return self.random.choice(self.open) if self.open else None

    def _writable(self) -> Opened | None:
        found = [opened for opened in self.open if _flags(opened.fd) & os.O_ACCMODE != os.O_RDONLY]
        return self.random.choice(found) if found else None

    def _unnamed(self) -> list[Opened]:
        named = {id(data) for data in self.files.values()}
        return [opened for opened in self.open if id(opened.data) not in named]

    def _path(self, *, fixed: bool = True) -> str | None:
        paths = sorted(path for path, data in self.files.items() if fixed or not data.is_fixed)
        return self.random.choice(paths) if paths else None

    def _new_path(self) -> str:
        folder = self.random.choice(["", *sorted(self.folders)])
        return f"{folder}/{self.random.choice('abcdefgh')}".lstrip("/")

    def _bytes(self) -> bytes:
        size = self.random.choice([1, 10, 512, PAGE, self.random.randrange(1, 100_000)])
        return self.random.randbytes(size)

    def _range(self, data: Data) -> tuple[int, int]:
        size = len(data.bytes)
        offset = self.random.randrange(size + 1)
        return offset, self.random.choice([1, PAGE, self.random.randrange(1, 2 * LARGEST)])

    def _fit(self, data: Data, new: bytes) -> tuple[int, bytes]:
        """Return a place for bytes, and as many of them as fit there."""
        limit = len(data.bytes) if data.is_fixed else LARGEST
        offset = self.random.randrange(data.first, limit)
        if self.random.random() < 0.3:
            offset = max(data.first, offset // PAGE * PAGE)
        return offset, new[: limit - offset]

    def _note(self, *what: object) -> None:
        self.log.append(" ".join(self._named(part) for part in what))
        del self.log[:-50]

    def _named(self, part: object) -> str:
        if not isinstance(part, Opened):
            return str(part)
        path = next((path for path, data in self.files.items() if data is part.data), "(removed)")
        return f"{path}[{part.fd}, {len(part.data.bytes)}]"


WEIGHTS = {
    "write": 22,
    "read": 16,
    "map_read": 6,
    "map_write": 8,
    "truncate": 5,
    "truncate_path": 2,
    "punch": 3,
    "allocate": 1,
    "copy_range": 3,
    "sync": 2,
    "forget": 8,
    "open": 10,
    "close": 5,
    "create": 4,
    "replace": 2,
    "unlink": 2,
    "rename": 4,
    "mkdir": 1,
    "rmdir": 1,
    "stat": 4,
    "list": 2,
    "absent": 1,
}


class _expected:  # noqa: N801 - used like a function
    """Expect a call to fail with an error number, or not to."""

    def __init__(self, number: int | None) -> None:
        self._number = number

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is not None and not isinstance(error, OSError):
            return False
        found = None if error is None else error.errno
        if self._number == errno.ENOTEMPTY and found == errno.EEXIST:
            return True  # rename(2) may give either
        _equal(found, self._number, "error")
        return True


def _moved(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path == old or path.startswith(f"{old}/") else path


def _put(data: Data, offset: int, new: bytes) -> None:
    _resize(data, max(len(data.bytes), offset + len(new)))
    data.bytes[offset : offset + len(new)] = new


def _resize(data: Data, size: int) -> None:
    data.bytes.extend(bytes(max(0, size - len(data.bytes))))
    del data.bytes[size:]


def _flags(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL)


def _readable(opened: Opened) -> bool:
    return _flags(opened.fd) & os.O_ACCMODE != os.O_WRONLY


def _equal(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise DifferenceError(f"{what}: {found!r} instead of {expected!r}")


def _same(found: bytes, expected: bytes | bytearray, what: str) -> None:
    if found != expected:
        at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), -1)
        raise DifferenceError(f"{what}: {len(found)} bytes instead of {len(expected)}, which differ at {at}")


def main(folder: str, seed: str = "1", operations: str = "100000") -> None:
    """Check an empty folder."""
    checker = Checker(Path(folder), int(seed), {})
    (Path(folder) / "a").touch()
    checker.files["a"] = Data()
    checker.run(int(operations))
    checker.close()
    print(checker.done)


if __name__ == "__main__":
    main(*sys.argv[1:])
