"""The binding to libfuse, with the two operations that its own way costs much: reading and listing."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

from mergefs.errors import MountError

_READDIR_PLUS = 1
_FILL_PLUS = 2


def load_binding() -> type[Any]:
    """Return mfusepy's FUSE class, made fit.

    Raises:
        MountError: when mfusepy or libfuse 3 is missing.
    """
    # With both libraries there, mfusepy would take libfuse 2, which knows other options.
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    try:
        import mfusepy
    except ImportError as error:
        raise MountError("mfusepy is missing: pip install 'mergefs[mount]'") from error
    except OSError as error:
        raise MountError("libfuse3 is missing: apt install fuse3") from error

    class Binding(mfusepy.FUSE):  # type: ignore[misc]
        """Calls `read_into` and `entries` of the operations."""

        def read(self, path: Any, buffer: Any, size: int, offset: int, info: Any) -> int:
            """Copy what is read from the blocks straight to libfuse's buffer."""
            pieces = self.operations.read_pieces(size, offset, info.contents.fh)
            place = ctypes.cast(buffer, ctypes.c_void_p).value or 0
            # numpy copies without the interpreter's lock.
            target = np.frombuffer((ctypes.c_ubyte * size).from_address(place), np.uint8)
            at = 0
            for piece in pieces:
                target[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
            return at

        def readdir_fuse_3(self, path: Any, buffer: Any, fill: Any, offset: int, info: Any, flags: int) -> int:
            """List a folder, with all attributes where the kernel wants them too: it need not ask for each then."""
            for name, attributes, complete in self.operations.entries(info.contents.fh):
                status = mfusepy.c_stat()
                mfusepy.set_st_attrs(status, attributes, use_ns=True)
                plus = _FILL_PLUS if complete and flags & _READDIR_PLUS else 0
                if fill(buffer, os.fsencode(name), status, 0, plus):
                    break
            return 0

    return Binding
