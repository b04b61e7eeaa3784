"""Locks on files (flock), which the kernel drops when their process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_PATIENCE = 0.25
"""Seconds. Who asks whether a file is locked has a shared lock on it for a moment."""


def take(descriptor: int) -> bool:
    """Take the exclusive lock on an open file; tell whether that could be done, as no other process has it."""
    stop = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > stop:
                return False
            time.sleep(0.005)
        else:
            return True


def is_locked(path: Path) -> bool:
    """Tell whether a process holds the exclusive lock on a file; False where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
