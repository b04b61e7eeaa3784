"""Measure FUSE bindings for Python against each other: one file in memory, read through a real mount.

    python benchmarks/fuse_bindings.py [--size-mib 1024] [--runs 5] [--readahead-kib 0] [--wait-us 0]

Needs root (it drops the kernel's caches), /dev/fuse, mfusepy and, to be compared, pyfuse3; a binding that is
not installed is left out. `--wait-us` makes every read wait, as it would while a block is decoded without the
interpreter lock: it shows how many reads a binding keeps in flight. The runs of the bindings alternate, so
that a slow minute of the machine hits both.
"""

from __future__ import annotations

import argparse
import errno
import mmap
import multiprocessing
import os
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20
NAME = "data.bin"
BINDINGS = ("mfusepy", "pyfuse3")


# --- the two servers: the same file, the same kernel options --------------------------------------


def content(size: int) -> bytes:
    """Return `size` bytes that do not compress to nothing and differ from page to page."""
    return (os.urandom(8 * MIB) * (size // (8 * MIB) + 1))[:size]


def serve_mfusepy(directory: str, size: int, wait: float) -> None:
    """Serve the file until it is unmounted, on libfuse's own threads."""
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    import mfusepy

    data = content(size)

    class Files(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True
        flag_nopath = True
        flag_nullpath_ok = True

        def getattr(self, path: str | None, fh: int | None = None) -> dict[str, int]:
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o555, "st_nlink": 2}
            if path not in (None, "/" + NAME):
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            return {"st_mode": stat.S_IFREG | 0o444, "st_nlink": 1, "st_size": size}

        def open(self, path: str, flags: int) -> int:
            return 1

        def read(self, path: str | None, length: int, offset: int, fh: int) -> bytes:
            if wait:
                time.sleep(wait)
            return data[offset : offset + length]

    mfusepy.FUSE(Files(), directory, foreground=True, kernel_cache=True, ro=True)


def serve_pyfuse3(directory: str, size: int, wait: float) -> None:
    """Serve the file until it is unmounted, on pyfuse3's event loop."""
    import pyfuse3
    import trio

    data = content(size)

    class Files(pyfuse3.Operations):  # type: ignore[misc]
        async def getattr(self, inode: int, ctx: Any = None) -> Any:
            entry = pyfuse3.EntryAttributes()
            entry.st_ino = inode
            folder = inode == pyfuse3.ROOT_INODE
            entry.st_mode = stat.S_IFDIR | 0o555 if folder else stat.S_IFREG | 0o444
            entry.st_size = 0 if folder else size
            return entry

        async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> Any:
            if name != NAME.encode():
                raise pyfuse3.FUSEError(errno.ENOENT)
            return await self.getattr(pyfuse3.ROOT_INODE + 1)

        async def open(self, inode: int, flags: int, ctx: Any) -> Any:
            return pyfuse3.FileInfo(fh=inode, keep_cache=True)

        async def read(self, fh: int, offset: int, length: int) -> bytes:
            if wait:
                # Waiting in the event loop would hold up every other reader.
                await trio.to_thread.run_sync(time.sleep, wait)
            return data[offset : offset + length]

    pyfuse3.init(Files(), directory, {*pyfuse3.default_options, "ro"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


# --- the readers: they touch every byte or page and return the seconds they took ------------------


def read_range(path: Path, start: int, stop: int) -> None:
    """Read [start, stop) in 1 MiB calls into one buffer."""
    buffer = bytearray(MIB)
    with path.open("rb", buffering=0) as file:
        for offset in range(start, stop, MIB):
            os.preadv(file.fileno(), [buffer], offset)


def read_all(path: Path) -> None:
    """One sequential reader."""
    read_range(path, 0, path.stat().st_size)


def fault_all(path: Path) -> None:
    """Map the file and touch every page, as a loader of safetensors does."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        view = memoryview(pages)
        sum(view[:: mmap.PAGESIZE])
        view.release()


def read_halves(path: Path) -> None:
    """Two processes, each reading one half."""
    size = path.stat().st_size
    fork = multiprocessing.get_context("fork")
    halves = ((0, size // 2), (size // 2, size))
    readers = [fork.Process(target=read_range, args=(path, *half)) for half in halves]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
        if reader.exitcode:
            raise RuntimeError("a reader failed")


READERS: dict[str, Callable[[Path], None]] = {
    "read 1 MiB": read_all,
    "mmap faults": fault_all,
    "2 readers": read_halves,
}


def seconds(reader: Callable[[Path], None], path: Path, *, cold: bool) -> float:
    """Time one reader, with empty or filled page cache."""
    if cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    start = time.perf_counter()
    reader(path)
    return time.perf_counter() - start


# --- running both and printing --------------------------------------------------------------------


class Mounted:
    """One binding's server as a process of its own, from mount to umount."""

    def __init__(self, binding: str, size: int, readahead_kib: int, wait_us: int) -> None:
        self.directory = tempfile.mkdtemp(prefix=f"fuse-{binding}-")
        command = [sys.executable, __file__, "--serve", binding, self.directory]
        self.process = subprocess.Popen([*command, "--size-mib", str(size // MIB), "--wait-us", str(wait_us)])
        self.path = Path(self.directory, NAME)
        while not self.path.exists():
            if self.process.poll() is not None:
                raise RuntimeError(f"{binding} did not mount")
            time.sleep(0.05)
        if readahead_kib:
            device = os.stat(self.directory).st_dev
            knob = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
            knob.write_text(f"{readahead_kib}\n")

    def close(self) -> None:
        """Unmount and wait for the server."""
        subprocess.run(["fusermount3", "-u", self.directory], check=True)
        self.process.wait(60)
        os.rmdir(self.directory)


def installed(binding: str) -> bool:
    """Tell whether a binding can be imported, without importing it here."""
    probe = [sys.executable, "-c", f"import {binding}"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def measure(size: int, runs: int, readahead_kib: int, wait_us: int) -> None:
    """Alternate the bindings, then print median (least to most) GB/s of each."""
    bindings = [b for b in BINDINGS if installed(b)]
    speeds: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(runs):
        for binding in bindings:
            mounted = Mounted(binding, size, readahead_kib, wait_us)
            try:
                for name, reader in READERS.items():
                    for cache in ("cold", "warm"):
                        took = seconds(reader, mounted.path, cold=cache == "cold")
                        speeds.setdefault((name, cache, binding), []).append(size / took / 1e9)
            finally:
                mounted.close()
    readahead = f"{readahead_kib} KiB" if readahead_kib else "the kernel's default"
    print(f"{size // MIB} MiB, {runs} runs, readahead {readahead}, wait {wait_us} us a read")
    print("GB/s: median (least to most)\n")
    print("| reader | cache |" + "".join(f" {b} |" for b in bindings))
    print("| --- | --- |" + " --- |" * len(bindings))
    for name in READERS:
        for cache in ("cold", "warm"):
            cells = (speeds[name, cache, b] for b in bindings)
            texts = (f" {statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f}) |" for c in cells)
            print(f"| {name} | {cache} |" + "".join(texts))


def main() -> None:
    """Measure, or serve one binding when called back with --serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--readahead-kib", type=int, default=0, help="the mount's readahead (0: leave it)")
    parser.add_argument("--wait-us", type=int, default=0, help="let every read wait so long")
    parser.add_argument("--serve", nargs=2, metavar=("BINDING", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = arguments.size_mib * MIB
    if not arguments.serve:
        measure(size, arguments.runs, arguments.readahead_kib, arguments.wait_us)
    elif arguments.serve[0] == "mfusepy":
        serve_mfusepy(arguments.serve[1], size, arguments.wait_us / 1e6)
    else:
        serve_pyfuse3(arguments.serve[1], size, arguments.wait_us / 1e6)


if __name__ == "__main__":
    main()
