"""What mergefs has mounted where, as the kernel and the serving processes tell it."""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FILE_SYSTEM = "mergefs"
STATE = "user.mergefs.mount"
"""The extended attribute of a mount's own folder that says how it is doing."""

_MOUNT_TABLE = Path("/proc/self/mountinfo")
_TYPE = f"fuse.{FILE_SYSTEM}"
_SOURCE = re.compile(rf"{FILE_SYSTEM}:(\d+)")
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Mounted:
    """One line of the kernel's mount table.

    Attributes:
        device: major and minor number, as in `/sys/class/bdi`.
        type: of the file system.
        source: what it says it is mounted from.
        options: of the file system.
    """

    device: str
    type: str
    source: str
    options: str

    @property
    def pid(self) -> int | None:
        """The process that a mergefs mount says it is served by; None for other mounts."""
        match = _SOURCE.fullmatch(self.source) if self.type == _TYPE else None
        return int(match[1]) if match else None


@dataclass(frozen=True)
class MountState:
    """A mergefs mount, and how it is doing.

    Attributes:
        directory: where.
        pid: the process that serves it.
        user: who mounted it.
        state: `serving`; `stale` when its process is gone; `silent` when it does not answer this user.
        since: in seconds since 1970.
        repository: the folder that it is of.
        ref: the model as it was named, or None where everything is mounted.
        manifest: of that model.
        bytes_served: to the kernel; what the kernel had in its cache is not among them.
        cache: `hits`, `misses`, `ahead`, `bytes`, `limit`; see `mergefs.serve.cache.CacheFigures`.
        read: bytes read from packs: `expert`, `base`, `metadata`.
    """

    directory: Path
    pid: int
    user: str
    state: str
    since: float | None = None
    repository: str | None = None
    ref: str | None = None
    manifest: str | None = None
    bytes_served: int | None = None
    cache: dict[str, int] | None = None
    read: dict[str, int] | None = None


_TOLD = frozenset(field.name for field in fields(MountState)) - {"directory", "pid", "user", "state"}


def mount_table() -> dict[Path, Mounted]:
    """Return what is mounted where; of several mounts on one folder, the topmost."""
    table = {}
    for line in os.fsdecode(_MOUNT_TABLE.read_bytes()).splitlines():
        before, _, after = line.partition(" - ")
        _, _, device, _, point, *_ = before.split(" ")
        kind, source, options, *_ = after.split(" ")
        table[Path(_unescaped(point))] = Mounted(device, kind, source, options)
    return table


def mergefs_at(point: Path) -> int | None:
    """Return the number of the process that the mergefs mount at `point` gives, or None when there is none."""
    mounted = mount_table().get(point)
    return None if mounted is None else mounted.pid


def is_stale(point: Path) -> bool:
    """Tell whether nobody answers for a mount any more: "Transport endpoint is not connected"."""
    try:
        os.statvfs(point)
    except PermissionError:
        return False  # another user's
    except OSError:
        return True
    return False


def mounts() -> list[MountState]:
    """Return every mergefs mount that this process can see."""
    return [_state(point, mounted, pid) for point, mounted in mount_table().items() if (pid := mounted.pid) is not None]


def _state(point: Path, mounted: Mounted, pid: int) -> MountState:
    user = _user(mounted.options)
    answers: list[dict[str, Any] | OSError] = []

    def ask() -> None:
        try:
            state: dict[str, Any] = json.loads(os.getxattr(point, STATE))
            if state.get("ref") is not None:
                state["manifest"] = os.getxattr(point, "user.mergefs.manifest").decode()
            answers.append(state)
        except OSError as error:
            answers.append(error)

    # A process that was stopped never answers.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    match answers:
        case [dict() as state]:
            # A mount of another version may say more, or less.
            known = {name: value for name, value in state.items() if name in _TOLD}
            return MountState(point, pid, user, "serving", **known)
        case [OSError(errno=errno.ENOTCONN | errno.ECONNABORTED)]:
            return MountState(point, pid, user, "stale")
        case [OSError(errno=errno.ENODATA | errno.EOPNOTSUPP)]:
            return MountState(point, pid, user, "serving")  # it keeps no such account
    return MountState(point, pid, user, "silent")


def _user(options: str) -> str:
    """Return who mounted, by name where it has one."""
    match = re.search(r"(?:^|,)user_id=(\d+)", options)
    if match is None:
        return "?"
    try:
        return pwd.getpwuid(int(match[1])).pw_name
    except KeyError:
        return match[1]


def _unescaped(text: str) -> str:
    """Undo the mount table's octal escapes of spaces and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
