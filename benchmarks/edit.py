"""Change one hundred rows of a tensor of a large model through a mount, and commit.

    python -m benchmarks.edit MODEL [--rows 100] [--tensor NAME] [--work DIR] [--json]

MODEL is a Hugging Face directory; it is ingested into a repository of its own below --work, which is removed in the
end. The rows are one run. The edit is done through a mount, by a program that writes into the safetensors file, with
`edit` and `commit` as commands whose whole time counts; and through Zarr in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mergefs.repository import Repository
from mergefs.units import format_size


def run(repository: Path, *arguments: str) -> tuple[dict[str, Any], float]:
    """Run a command; return what it reports, and its seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "mergefs", "-R", str(repository), *arguments, "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout), time.monotonic() - began


def patch(file: Path, tensor: str, rows: np.ndarray, value: float) -> None:
    """Write rows of a bf16 matrix in a safetensors file, as a program does that knows the format."""
    with open(file, "r+b") as opened:
        length = int.from_bytes(opened.read(8), "little")
        entry = json.loads(opened.read(length))[tensor]
        width = entry["shape"][1] * 2
        bits = (np.full(entry["shape"][1], value, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
        for row in rows:
            opened.seek(8 + length + entry["data_offsets"][0] + int(row) * width)
            opened.write(bits)


def through_mount(repository: Path, work: Path, tensor: str, rows: np.ndarray, value: float) -> dict[str, Any]:
    """Edit through a mount; return the times and what was stored."""
    at = work / "at"
    at.mkdir(exist_ok=True)
    _, mounting = run(repository, "edit", "base", str(at))
    began = time.monotonic()
    patch(next(at.glob("*.safetensors")), tensor, rows, value)
    writing = time.monotonic() - began
    report, committing = run(repository, "commit", str(at), "--as", "edited")
    return {"mount": mounting, "write": writing, "commit": committing, **_figures(report)}


def through_zarr(repository: Path, tensor: str, rows: np.ndarray, value: float) -> dict[str, Any]:
    """Edit through Zarr, in this process."""
    import zarr

    from mergefs.serve.zarr_store import array_path

    began = time.monotonic()
    with Repository.open(repository) as opened, opened.edit("base") as session:
        path = array_path(tensor, session.view.tensors)
        mounting = time.monotonic() - began
        began = time.monotonic()
        array = zarr.open_array(session.zarr(), path=path)
        array.oindex[rows] = np.asarray(value, array.dtype)
        writing = time.monotonic() - began
        began = time.monotonic()
        report = session.commit("edited")
    figures = {name: getattr(report, name) for name in ("stored_bytes", "blocks_new", "blocks_kept", "seconds")}
    return {"mount": mounting, "write": writing, "commit": time.monotonic() - began, **_figures(figures)}


def _figures(report: dict[str, Any]) -> dict[str, Any]:
    return {name: report[name] for name in ("stored_bytes", "blocks_new", "blocks_kept", "seconds")}


def _largest_matrix(repository: Path) -> str:
    with Repository.open(repository) as opened:
        manifest = opened.manifest(opened.resolve("base"))
    return max((t for t in manifest.tensors if len(t.shape) == 2), key=lambda t: t.nbytes).name


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--tensor", help="a bf16 matrix; by default the largest one")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.work is not None:
        Path(options.work).mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=options.work, prefix="edit-"))
    repository = work / "repository"
    try:
        Repository.init(repository).close()
        ingested, seconds = run(repository, "ingest", str(options.model), "--as", "base")
        tensor = options.tensor or _largest_matrix(repository)
        rows = np.arange(options.rows) + 1000
        results = {
            "mount": through_mount(repository, work, tensor, rows, 0.25),
            "zarr": through_zarr(repository, tensor, rows, 0.75),
        }
        manifest_bytes = _manifest_bytes(repository)
    finally:
        if os.path.ismount(work / "at"):
            subprocess.run(["fusermount3", "-uz", str(work / "at")], check=False)
        shutil.rmtree(work)
    value = {
        "raw_bytes": ingested["raw_bytes"],
        "ingest_seconds": seconds,
        "tensor": tensor,
        "rows": options.rows,
        "manifest_bytes": manifest_bytes,
        "results": results,
    }
    print(json.dumps(value) if options.json else report(value))


def _manifest_bytes(repository: Path) -> int:
    with Repository.open(repository) as opened:
        return len(opened.manifest(opened.resolve("edited")).encoded)


def report(value: dict[str, Any]) -> str:
    """Return the figures as a table."""
    lines = [
        f"{value['rows']} rows of {value['tensor']} in a model of {format_size(value['raw_bytes'])}"
        f" (ingested in {value['ingest_seconds']:.1f} s; its manifest has {format_size(value['manifest_bytes'])})",
        f"{'':8}{'open':>8}{'write':>8}{'commit':>8}  stored, of it blocks, new blocks, shared",
    ]
    for name, figures in value["results"].items():
        blocks = figures["stored_bytes"] - value["manifest_bytes"]
        lines.append(
            f"{name:8}{figures['mount']:7.2f}s{figures['write']:7.2f}s{figures['commit']:7.2f}s"
            f"  {format_size(figures['stored_bytes'])}, {format_size(blocks)}, {figures['blocks_new']},"
            f" {figures['blocks_kept']}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
