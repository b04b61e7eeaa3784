"""The measurements behind spec/decisions: hash, zstd level and block size.

python -m benchmarks.choices DIR        DIR holds base/ and expert-0/, as tools/synth makes them
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import blake3
import numpy as np
from numcodecs import zstd

from mergefs.blocks import codecs
from mergefs.checkpoint.directory import open_checkpoint
from mergefs.dtypes import DTYPES
from mergefs.repository import Repository

SIZES = (256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)


def best(action: Callable[[], object], size: int, times: int = 20) -> float:
    """Return the best rate of several runs in GB/s for `size` bytes a run."""
    found = 0.0
    for _ in range(times):
        began = time.perf_counter()
        action()
        found = max(found, size / (time.perf_counter() - began) / 1e9)
    return found


def hashes() -> None:
    """Print the hashes' rates on 1 MiB blocks."""
    data = os.urandom(1 << 20)
    candidates: dict[str, Callable[[], object]] = {
        "BLAKE3": lambda: blake3.blake3(data).digest(),
        "SHA-256": lambda: hashlib.sha256(data).digest(),
        "BLAKE2b": lambda: hashlib.blake2b(data, digest_size=32).digest(),
    }
    for name, action in candidates.items():
        print(f"hash {name:8} {best(action, len(data)):6.2f} GB/s on one core")


def levels(root: Path) -> None:
    """Print size and rate of zstd levels on the byte planes of a matrix's delta."""
    base, expert = (_matrix(root / name) for name in ("base", "expert-0"))
    planes = codecs._difference(expert, base, DTYPES["BF16"])
    for level in (1, 2, 3, 6, 9):
        payload = zstd.compress(planes, level)
        out = np.empty(planes.size, np.uint8)
        rate = best(lambda level=level: zstd.compress(planes, level), planes.size, 5)
        back = best(lambda payload=payload, out=out: zstd.decompress(payload, out), planes.size, 5)
        print(
            f"zstd level {level}: {len(payload) / planes.size:.4f} of raw, encodes {rate:.2f}, decodes {back:.2f} GB/s"
        )


def block_sizes(root: Path) -> None:
    """Print what block sizes cost: stored bytes, time of ingest and of a read of everything."""
    for size in SIZES:
        folder = Path(tempfile.mkdtemp(dir=root.parent))
        try:
            with Repository.init(folder / "repo", size) as repository:
                base = repository.ingest(root / "base", "base")
                expert = repository.ingest(root / "expert-0", "expert", base="base")
                began = time.perf_counter()
                with repository.view("expert") as view:
                    for path in view.files:
                        for _ in view.blocks(path):
                            pass
                seconds = time.perf_counter() - began
            catalog = sum(p.stat().st_blocks * 512 for p in (folder / "repo" / "catalog").iterdir())
            print(
                f"blocks of {size >> 10:4} KiB: base {base.stored_bytes / base.raw_bytes:.4f}, expert"
                f" {expert.stored_bytes / expert.raw_bytes:.4f} of raw, {expert.blocks_new} blocks, ingest"
                f" {expert.seconds:.1f} s, read {seconds:.1f} s, catalog {catalog / 1e6:.1f} MB"
            )
        finally:
            shutil.rmtree(folder)


def _matrix(folder: Path) -> bytes:
    _, entry = next(
        (file, entry)
        for file, entry in open_checkpoint(folder).tensors.values()
        if entry.name.endswith("mlp.up_proj.weight")
    )
    with open(folder / "model.safetensors", "rb") as file:
        file.seek(entry.start)
        return file.read(1 << 20)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    root = parser.parse_args().models
    hashes()
    levels(root)
    block_sizes(root)


if __name__ == "__main__":
    main()
