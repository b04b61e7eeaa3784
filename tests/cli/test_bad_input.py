"""Bad input: one sentence that says what is wrong, exit code 2, and the repository as before."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import array, contents, fine_tuned, new_repository, pack, random_model, recipe_text, write_model

import mergefs.cli
from mergefs.configuration import VERSION
from mergefs.repository import Repository


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a repository `repo` that holds `base`, `x`, `y` and a lazy merge."""
    folder = tmp_path_factory.mktemp("bad")
    base = random_model(1)
    with new_repository(folder / "repo") as repository:
        repository.ingest(write_model(folder / "base", base), "base")
        repository.ingest(write_model(folder / "x", fine_tuned(base, 2)), "x", base="base")
        repository.ingest(write_model(folder / "y", fine_tuned(base, 3)), "y")
        repository.ingest(write_model(folder / "other", {"w": array(np.ones(9), "BF16")}), "other")
    return folder


State = tuple[dict[str, str], dict[str, str], object, object]


@pytest.fixture
def unchanged(world: Path) -> Iterator[None]:
    """What stats, fsck, the refs and the files say before a test is what they say after it."""

    def state() -> State:
        with Repository.open(world / "repo", sync=False) as repository:
            report = repository.fsck()
            assert report.ok
            assert not list((repository.path / "tmp").iterdir())
            return contents(repository.path), repository.refs(), repository.stats(), report

    before = state()
    yield
    assert state() == before


@pytest.fixture
def refused(
    world: Path, unchanged: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command line that has to be refused; return its message."""

    def run(*arguments: object, repo: Path | None = None, code: int = 2) -> str:
        monkeypatch.delenv("MERGEFS_REPO", raising=False)
        monkeypatch.setattr(sys, "argv", ["mergefs", "-R", str(repo or world / "repo"), *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            mergefs.cli.main()
        captured = capfd.readouterr()
        assert caught.value.code == code, captured.err
        assert captured.out == ""
        message = captured.err
        assert message.startswith("mergefs: ")
        assert message.count("\n") == 1, message
        assert message.endswith("\n")
        assert message[:-1].isprintable()
        assert "Traceback" not in message
        return message.removeprefix("mergefs: ")

    return run


# --------------------------------------------------------------------------------------------------- checkpoints

VALUES = np.arange(6, dtype=np.float32)
GOOD: dict[str, Any] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def _file(header: Any, data: bytes = VALUES.tobytes()) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _entry(**changes: Any) -> dict[str, Any]:
    return {"w": GOOD | changes}


DAMAGED: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "0 bytes"),
    "no whole length": (b"\1\2\3", "3 bytes"),
    "text": (b"this is not a safetensors file, is it?", "header"),
    "truncated data": (_file(_entry(), VALUES.tobytes()[:-1]), "'w'"),
    "no data": (_file(_entry(), b""), "'w'"),
    "a truncated header": (_file(_entry())[:30], "truncated"),
    "trailing data": (_file(_entry()) + b"x", "1 bytes behind"),
    "overlapping tensors": (_file({"w": GOOD, "v": GOOD | {"data_offsets": [12, 36]}}, bytes(36)), "overlaps"),
    "a gap": (_file({"w": GOOD, "v": GOOD | {"data_offsets": [28, 52]}}, bytes(52)), "gap"),
    "a gap at the start": (_file(_entry(data_offsets=[4, 28]), bytes(28)), "gap"),
    "a header longer than the file": ((1000).to_bytes(8, "little") + b"{}", "1000"),
    "a header of more than 100 MB": ((10**8 + 1).to_bytes(8, "little") + b"{}", "100000001"),
    "a header of 2**64 - 1 bytes": (b"\xff" * 8 + b"{}", "18446744073709551615"),
    "a tensor twice": (_file(b'{"w":%s,"w":%s}' % ((json.dumps(GOOD).encode(),) * 2)), "'w'"),
    "a key twice": (_file(b'{"w":{"dtype":"F32","dtype":"F32","shape":[6],"data_offsets":[0,24]}}'), "'dtype'"),
    "a negative offset": (_file(_entry(data_offsets=[-24, 0])), "'w'"),
    "offsets the wrong way round": (_file(_entry(data_offsets=[24, 0])), "'w'"),
    "an overflowing offset": (_file(_entry(data_offsets=[0, 2**64 + 24])), "'w'"),
    "an overflowing shape": (_file(_entry(shape=[2**40, 2**40])), "'w'"),
    "a shape that does not match": (_file(_entry(shape=[2, 4])), "'w'"),
    "a dtype that does not match": (_file(_entry(dtype="F64")), "'w'"),
    "a negative shape": (_file(_entry(shape=[-2, -3])), "'w'"),
    "an unknown dtype": (_file(_entry(dtype="F4")), "F4"),
    "an unknown key": (_file(_entry(stride=[1])), "stride"),
    "a header that is a list": (_file(b"[]"), "header"),
    "a header that is not JSON": (_file(b'{"w":'), "header"),
    "a header that is not UTF-8": (_file(b'{"\xff":1}'), "header"),
    "metadata that is no text": (_file({"__metadata__": {"a": 1}, "w": GOOD}), "__metadata__"),
    "a name with a control character": (_file({"a\x1b[2J": GOOD}), "control"),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("bare", [False, True], ids=["directory", "file"])
def test_damaged_files(refused: Callable[..., str], tmp_path: Path, name: str, bare: bool) -> None:
    content, part = DAMAGED[name]
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refused("ingest", tmp_path / "model.safetensors" if bare else tmp_path, "--as", "m", "--base", "base")
    assert "model.safetensors" in message
    assert part in message


def test_what_is_not_a_checkpoint(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "model.safetensors").symlink_to(tmp_path / "gone")
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "model.safetensors")
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        (tmp_path / "two" / f"{name}.safetensors").write_bytes(pack({}))
    for name, part in {
        "nothing": "does not exist",
        "text.txt": "not a checkpoint",
        "empty": "not a checkpoint",
        "pickled": "pytorch_model.bin",
        "dangling": "dangling",
        "fifo": "FIFO",
        "two": "several",
    }.items():
        message = refused("ingest", tmp_path / name, "--as", "m")
        assert name in message
        assert part in message
    refused("ingest", "", "--as", "m")
    refused("ingest", "\0", "--as", "m")
    refused("ingest", "/dev/null", "--as", "m")


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("weight_map", "part"),
    [
        ({"w": "missing.safetensors"}, "missing.safetensors"),
        ({"w": "../x.safetensors"}, "../x.safetensors"),
        ({"w": "/etc/passwd"}, "/etc/passwd"),
        ({"w": "sub/a.safetensors"}, "sub/a.safetensors"),
        ({"w": ".."}, ".."),
        ({"w": 5}, "'w'"),
        ({"nobody": "a.safetensors"}, "nobody"),
        ({}, INDEX),
        ("a.safetensors", INDEX),
    ],
    ids=str,
)
def test_bad_indexes(refused: Callable[..., str], tmp_path: Path, weight_map: Any, part: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(_file(_entry()))
    (tmp_path.parent / "x.safetensors").write_bytes(_file(_entry()))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    message = refused("ingest", tmp_path, "--as", "m")
    assert INDEX in message
    assert part in message


def test_an_index_that_is_not_json(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(_file(_entry()))
    for text in ("", "{", "[]", "null", '{"weight_map": {"w": "a.safetensors", "w": "a.safetensors"}}'):
        (tmp_path / INDEX).write_text(text)
        assert INDEX in refused("ingest", tmp_path, "--as", "m")


def test_a_base_that_is_not_there(refused: Callable[..., str], world: Path) -> None:
    for base in ("nobody", "0123456789abcdef", "f" * 64, "", "../x", "a" * 1000, "\0"):
        message = refused("ingest", world / "x", "--as", "m", "--base", base)
        assert "neither a ref nor a manifest" in message


@pytest.mark.parametrize(
    "name", ["a/b", "..", "a..b", ".hidden", "-x", "", "a b", "a\nb", "é", "a" * 201, "f" * 64, "\0"]
)
def test_bad_names(refused: Callable[..., str], world: Path, name: str) -> None:
    (world / "good.yml").write_text(recipe_text("linear", ["x"], weight=1))
    for arguments in (
        ("ingest", world / "x", f"--as={name}"),
        ("merge", world / "good.yml", f"--as={name}"),
        ("merge", world / "good.yml", "--lazy", f"--as={name}"),
        ("tag", "x", "--", name),
    ):
        assert "cannot be a name" in refused(*arguments)


def test_refs_that_are_not_there(refused: Callable[..., str], world: Path, tmp_path: Path) -> None:
    for ref in ("nobody", "0" * 8, "0" * 64, "", "x/y", "\udcff", "\0"):
        refused("show", ref)
        refused("log", ref)
        refused("diff", "x", ref)
        refused("tag", ref, "new")
        refused("rm", "x", ref)
        refused("export", ref, tmp_path / "out")
        refused("materialize", ref)
    assert not (tmp_path / "out").exists()
    assert "nothing to materialize" in refused("materialize", "x")


# ------------------------------------------------------------------------------------------------------- recipes


def _model(**own: Any) -> dict[str, Any]:
    return {"model": "x", "parameters": {"weight": 1.0, **own}}


def _recipe(**changes: Any) -> str:
    value = {"merge_method": "ties", "base_model": "base", "models": [_model()]} | changes
    return json.dumps({key: item for key, item in value.items() if item is not None})


BAD_RECIPES: dict[str, tuple[str, str]] = {
    "empty": ("", "bad.yml"),
    "a list": ("- a\n- b\n", "bad.yml"),
    "text": ("just text", "bad.yml"),
    "broken YAML": ("merge_method: ties\nmodels: [a\n", "line"),
    "tabs": ("merge_method: ties\n\tmodels: []\n", "line 2"),
    "a key twice": ("merge_method: ties\nmerge_method: linear\n", "'merge_method' is there twice"),
    "an object": ("!!python/object/apply:os.system ['true']", "bad.yml"),
    "an alias of itself": ("a: &a [*a]\n", "bad.yml"),
    "many aliases": ("a: &a [x,x]\nb: &b [*a,*a]\nmerge_method: ties\n", "unknown key"),
    "an unknown key": (_recipe(surprise=1), "'surprise'"),
    "slices": (_recipe(slices=[]), "'slices'"),
    "out_dtype": (_recipe(out_dtype="float64"), "float64"),
    "another tokenizer": (_recipe(tokenizer_source="union"), "tokenizer_source"),
    "no method": (_recipe(merge_method=None), "merge_method"),
    "an unknown method": (_recipe(merge_method="alchemy"), "'alchemy'"),
    "a method that is a list": (_recipe(merge_method=["ties"]), "merge_method"),
    "no models": (_recipe(models=None), "'models'"),
    "an empty list of models": (_recipe(models=[]), "'models'"),
    "models as text": (_recipe(models="x"), "'models'"),
    "a model as text": (_recipe(models=["x"]), "'x'"),
    "a model without a name": (_recipe(models=[{"parameters": {"weight": 1}}]), "not a model"),
    "a model that is a list": (_recipe(models=[{"model": ["x"]}]), "not a model"),
    "an unknown key in a model": (_recipe(models=[_model() | {"lora": "y"}]), "'lora'"),
    "an unknown model": (_recipe(models=[_model() | {"model": "nobody"}]), "'nobody'"),
    "a model that is a path": (_recipe(models=[_model() | {"model": "/etc"}]), "'/etc'"),
    "a model with a lone surrogate": (_recipe(models=[_model() | {"model": "\ud800"}]), "neither a ref"),
    "an unknown base": (_recipe(base_model="nobody"), "'nobody'"),
    "no base": (_recipe(base_model=None), "base_model"),
    "only the base": (_recipe(models=[_model() | {"model": "base"}]), "besides the base"),
    "no weight": (_recipe(models=[{"model": "x"}]), "weight"),
    "a weight of text": (_recipe(models=[_model(weight="much")]), "'much'"),
    "a weight that is no number": (_recipe(models=[_model(weight=".nan")]), "weight"),
    "an infinite weight": (
        '{"merge_method": "linear", "models": [{"model": "x", "parameters": {"weight": .inf}}]}',
        "inf",
    ),
    "a weight that is a flag": (_recipe(models=[_model(weight=True)]), "weight"),
    "a weight that is null": (_recipe(models=[_model(weight=None)]), "weight"),
    "an empty gradient": (_recipe(models=[_model(weight=[])]), "empty list"),
    "a gradient of text": (_recipe(models=[_model(weight=[0, "much"])]), "'weight'"),
    "a gradient out of range": (_recipe(models=[_model(density=[0, 2])]), "'density'"),
    "a filter that misses tensors": (_recipe(models=[_model(weight=[{"filter": "mlp", "value": 1}])]), "filters"),
    "a filter without a value": (_recipe(models=[_model(weight=[{"filter": "mlp"}])]), "'value'"),
    "a filter that is a number": (_recipe(models=[_model(weight=[{"filter": 1, "value": 1}])]), "filter"),
    "a density above one": (_recipe(models=[_model(density=1.5)]), "density"),
    "a negative density": (_recipe(models=[_model(density=-0.1)]), "density"),
    "an unknown parameter": (_recipe(models=[_model(gama=0.1)]), "'gama'"),
    "a flag that is none": (_recipe(parameters={"normalize": "perhaps"}), "normalize"),
    "parameters as a list": (_recipe(parameters=[1]), "parameters"),
    "an unknown dtype": (_recipe(dtype="int8"), "'int8'"),
    "weights that add up to nothing": (
        _recipe(merge_method="linear", models=[_model(weight=1), _model(weight=-1) | {"model": "y"}]),
        "add up to 0",
    ),
    "models that do not fit": (_recipe(models=[_model() | {"model": "other"}]), "'other'"),
    "a base that is an expert": (_recipe(models=[_model() | {"model": "alias"}]), "base"),
}


@pytest.mark.parametrize("name", BAD_RECIPES)
def test_bad_recipes(refused: Callable[..., str], world: Path, tmp_path: Path, name: str) -> None:
    text, part = BAD_RECIPES[name]
    path = tmp_path / "bad.yml"
    if "alias" in text and "&" not in text:
        with Repository.open(world / "repo", sync=False) as repository:
            text = text.replace("alias", repository.resolve("base")[:12])
    path.write_text(text)
    for command in (
        ("merge", path, "--as", "m"),
        ("plan", path),
        ("explain", path),
        ("merge", path, "--as", "m", "--lazy"),
    ):
        assert part in refused(*command)


def test_recipes_that_cannot_be_read(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "latin.yml").write_bytes(b"merge_method: \xff\n")
    for path in (tmp_path / "nothing.yml", tmp_path, tmp_path / "latin.yml", "\0"):
        assert "cannot be read" in refused("merge", path, "--as", "m")


@pytest.mark.parametrize(
    "budget",
    ["0", "0%", "0.0000001%", "-5", "-5%", "nonsense", "", "%", "10 potatoes", "101%", "nan%", "1e3", "10%%", "∞"],
)
def test_bad_budgets(refused: Callable[..., str], world: Path, budget: str) -> None:
    (world / "ties.yml").write_text(_recipe())
    for command in ("plan", "explain"):
        assert "budget" in refused(command, world / "ties.yml", f"--budget={budget}")
    for option in ((), ("--lazy",)):
        assert "budget" in refused("merge", world / "ties.yml", "--as", "m", f"--budget={budget}", *option)


def test_a_budget_without_statistics(refused: Callable[..., str], world: Path) -> None:
    # y was ingested without its base.
    (world / "y.yml").write_text(_recipe(models=[_model() | {"model": "y"}]))
    assert "--base" in refused("merge", world / "y.yml", "--as", "m", "--budget", "10%")


@pytest.mark.parametrize("size", ["0", "1", "nonsense", "-1GiB", "1 potato", ""])
def test_bad_memory_limits(refused: Callable[..., str], world: Path, size: str) -> None:
    (world / "ties.yml").write_text(_recipe())
    refused("merge", world / "ties.yml", "--as", "m", f"--max-memory={size}")


# ------------------------------------------------------------------------------------- repositories, destinations


def test_repositories_that_cannot_be_used(refused: Callable[..., str], tmp_path: Path) -> None:
    Repository.init(tmp_path / "newer").close()
    config = json.loads((tmp_path / "newer" / "mergefs.json").read_text())
    del config["check"]
    (tmp_path / "newer" / "mergefs.json").write_text(json.dumps(config | {"version": VERSION + 1}))
    before = contents(tmp_path / "newer")
    assert f"version {VERSION + 1}" in refused("stats", repo=tmp_path / "newer")
    assert f"version {VERSION + 1}" in refused("gc", repo=tmp_path / "newer")
    assert contents(tmp_path / "newer") == before
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "alien").mkdir()
    (tmp_path / "alien" / "mergefs.json").write_text('{"format": "something else"}')
    for name in ("file", "empty", "alien", "nothing"):
        assert name in refused("stats", repo=tmp_path / name)
    for number, text in enumerate(("{", "[]", f'{{"format": "mergefs-repository", "version": {VERSION}}}')):
        (tmp_path / "newer" / "mergefs.json").write_text(text)
        assert "mergefs.json" in refused("stats", repo=tmp_path / "newer", code=2 if number == 1 else 1)


def test_destinations_that_are_not_empty(refused: Callable[..., str], world: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target in (full, tmp_path / "file", tmp_path / "file" / "below"):
        refused("export", "x", target)
        refused("init", target)
    refused("mount", "x", full)
    refused("mount", full)
    refused("init", world / "repo")
    assert contents(tmp_path) == {"full/mine.txt": contents(full)["mine.txt"], "file": contents(tmp_path)["file"]}
    assert (full / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("size", ["0", "1000", "4097", "nonsense", "1TiB", "-4096", "4.1KiB"])
def test_bad_block_sizes(refused: Callable[..., str], tmp_path: Path, size: str) -> None:
    refused("init", tmp_path / "new", f"--block-size={size}")
    assert not (tmp_path / "new").exists()
