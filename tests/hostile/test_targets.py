"""Every fuzz target for a moment, what fuzzing found before, and whether fuzzing finds anything."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from mergefs.errors import MergefsError
from tools.fuzz.__main__ import Campaign
from tools.fuzz.target import Target
from tools.fuzz.targets import TARGETS
from tools.fuzz.targets.texts import _header_seeds

INPUTS = Path(__file__).parent / "inputs"
SLOW = {"archive", "zarr-metadata", "recipe", "journal"}


def run_all(target: Target, inputs: list[bytes]) -> None:
    """Run inputs, of which each has to be accepted or refused as the target says."""
    run = target.prepare()
    for data in inputs:
        try:
            run(data)
        except target.refused:
            pass
        except BaseException as error:
            error.add_note(f"the input was {data[:300]!r}")
            raise


@pytest.mark.parametrize("name", TARGETS)
def test_a_moment_of_each(name: str) -> None:
    target = TARGETS[name]
    rng = random.Random(os.urandom(8))
    seeds = list(target.seeds())
    run_all(target, seeds)
    target.prepare()(seeds[0])  # what is valid is accepted
    count = 20 if name in SLOW else 100
    run_all(target, [target.mutate(rng, rng.choice(seeds), seeds)[: target.largest] for _ in range(count)])


@pytest.mark.parametrize("path", sorted(INPUTS.glob("*.txt")), ids=lambda path: path.stem)
def test_inputs_that_were_kept(path: Path) -> None:
    run_all(TARGETS[path.stem], [base64.b64decode(line) for line in path.read_text().splitlines()])


def _lines(*records: object) -> bytes:
    import zlib

    found = b""
    for record in records:
        text = json.dumps(record).encode()
        found += b"%08x %s\n" % (zlib.crc32(text), text)
    return found


def _with_sum(line: bytes) -> bytes:
    from mergefs.hashing import hex_digest

    return line + b"\n" + hex_digest(line).encode() + b"\n"


_DEEP = b"[" * 3000 + b"]" * 3000
_BEGUN = (["begin", ""], ["folder", "", 1, 1, 448])

FOUND: dict[str, tuple[str, bytes]] = {
    "JSON that is nested too deep for a repository's configuration": ("repository-config", _DEEP),
    "the same for an archive's": ("archive-config", _DEEP),
    "the same for a session": ("session", _DEEP),
    "the same for a model's files": ("model-files", _DEEP),
    "a configuration too deep to be written again": ("model-files", b'{"a":' * 600 + b"{}" + b"}" * 600),
    "a copy of a ref that is not text": ("ref-copy", _with_sum(b'{"manifest": "\xeb"}')),
    "a copy of a ref that is a list": ("ref-copy", _with_sum(b"[]")),
    "a copy of a ref that is nested too deep": ("ref-copy", _with_sum(_DEEP)),
    "a copy of a ref whose manifest is a number": (
        "ref-copy",
        _with_sum(b'{"manifest": 1, "time": 1, "previous": null}'),
    ),
    "a journal with a change that there is not": ("journal", _lines(*_BEGUN, ["__init__"])),
    "a journal with extents without end": (
        "journal",
        _lines(*_BEGUN, ["file", "a", 2, 1, 1, 2**62, None, 0, [[0, 2**60]]]),
    ),
    "a journal with a write far behind the end": (
        "journal",
        _lines(*_BEGUN, ["create", "a", 2, 1, 1], ["write", 2, 0, 2**50, 10]),
    ),
    "a journal with a path that leads outside": ("journal", _lines(*_BEGUN, ["create", "../a", 2, 1, 1])),
    "a journal with a number for a path": ("journal", _lines(*_BEGUN, ["create", 7, 2, 1, 1])),
    "a journal whose file's number is a path": ("journal", _lines(*_BEGUN, ["create", "a", "../../x", 1, 1])),
    "a journal without a boot": ("journal", _lines(["begin"], ["folder", "", 1, 1, 448])),
    "a journal of a file that is its own folder": ("journal", _lines(*_BEGUN, ["rename", "", "a/b"])),
    "a key that is not text": ("session-keys", b"=\x01\0\0\0\xf3value"),
    "a vocabulary with a list for a token": ("model-files", b'{"model": {"vocab": [[[1], 2]]}}'),
    "statistics with a frame of 2^64 bytes": (
        "statistics",
        b"mst3" + bytes(8) + b"\1\0\0\0\1\0\0\0\1\0\0\0" + bytes(8) + b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8,
    ),
    "a pattern that matches for ever": (
        "adapter-config",
        b'{"peft_type": "LORA", "r": 4, "rank_pattern": {"(.+)+x": 4}}',
    ),
    "a pattern that nearly does": (
        "adapter-config",
        b'{"peft_type": "LORA", "r": 4, "rank_pattern": {".*.*.*.*.*.*.*.*x": 4}}',
    ),
    "a flag of YAML that is none": ("recipe", b"!!bool merge"),
    "a key of YAML that is no flag": ("recipe", b"{!!bool model: y}"),
    "a time of YAML that is none": ("recipe", b"name: !!timestamp x"),
    "a number of YAML that is none": ("recipe", b"name: !!int ''"),
    "planes for numcodecs that are too short": ("ulp-codec", b"\x08" + bytes(10)),
    "tiers for a base of half an element": ("tiers-fast", b"\x0b\1\1\0\0\0\3"),
    "a plan whose parts are of other kinds": (
        "plan",
        b'{"format":"mergefs-plan","method":[],"version":1}',
    ),
    "a Zarr array whose attributes are text": (
        "zarr-metadata",
        json.dumps(
            {
                "documents": {
                    "zarr.json": {"zarr_format": 3, "node_type": "group", "attributes": {}},
                    "a/zarr.json": {
                        "zarr_format": 3,
                        "node_type": "array",
                        "shape": [2],
                        "data_type": "float32",
                        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
                        "chunk_key_encoding": {"name": "default"},
                        "fill_value": 0,
                        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
                        "attributes": "text",
                    },
                },
                "chunk": "a/c/0",
            }
        ).encode(),
    ),
}
"""What was not refused as it should be, until fuzzing found it: the target and the input."""


@pytest.mark.parametrize("name", FOUND)
def test_what_fuzzing_found(name: str) -> None:
    target, data = FOUND[name]
    run_all(TARGETS[target], [data])


# -- memory ------------------------------------------------------------------------------------------------------


def _yaml_bomb() -> bytes:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    return ("\n".join([*levels, "merge_method: linear", "models: *a11"]) + "\n").encode()


def _claiming(size: int) -> bytes:
    """A zstd frame that claims a content size, and holds a block that repeats a byte."""
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + (1 << 17 << 3 | 3).to_bytes(3, "little") + b"a"


BOMBS: dict[str, tuple[str, bytes]] = {
    "a header that claims 100 MB": ("safetensors-header", (10**8).to_bytes(8, "little") + b"{}"),
    "a header that claims everything": ("safetensors-header", b"\xff" * 8 + b"{}"),
    "a tensor of exabytes": (
        "safetensors-header",
        (lambda text: len(text).to_bytes(8, "little") + text)(
            b'{"w":{"dtype":"F32","shape":[1099511627776,1048576],"data_offsets":[0,4611686018427387904]}}'
        ),
    ),
    "a shape of many axes": (
        "safetensors-header",
        (lambda text: len(text).to_bytes(8, "little") + text)(
            json.dumps({"w": {"dtype": "U8", "shape": [0] + [2**62] * 5000, "data_offsets": [0, 0]}}).encode()
        ),
    ),
    "an index": ("index", b'{"weight_map": {}}'),
    "aliases of aliases": ("recipe", _yaml_bomb()),
    "deep YAML": ("recipe", b"models: " + b"[" * 5000),
    "a deep block of YAML": ("recipe", b"- " * 5000),
    "a frame of terabytes": ("zstd-frame", _claiming(1 << 42)),
    "a frame of all that a number holds": ("zstd-frame", _claiming((1 << 64) - 1)),
    "a manifest whose tensor has 2^52 elements in one block": (
        "manifest",
        json.dumps(
            {
                "block_elements": 2**52,
                "files": [],
                "format": "mergefs-manifest",
                "lineage": {"kind": "fitted", "sources": []},
                "tensors": [{"blocks": ["0" * 64], "dtype": "U8", "name": "a", "shape": [2**52]}],
                "version": 1,
            },
            sort_keys=True,
            separators=(",", ":"),
        ).encode(),
    ),
    "a pack that claims 2^32 records": (
        "pack-table",
        b"mfspack1" + (8).to_bytes(8, "little") + b"\xff" * 4 + bytes(4) + bytes(32) + b"mfsends1",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_little_input_takes_little_memory(name: str) -> None:
    target, data = BOMBS[name]
    run = TARGETS[target].prepare()
    tracemalloc.start()
    try:
        run(data)
    except TARGETS[target].refused:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < TARGETS[target].allowed_bytes(len(data))


@pytest.mark.parametrize("kind", ["tables", "gaps", "mask", "frames"])
@pytest.mark.parametrize("coding", ["fast", "small"])
def test_tiers_take_memory_for_their_block_only(kind: str, coding: str) -> None:
    """Whatever sizes a payload claims, none is set aside that a block of so many elements cannot have."""
    target = TARGETS[f"tiers-{coding}"]
    run = target.prepare()
    data = bytearray(target.seeds()[6])
    at = {"tables": len(data) - 40, "gaps": 21 + 8, "mask": 17, "frames": 60}[kind]
    data[at : at + 4] = b"\xff" * 4
    run_all(target, [bytes(data)])
    tracemalloc.start()
    try:
        run(bytes(data))
    except target.refused:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20


# -- the campaign itself -----------------------------------------------------------------------------------------


def _target(name: str, run: Callable[[bytes], object]) -> Target:
    return Target(name, lambda: [b"seed"], lambda: run, lambda rng, data, kept: rng.randbytes(4), 1)


def test_a_header_with_one_byte_less_is_refused() -> None:
    run = TARGETS["safetensors-header"].prepare()
    with pytest.raises(MergefsError):
        run(_header_seeds()[0][:-1])


def test_a_target_that_dies_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed by a signal in native code; its input is kept and the figures survive."""
    site = tmp_path / "sitecustomize.py"
    site.write_text(
        "import tools.fuzz.targets as t\n"
        "from tools.fuzz.target import Target\n"
        "import ctypes\n"
        "def run(data):\n"
        "    if data != b'seed': ctypes.string_at(0)\n"
        "t.TARGETS['dying'] = Target('dying', lambda: [b'seed'], lambda: run, lambda r, d, k: b'dead', 1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}")
    row = Campaign(tmp_path / "found", None, most_crashes=1).run(_target("dying", bytes), 10, 60, 1)
    (path,) = row.crashes
    assert path.read_bytes() == b"dead"
    assert path.with_suffix(".txt").read_text().startswith("SIGSEGV")
    assert row.executions == 2


@pytest.mark.slow
def test_a_minute_of_fuzzing_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.fuzz", "--seconds", "120", "--found", str(tmp_path / "found")]
    command += ["--seed", str(random.randrange(1 << 30))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
