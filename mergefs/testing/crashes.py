"""What a disk may hold after a crash, for every moment of a program's run.

`record` runs a program under strace and notes what it did to one folder: every write, flush, rename and removal,
LMDB's included. `crash_states` goes through the moments between them. What a program has flushed by then is on the
disk; of the rest any part may be, as a kernel writes back in any order. `State.write` makes a folder of it.

What is assumed of the file system is what POSIX says, and that a rename is there or not:

- a write is durable after an fsync or fdatasync of its file, or when the file was opened with O_SYNC or O_DSYNC;
- a name (made, moved, removed) is durable after an fsync of its folder; an fsync of a file says nothing of its name.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

_CALLS = (
    "openat,open,creat,lseek,write,pwrite64,writev,pwritev,pwritev2,ftruncate,truncate,fsync,fdatasync,sync_file_range,msync,"
    "rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,link,linkat,symlink,symlinkat,fallocate,"
    "copy_file_range,sendfile"
)
_UNKNOWN = {"truncate", "msync", "link", "linkat", "symlink", "symlinkat", "fallocate", "copy_file_range", "sendfile"}
_LONGEST = 1 << 28
_PAGE = 4096
_LINE = re.compile(r"(?P<pid>\d+) +(?P<call>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)(?P<rest>.*)")
_UNFINISHED = re.compile(r"(?P<pid>\d+) +(?P<begin>\w+\(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"(?P<pid>\d+) +<\.\.\. \w+ resumed>(?P<end>.*)$")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
_DESCRIPTOR = re.compile(r"(\d+|AT_FDCWD)<((?:[^<>]|\\x[0-9a-f]{2})*)>")


class RecordError(Exception):
    """A program cannot be recorded, or does what is not known here."""


@dataclass(frozen=True)
class Event:
    """Something that a program did to the folder.

    Attributes:
        kind: `write`, `truncate`, `create`, `mkdir`, `rename`, `remove`, `flush` or `flush names`.
        path: of the file or folder, relative.
        offset, data: of a write; the offset is the new size of `truncate`.
        target: where a rename leads.
        durable: whether a write is on the disk when it returns.
    """

    kind: str
    path: str
    offset: int = 0
    data: bytes = b""
    target: str = ""
    durable: bool = False


@dataclass(frozen=True)
class Recording:
    """A run of a program.

    Attributes:
        before: the files of the folder when it began, by their paths; None for folders.
        events: what it did.
        code: what it ended with.
        output: what it printed.
    """

    before: Mapping[str, bytes | None]
    events: tuple[Event, ...]
    code: int
    output: str


@dataclass(frozen=True)
class State:
    """What the disk may hold.

    Attributes:
        moment: how many events had happened.
        finished: whether that were all, so that the program may have reported its success.
        files: by their paths; None for folders.
    """

    moment: int
    finished: bool
    files: Mapping[str, bytes | None]

    def write(self, folder: Path) -> None:
        """Make a new folder that holds this."""
        folder.mkdir()
        for path in sorted(self.files):
            content = self.files[path]
            if content is None:
                (folder / path).mkdir(exist_ok=True)
            else:
                (folder / path).write_bytes(content)


def record(command: Sequence[str], folder: Path, *, environment: Mapping[str, str] | None = None) -> Recording:
    """Run a program, and note what it does to a folder.

    Args:
        command: the program and its arguments.
        folder: which nothing else may change meanwhile.
        environment: variables for the program; this process's when None.

    Raises:
        RecordError: when there is no strace, or the program changes files in a way that is not known here, such as
            through a mapping.
    """
    strace = shutil.which("strace")
    if strace is None:
        raise RecordError("strace is missing: apt install strace")
    before = snapshot(folder)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        options = ["-f", "-y", "-xx", "-s", str(_LONGEST), "--seccomp-bpf", "-e", f"trace={_CALLS}", "-o", str(log)]
        done = subprocess.run(
            [strace, *options, *command], capture_output=True, text=True, check=False, env=environment
        )
        if not log.exists():
            raise RecordError(f"strace does not run here: {done.stderr.strip()}")
        files = {path: len(data) for path, data in before.items() if data is not None}
        events = tuple(_Reader(folder.resolve(), files).read(log.read_text()))
    return Recording(before, events, done.returncode, done.stdout + done.stderr)


def can_record() -> bool:
    """Tell whether there is a strace that may trace."""
    strace = shutil.which("strace")
    return strace is not None and subprocess.run([strace, "-o", os.devnull, "true"], check=False).returncode == 0


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Return the files below a folder by their relative paths; None for folders."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        found[path.relative_to(folder).as_posix()] = path.read_bytes() if path.is_file() else None
    return found


def crash_states(
    recording: Recording, *, seed: int = 0, random_subsets: int = 2, ignore: Sequence[str] = ()
) -> Iterator[State]:
    """Yield what the disk may hold, each state once.

    After every event: with nothing of what was not flushed; with all of it; with all but one part; with one part
    alone; and with parts at random.

    Args:
        recording: of the program.
        seed, random_subsets: how many random choices of parts are made for each moment.
        ignore: paths of files that are left out, as nobody relies on them.
    """
    chance = random.Random(seed)
    seen: set[int] = set()
    disk = _Disk(recording.before)
    last = len(recording.events)
    for moment in range(last + 1):
        if moment:
            disk.apply(recording.events[moment - 1])
        parts = range(len(disk.pending))
        choices = [frozenset(), frozenset(parts)]
        choices += [frozenset(parts) - {part} for part in parts] + [frozenset({part}) for part in parts]
        choices += [frozenset(p for p in parts if chance.random() < 0.5) for _ in range(random_subsets if parts else 0)]
        for choice in choices:
            files = {path: data for path, data in disk.with_parts(choice).items() if path not in ignore}
            key = hash((moment == last, frozenset(files.items())))
            if key not in seen:
                seen.add(key)
                yield State(moment, moment == last, files)


@dataclass
class _Inode:
    """A file: what is durable of it."""

    data: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class _Part:
    """Something that is not durable yet: a change of a file's data, or of a name."""

    event: Event
    inode: int


class _Disk:
    """What is durable, and what is not yet."""

    def __init__(self, before: Mapping[str, bytes | None]) -> None:
        self._inodes: list[_Inode] = []
        self._names: dict[str, int | None] = {}
        for path, data in before.items():
            self._names[path] = None if data is None else self._new(data)
        self._current = dict(self._names)
        self.pending: list[_Part] = []

    def _new(self, data: bytes = b"") -> int:
        self._inodes.append(_Inode(bytearray(data)))
        return len(self._inodes) - 1

    def apply(self, event: Event) -> None:
        """Have an event happen."""
        match event.kind:
            case "create":
                self._current[event.path] = self._new()
                self._later(event, event.path)
            case "mkdir":
                self._current[event.path] = None
                self._later(event, event.path)
            case "rename":
                self._later(event, event.path)
                _rename(self._current, event)
            case "remove":
                self._later(event, event.path)
                self._current.pop(event.path, None)
            case "write" | "truncate":
                self._later(event, event.path)
                if event.durable:
                    self._flush(self._current[event.path])
            case "flush":
                self._flush(self._current[event.path])
            case _:
                self._flush_names(event.path)

    def _later(self, event: Event, path: str) -> None:
        inode = self._current.get(path)
        for part in _torn(event):
            self.pending.append(_Part(part, -1 if inode is None else inode))

    def _flush(self, inode: int | None) -> None:
        kept = []
        for part in self.pending:
            if part.event.kind in ("write", "truncate") and part.inode == inode:
                _change(self._inodes[part.inode].data, part.event)
            else:
                kept.append(part)
        self.pending = kept

    def _flush_names(self, folder: str) -> None:
        kept = []
        for part in self.pending:
            if folder in _folders(part.event):
                _enter(self._names, part)
            else:
                kept.append(part)
        self.pending = kept

    def with_parts(self, chosen: frozenset[int]) -> dict[str, bytes | None]:
        """Return the files when of what is not durable the chosen parts are there."""
        names = dict(self._names)
        changed: dict[int, bytearray] = {}
        for number in sorted(chosen):
            part = self.pending[number]
            if part.event.kind in ("write", "truncate"):
                data = changed.setdefault(part.inode, bytearray(self._inodes[part.inode].data))
                _change(data, part.event)
            else:
                _enter(names, part)
        found: dict[str, bytes | None] = {}
        for path in sorted(names):
            folder = str(PurePosixPath(path).parent)
            if folder != "." and found.get(folder, b"") is not None:
                continue  # its folder is not there
            inode = names[path]
            found[path] = None if inode is None else bytes(changed.get(inode, self._inodes[inode].data))
        return found


def _torn(event: Event) -> Iterator[Event]:
    """Yield the parts of an event that may be on the disk without each other: pages of a write, four at most."""
    if event.kind != "write" or len(event.data) <= _PAGE:
        yield event
        return
    pages = -(-len(event.data) // _PAGE)
    size = -(-pages // 4) * _PAGE
    for start in range(0, len(event.data), size):
        yield replace(event, offset=event.offset + start, data=event.data[start : start + size])


def _folders(event: Event) -> set[str]:
    """Return the folders an fsync of any of which makes a change of a name durable."""
    if event.kind in ("write", "truncate"):
        return set()
    paths = [event.path, event.target] if event.kind == "rename" else [event.path]
    return {str(PurePosixPath(path).parent) for path in paths}


def _enter(names: dict[str, int | None], part: _Part) -> None:
    match part.event.kind:
        case "create":
            names[part.event.path] = part.inode
        case "mkdir":
            names[part.event.path] = None
        case "rename":
            names.pop(part.event.path, None)
            names[part.event.target] = part.inode if part.inode >= 0 else None
        case _:
            names.pop(part.event.path, None)


def _rename(names: dict[str, int | None], event: Event) -> None:
    names[event.target] = names.pop(event.path)
    for path in [path for path in names if path.startswith(event.path + "/")]:
        names[event.target + path[len(event.path) :]] = names.pop(path)


def _change(data: bytearray, event: Event) -> None:
    if event.kind == "truncate":
        del data[event.offset :]
        data.extend(bytes(event.offset - len(data)))
        return
    data.extend(bytes(max(0, event.offset - len(data))))
    data[event.offset : event.offset + len(event.data)] = event.data


class _Reader:
    """Reads what strace wrote."""

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        self._folder = str(folder)
        self._synchronous: set[str] = set()
        self._appending: set[str] = set()
        self._places: dict[str, int] = {}
        self._sizes = sizes

    def read(self, log: str) -> Iterator[Event]:
        """Yield the events of a log."""
        begun: dict[str, str] = {}
        for line in log.splitlines():
            if match := _UNFINISHED.match(line):
                begun[match["pid"]] = match["begin"]
                continue
            if match := _RESUMED.match(line):
                line = f"{match['pid']} {begun.pop(match['pid'])}{match['end']}"
            match = _LINE.match(line)
            if match is not None and int(match["result"]) >= 0:
                yield from self._events(match["call"], match["arguments"], int(match["result"]), match["rest"])

    def _events(self, call: str, arguments: str, result: int, rest: str) -> Iterator[Event]:
        texts = [bytes.fromhex(text.replace("\\x", "")) for text, _ in _TEXT.findall(arguments)]
        descriptors = [(number, _unescaped(path)) for number, path in _DESCRIPTOR.findall(arguments)]
        if call in ("write", "pwrite64", "writev", "pwritev", "pwritev2"):
            path = self._inside(descriptors[0][1])
            if path is not None:
                yield self._write(call, path, descriptors[0][0], texts, arguments, result)
        elif call in ("fsync", "fdatasync"):
            path = self._inside(descriptors[0][1])
            if path is not None:
                yield Event("flush" if path in self._sizes else "flush names", path)
        elif call == "ftruncate":
            path = self._inside(descriptors[0][1])
            if path is not None:
                self._sizes[path] = int(arguments.rpartition(",")[2])
                yield Event("truncate", path, self._sizes[path])
        elif call == "lseek":
            self._places[descriptors[0][0]] = result
        elif call in ("open", "openat", "creat"):
            yield from self._opened(call, arguments, texts, descriptors, result, rest)
        elif call in ("rename", "renameat", "renameat2"):
            bases = [path for _, path in descriptors]
            source, target = (self._named(text, bases[i : i + 1]) for i, text in enumerate(texts[:2]))
            if source is not None and target is not None:
                if source in self._sizes:
                    self._sizes[target] = self._sizes.pop(source)
                yield Event("rename", source, target=target)
            elif source is not None or target is not None:
                raise RecordError("a file is moved into the folder, or out of it")
        elif call in ("unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"):
            path = self._named(texts[0], [path for _, path in descriptors])
            if path is not None:
                self._sizes.pop(path, None)
                yield Event("mkdir" if call.startswith("mkdir") else "remove", path)
        elif call in _UNKNOWN:
            paths = [self._inside(path) for _, path in descriptors] + [self._named(text, []) for text in texts]
            if any(path is not None for path in paths):
                raise RecordError(f"{call} of {paths} is not known here")

    def _write(self, call: str, path: str, descriptor: str, texts: list[bytes], arguments: str, result: int) -> Event:
        data = b"".join(texts)[:result]
        if len(data) != result:
            raise RecordError(f"of {result} bytes that were written, {len(data)} were recorded")
        if call in ("write", "writev"):
            offset = self._sizes[path] if descriptor in self._appending else self._places.get(descriptor, 0)
            self._places[descriptor] = offset + result
        else:
            # After the data: how many bytes or pieces, and where.
            numbers = arguments.rpartition('"' if call == "pwrite64" else "]")[2]
            offset = int(re.findall(r"-?\d+", numbers)[1])
        self._sizes[path] = max(self._sizes.get(path, 0), offset + result)
        return Event("write", path, offset, data, durable=descriptor in self._synchronous)

    def _opened(
        self,
        call: str,
        arguments: str,
        texts: list[bytes],
        descriptors: list[tuple[str, str]],
        result: int,
        rest: str,
    ) -> Iterator[Event]:
        path = self._named(texts[0], [path for _, path in descriptors])
        flags = set(re.findall(r"O_\w+", arguments))
        (self._synchronous.add if flags & {"O_SYNC", "O_DSYNC"} else self._synchronous.discard)(str(result))
        (self._appending.add if "O_APPEND" in flags else self._appending.discard)(str(result))
        self._places[str(result)] = 0
        if path is None:
            return
        if path not in self._sizes and (call == "creat" or "O_CREAT" in flags):
            self._sizes[path] = 0
            yield Event("create", path)
        elif call == "creat" or "O_TRUNC" in flags:
            self._sizes[path] = 0
            yield Event("truncate", path)

    def _named(self, text: bytes, bases: list[str]) -> str | None:
        return self._inside(os.path.normpath(os.path.join(bases[0] if bases else "/", os.fsdecode(text))))

    def _inside(self, path: str) -> str | None:
        path = path.removesuffix(" (deleted)").removesuffix("(deleted)")
        if path == self._folder:
            return "."
        return path[len(self._folder) + 1 :] if path.startswith(self._folder + "/") else None


def _unescaped(text: str) -> str:
    return os.fsdecode(re.sub(rb"\\x([0-9a-f]{2})", lambda m: bytes.fromhex(m[1].decode()), os.fsencode(text)))
