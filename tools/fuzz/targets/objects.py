"""What repositories and archives consist of: manifests, plans, packs' tables, configurations, refs, sessions."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import struct
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergefs import canonical
from mergefs.blocks.pack import PackWriter, read_table
from mergefs.configuration import CONFIG, read_config
from mergefs.dtypes import DTYPES
from mergefs.edit import folders
from mergefs.edit.keys import Keys
from mergefs.edit.tree import Tree
from mergefs.hashing import digest, hex_digest
from mergefs.manifest import (
    Blob,
    Difference,
    FileRecipe,
    Lineage,
    LowRank,
    Manifest,
    Tensor,
    TensorData,
)
from mergefs.manifest import decode as decode_manifest
from mergefs.planner.older import as_now
from mergefs.planner.plan import Numbers, Plan, TensorPlan
from mergefs.planner.plan import decode as decode_plan
from mergefs.refs import decode_ref_copy, encode_ref_copy
from mergefs.repository import Repository
from mergefs.statistics.tensor import TensorStatistics
from mergefs.transfer.archive import Archive
from tools.fuzz.mutate import canonical_json, change_bytes, change_json, lines
from tools.fuzz.target import Run, Target

IDS = [f"{n:02x}" * 32 for n in range(8)]


def scratch() -> Path:
    """Return a new folder, in memory where there is a file system in it; it goes when the process ends."""
    folder = tempfile.mkdtemp(prefix="mergefs-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _tensor(name: str, shape: tuple[int, ...], blocks: int, dtype: str = "BF16", **more: Any) -> Tensor:
    return Tensor(name, DTYPES[dtype], shape, tuple(IDS[i % 8] for i in range(blocks)), **more)


def manifests() -> list[Manifest]:
    """Return one of each kind."""
    tensors = (_tensor("a.weight", (4, 600), 4), _tensor("b", (), 1, "F32"), _tensor("c", (0, 3), 0, "U8"))
    segments = (Blob(IDS[0], 64), *(TensorData(tensor.name) for tensor in tensors))
    weights = FileRecipe("model.safetensors", 64 + 4800 + 4, None, segments)
    config = FileRecipe("config.json", 12, IDS[1], (Blob(IDS[2], 12),))
    nested = FileRecipe("sub/dir/note.txt", 0, IDS[1], ())
    files = (config, weights, nested)
    low = LowRank(_tensor("d", (2, 600), 2), _tensor("u", (4, 2), 1), 0.5, _tensor("m", (4,), 1), False)
    lazy = (Tensor("a.weight", DTYPES["BF16"], (4, 600), (None, IDS[1], None, IDS[3])), *tensors[1:])
    merge = Lineage("merge", IDS[4], IDS[5], (IDS[6], IDS[7]))
    return [
        Manifest(600, files, tensors, Lineage("checkpoint")),
        Manifest(600, files, lazy, merge),
        Manifest(600, files, lazy, Lineage("edit", IDS[4], IDS[5], (IDS[6],), (IDS[1], IDS[2]), parent=IDS[3])),
        Manifest(600, (config,), (), Lineage("edit", parent=IDS[3])),
        Manifest(600, (), (_tensor("a", (4, 600), 4, added=low),), Lineage("fitted", sources=(IDS[1], IDS[2]))),
        Manifest(
            600, (), (_tensor("a", (9,), 1, added=Difference(_tensor("a", (9,), 1))),), Lineage("fitted", sources=())
        ),
    ]


def _manifest() -> Run:
    def run(data: bytes) -> None:
        found = decode_manifest(data)
        again = Manifest(found.block_elements, found.files, found.tensors, found.lineage)
        assert again.encoded == data, "it was accepted and means something else"
        assert found.id == hex_digest(data)
        assert sum(1 for _ in found.block_ids()) <= len(data)
        for tensor in found.tensors:
            grid = tensor.grid(found.block_elements)
            if len(grid):
                assert grid.extent(len(grid) - 1)[1] == tensor.elements

    return run


def plans() -> list[Plan]:
    """Return a plan of a method with everything, and a bare one."""
    numbers = (Numbers(({"weight": 0.5, "density": 0.2}, {"weight": 1.0, "density": 1.0}), {"normalize": True}),)
    tensors = (
        TensorPlan("a.weight", ("1290", "0000"), (0.1, 0.0), 0, (), (float("inf"), 1.0)),
        TensorPlan("b", ("9", "9"), (), 0, (1.0, 0.5, 0.5)),
    )
    tokenizer = (FileRecipe("tokenizer.json", 3, None, (Blob(IDS[1], 3),)),)
    return [
        Plan("ties", IDS[0], (IDS[1], IDS[2]), False, numbers, "F32", 7, 4096, tensors, "merge_method: ties\n"),
        Plan("linear", IDS[0], (IDS[0],), True, (), None, 0, None, (), "", (IDS[1],), tokenizer, "{{ x }}"),
    ]


def _plan() -> Run:
    def run(data: bytes) -> None:
        found = decode_plan(data)
        again = Plan(**{field: getattr(found, field) for field in Plan.__dataclass_fields__})
        if again.encoded != data:
            value = canonical.decode(data)
            assert as_now(value) is not value, "it was accepted and means something else"
            assert decode_plan(again.encoded) == found
        for tensor in found.tensors:
            mine = found.numbers_of(tensor)
            assert len(mine.weights) == len(mine.densities) == len(found.experts) == len(tensor.depths)
            for block in range(min(map(len, tensor.depths), default=0)):
                assert all(tensor.depth(expert, block) >= 0 for expert in tensor.planned(block))

    return run


def _canonical() -> Run:
    def run(data: bytes) -> None:
        assert canonical.encode(canonical.decode(data)) == data

    return run


_FOOTER = struct.Struct("<QII32s8s")


def _pack_seeds() -> list[bytes]:
    folder = scratch()
    found = []
    for count in (0, 1, 5):
        path = folder / str(count)
        with PackWriter(path, sync=False) as writer:
            for number in range(count):
                payload = bytes([number]) * (10 + number)
                writer.append(digest(payload), payload, raw_length=2 * number, encoding=number, dtype=9)
            writer.append(
                digest(b"t"), b"payload", raw_length=16, encoding=4, dtype=9, base=digest(b"b"), tier=1, tiers=4
            )
            writer.finish()
        found.append(path.read_bytes())
    shutil.rmtree(folder)
    return found


def _pack() -> Run:
    def run(data: bytes) -> None:
        for record in read_table("it.pack", len(data), lambda at, size: data[at : at + size]):
            assert 8 <= record.offset <= record.offset + record.length <= len(data)
            assert record.pack() and record.tier < record.tiers

    return run


def _pack_mutate(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
    if len(data) < 64 or rng.randrange(6) == 0:
        return change_bytes(rng, data, kept)
    start = min(_FOOTER.unpack(data[-56:])[0], len(data) - 56)
    table = change_bytes(rng, data[start:-56], [other[8:] for other in kept[:8]])
    if rng.randrange(3):
        table = table[: len(table) // 100 * 100]
    payloads = data[:start]
    claimed = rng.choice((start, start, start, max(0, start - 1), start + 100, 2**63))
    footer = _FOOTER.pack(
        claimed, len(table) // 100 if rng.randrange(8) else rng.choice((0, 2**32 - 1)), 0, digest(table), b"mfsends1"
    )
    return payloads + table + footer


def _config_seeds() -> list[bytes]:
    # Of version 1: what is changed in one of version 2 is refused for its check.
    config = {
        "format": "mergefs-repository",
        "version": 1,
        "hash": "blake3",
        "block_size": 4096,
        "block_elements": 2048,
    }
    return [
        json.dumps({**config, "exact": "fast", "created": "2026-01-01T00:00:00Z"}).encode(),
        json.dumps(config).encode(),
    ]


def _config() -> Run:
    folder = scratch()

    def run(data: bytes) -> None:
        (folder / CONFIG).write_bytes(data)
        found = read_config(folder, oldest=1)
        assert found["block_elements"] >= 1 and found["exact"]

    return run


def _archive_seeds() -> list[bytes]:
    return [json.dumps({"format": "mergefs-archive", "version": 1, "block_elements": 2048, "created": 1.5}).encode()]


def _archive() -> Run:
    folder = scratch()

    def run(data: bytes) -> None:
        (folder / "mergefs-archive.json").write_bytes(data)
        assert Archive(f"file://{folder}").block_elements >= 1

    return run


def _ref_seeds() -> list[bytes]:
    entry = {"manifest": IDS[1], "time": 1.5, "previous": None, "about": {"raw_bytes": 7, "base": IDS[2]}}
    return [encode_ref_copy(entry), encode_ref_copy({**entry, "previous": IDS[3]})]


def _ref() -> Run:
    def run(data: bytes) -> None:
        found = decode_ref_copy(data)
        bytes.fromhex(found["manifest"])
        found["previous"], found["time"], dict(found.get("about", {}))

    return run


def _ref_mutate(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
    line = change_json(rng, data.partition(b"\n")[0], ()).replace(b"\n", b"")
    if rng.randrange(8) == 0:
        return change_bytes(rng, data, kept)
    return line + b"\n" + hex_digest(line).encode() + b"\n"


# -- sessions ----------------------------------------------------------------------------------------------------

_FILES = {"config.json": 30, "model.safetensors": 200_000, "sub/a.txt": 5, "empty": 0}


def _base(path: str, offset: int, size: int) -> bytes:
    return bytes(max(0, min(size, _FILES[path] - offset)))


def _journal_seeds() -> list[bytes]:
    folder = scratch()
    tree = Tree(folder, _FILES, 1, _base, sync=False)
    first = (folder / "journal").read_bytes()
    file = tree.create("new.txt")
    file.write(0, b"x" * 100)
    tree.make_folder("more")
    tree.rename("sub/a.txt", "more/a.txt")
    tree.file("model.safetensors").write(70_000, b"y" * 10)
    tree.file("model.safetensors").truncate(150_000)
    tree.remove("empty")
    tree.set_mode("new.txt", 0o600)
    tree.set_time("new.txt", 5)
    other = tree.anonymous()
    other.write(0, b"z")
    tree.place(other, "config.json")
    second = (folder / "journal").read_bytes()
    tree.close()
    shutil.rmtree(folder)
    return [first, second]


def _journal() -> Run:
    folder = scratch()

    def run(data: bytes) -> None:
        shutil.rmtree(folder / "data", ignore_errors=True)
        (folder / "journal").write_bytes(data)
        tree = Tree(folder, _FILES, 1, _base, sync=False)
        try:
            for path, file in tree.files().items():
                assert not path.startswith("/") and ".." not in path.split("/")
                file.read(0, 10)
                file.read(max(0, file.size - 10), 20)
                file.is_unchanged(0, 10)
            tree.children("")
            assert tree.is_changed in (True, False)
        finally:
            tree.close()
        assert all(path.name in ("data", "journal") for path in folder.iterdir())

    return run


def _checked(line: bytes) -> bytes:
    """Give a line of a journal its checksum."""
    text = line.partition(b" ")[2] or line
    text = text.replace(b"\n", b" ")
    return b"%08x %s" % (zlib.crc32(text), text)


def _journal_change(rng: random.Random, line: bytes, kept: Sequence[bytes]) -> bytes:
    check, _, text = line.partition(b" ")
    return check + b" " + change_json(rng, text, ())


def _session_seeds() -> list[bytes]:
    found = {"format": "mergefs-session", "version": 1, "manifest": IDS[1], "ref": "x", "created": 1.5}
    return [json.dumps(found).encode(), json.dumps({**found, "ref": None}).encode()]


def _session() -> Run:
    folder = scratch() / "repository"
    store = Repository.init(folder, 4096)
    session = folder / "sessions" / "0123456789ab"
    session.mkdir(parents=True)

    def run(data: bytes) -> None:
        for name in ("session.json", "mounted.json", "result.json"):
            (session / name).write_bytes(data)
        info = folders.read(store, "0123456789ab")
        list(folders.sessions(store))
        try:
            folders.check_commit(store, info, None, force=True)
        finally:
            folders.check_commit(store, info, "good", force=False)

    return run


def _keys_seeds() -> list[bytes]:
    key = b"model/weight/zarr.json"
    return [kind + len(key).to_bytes(4, "little") + key + b"value" for kind in (b"=", b"-")]


def _keys() -> Run:
    folder = scratch() / "keys"
    folder.mkdir()

    def run(data: bytes) -> None:
        stop = 5 + int.from_bytes(data[1:5], "little")
        path = folder / hex_digest(data[5:stop])
        path.write_bytes(data)
        try:
            keys = Keys(folder)
            for key in keys.given:
                assert keys.get(key) is not None and keys.size(key) is not None
            assert bool(keys) in (True, False)
        finally:
            path.unlink(missing_ok=True)

    return run


def _statistics_seeds() -> list[bytes]:
    import numpy as np

    from mergefs.statistics.tensor import BLOCK, SKETCH_SIZE, TIERS, Distribution

    rows, sketches = np.zeros(3, BLOCK), np.zeros((2, SKETCH_SIZE), "<u2")
    few = np.arange(1, 4, dtype=np.uint16)
    distribution = Distribution(few[:, None].repeat(TIERS, 1), few, few, few, few, few.astype(np.float32))
    return [
        TensorStatistics(100, rows, sketches, (0, 0, 0), b"").encode(),
        TensorStatistics.make(1 << 33, rows, sketches[:0], distribution).encode(),
        TensorStatistics.make(100, rows, sketches, distribution).encode(),
    ]


def _statistics() -> Run:
    def run(data: bytes) -> None:
        found = TensorStatistics.decode(data)
        assert found is None or found.distribution is not None

    return run


TARGETS = (
    Target("manifest", lambda: [m.encoded for m in manifests()], _manifest, canonical_json, 40),
    Target("plan", lambda: [p.encoded for p in plans()], _plan, canonical_json, 20),
    Target("canonical-json", lambda: [m.encoded for m in manifests()], _canonical, canonical_json, 30),
    Target("pack-table", _pack_seeds, _pack, _pack_mutate, 90),
    Target("repository-config", _config_seeds, _config, change_json, 25),
    Target("archive-config", _archive_seeds, _archive, change_json, 20),
    Target("ref-copy", _ref_seeds, _ref, _ref_mutate, 40),
    Target("journal", _journal_seeds, _journal, lines(_journal_change, _checked), 15),
    Target("session", _session_seeds, _session, change_json, 20),
    Target("session-keys", _keys_seeds, _keys, change_bytes, 40),
    Target("statistics", _statistics_seeds, _statistics, change_bytes, 120),
)
