"""A whole archive of a stranger: pulled, looked at, read, exported."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergefs.blocks.pack import PackWriter, read_records
from mergefs.errors import MergefsError
from mergefs.hashing import hex_digest
from mergefs.inspection import show
from mergefs.repository import Repository
from mergefs.serve.fuse_tree import ModelTree
from mergefs.store import manifest_name
from tools.fuzz.mutate import change_json
from tools.fuzz.target import Run, Target
from tools.fuzz.targets.objects import scratch
from tools.fuzz.targets.places import small_repository

_PATHS = [
    "../out",
    "/out",
    "a/../../out",
    "model.safetensors/x",
    "CONFIG.JSON",
    "config.json\0",
    "a\nb",
    "\x1b[2J",
    "x" * 256,
    "é",
    ".",
    "",
    "a//b",
    "a" * 200,
]
_FIELDS = {
    "raw_length": 1 << 32,
    "encoding": 8,
    "dtype": 20,
    "tier": 5,
    "tiers": 6,
    "length": 1 << 20,
    "offset": 1 << 20,
}


def _seeds() -> list[bytes]:
    repository = small_repository()
    manifest = json.loads(repository.manifest(repository.resolve("m")).encoded)
    repository.close()
    return [json.dumps({"manifest": manifest, "records": []}).encode()]


def _run() -> Run:
    source = small_repository()
    place = scratch()
    source.push("m", f"file://{place}/archive")
    packs = [(path, read_records(path), path.read_bytes()) for path in (place / "archive" / "packs").glob("*/*.pack")]
    folder = place / "mine"
    mine = Repository.init(folder, 4096)
    mine.sync = False

    def run(data: bytes) -> None:
        try:
            value = json.loads(data)
            encoded = json.dumps(value["manifest"], sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
            changes = [(int(n), str(field), int(to)) for n, field, to in value["records"]]
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return
        identity = hex_digest(encoded)
        path = place / "archive" / manifest_name(identity)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded)
        _write_packs(packs, changes)
        outside = set(place.iterdir())
        try:
            mine.pull(identity, f"file://{place}/archive", as_="m", force=True)
            _use(mine, place)
        finally:
            path.unlink()
            assert set(place.iterdir()) == outside, "something was written outside"
            if "m" in mine.refs():
                mine.remove(["m"])
                mine.gc()

    return run


def _write_packs(packs: Sequence[tuple[Path, Any, bytes]], changes: Sequence[tuple[int, str, int]]) -> None:
    """Write the packs as they are, or with records that say something else."""
    number = 0
    for path, records, content in packs:
        path.unlink(missing_ok=True)
        if not changes:
            path.write_bytes(content)
            continue
        with PackWriter(path, sync=False) as writer:
            for record in records:
                payload = content[record.offset : record.offset + record.length]
                made = writer.append(record.block, payload, raw_length=1, encoding=0, dtype=1)
                told = record._replace(offset=made.offset)
                for which, field, to in changes:
                    if which == number and field in _FIELDS:
                        told = told._replace(**{field: to % _FIELDS[field]})
                writer.records[-1] = told._replace(check=made.check)
                number += 1
            writer.finish()


def _use(repository: Repository, place: Path) -> None:
    show(repository, "m")
    problems: list[Exception] = []
    with repository.view("m") as view:
        for path, info in view.files.items():
            try:
                assert len(view.read(path, 0, 1 << 16)) == min(info.size, 1 << 16)
                assert len(view.read(path, max(0, info.size - 100))) == min(info.size, 100)
            except MergefsError as error:
                problems.append(error)
        for name in view.tensors:
            try:
                view.tensor_bytes(name)
            except MergefsError as error:
                problems.append(error)
        try:
            ModelTree(view.manifest_id, view.files, 0.0)
        except MergefsError as error:
            problems.append(error)
    repository.fsck(read_data=True)
    out = place / "mine" / "tmp" / "out"
    try:
        for dtype, shard_size in ((None, None), ("float32", None), (None, 4000)):
            shutil.rmtree(out, ignore_errors=True)
            repository.export("m", out, dtype=dtype, shard_size=shard_size)
            assert all(path.resolve().is_relative_to(out) for path in out.rglob("*"))
    finally:
        shutil.rmtree(out, ignore_errors=True)
    if problems:
        raise problems[0]


def _mutate(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
    try:
        value = json.loads(data)
        manifest, records = value["manifest"], value["records"]
        for _ in range(1 << rng.randrange(2)):
            _change(rng, manifest, records)
        return json.dumps(value).encode()
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return data


def _change(rng: random.Random, manifest: dict[str, Any], records: list[Any]) -> None:
    files, tensors = manifest["files"], manifest["tensors"]
    file, tensor = rng.choice(files), rng.choice(tensors)
    blobs = [(f, s) for f in files for s in f["segments"] if "blob" in s]
    match rng.randrange(12):
        case 0:
            file["path"] = rng.choice(_PATHS)
            files.sort(key=lambda f: f["path"])
        case 1 | 2:
            owner, blob = rng.choice(blobs)
            size = rng.choice((1, 2, blob["size"] + 1, blob["size"] * 2, 1 << 20, 1 << 33, 1 << 50, 4096, 5000))
            owner["size"] += size - blob["size"]
            blob["size"] = size
        case 3:
            ids = [b for t in tensors for b in t["blocks"]] + [s["blob"] for _, s in blobs]
            if tensor["blocks"] and rng.randrange(2):
                tensor["blocks"][rng.randrange(len(tensor["blocks"]))] = rng.choice(ids)
            else:
                rng.choice(blobs)[1]["blob"] = rng.choice(ids)
        case 4:
            tensor["dtype"] = rng.choice(("BF16", "F32", "F64", "U8", "F8_E4M3"))
            _fit(manifest)
        case 5:
            tensor["shape"] = rng.choice(
                ([40, 100], [4000], [100, 40], [1, 40, 100], [1 << 40], [2, 1, 2000], [3999], [41, 100], [])
            )
            _fit(manifest)
        case 6:
            tensor["name"] = rng.choice(("x", "__metadata__", "\x1b[2J", "a\nb", "", "a" * 3000, "\u202e", "b"))
            for part in files:
                for segment in part["segments"]:
                    if "tensor" in segment:
                        segment["tensor"] = tensor["name"]
        case 7:
            file["sha256"] = rng.choice((None, "0" * 64))
        case 8 | 9:
            field = rng.choice(list(_FIELDS))
            records.append(
                [
                    rng.randrange(12),
                    field,
                    rng.choice((0, 1, 2, 3, 4, 8000, 4096, 100, (1 << 32) - 1, rng.randrange(_FIELDS[field]))),
                ]
            )
        case 10:
            manifest["lineage"] = rng.choice((
                {"kind": "edit", "parent": "0" * 64}, {"kind": "merge", "plan": "0" * 64, "base": None, "experts": []},
                {"kind": "fitted", "sources": []}, {"kind": "checkpoint"},
            ))  # fmt: skip
        case 11:
            changed = json.loads(change_json(rng, json.dumps(manifest).encode(), ()))
            manifest.clear()
            manifest.update(changed)


def _fit(manifest: dict[str, Any]) -> None:
    """Have a manifest's sizes add up."""
    from math import prod

    widths = {"BF16": 2, "F32": 4, "F64": 8, "U8": 1, "F8_E4M3": 1}
    sizes = {t["name"]: prod(t["shape"]) * widths[t["dtype"]] for t in manifest["tensors"]}
    for file in manifest["files"]:
        file["size"] = sum(s["size"] if "blob" in s else sizes[s["tensor"]] for s in file["segments"])


TARGETS = (Target("archive", _seeds, _run, _mutate, 1, (MergefsError,)),)
