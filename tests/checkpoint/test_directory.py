"""Model directories: which files belong to them, which hold the weights, and what is refused."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from mergefs.checkpoint.directory import CheckpointFile, open_checkpoint
from mergefs.checkpoint.safetensors import read_header
from mergefs.errors import CheckpointError

from .builder import sharded, weights

INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def refusal(path: str | Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1500
    assert not message.endswith(".")
    return message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sound checkpoint of one weight file and a config."""
    root = tmp_path / "model"
    root.mkdir()
    (root / "model.safetensors").write_bytes(weights("a", "b"))
    (root / "config.json").write_text("{}")
    return root


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A sound checkpoint of two shards and an index."""
    return sharded(tmp_path / "sharded", {A: ["a", "b"], B: ["c"]})


# ------------------------------------------------------------------------------------------------- what opens


def test_a_single_file_model(model: Path) -> None:
    found = open_checkpoint(str(model))
    header = read_header(model / "model.safetensors")
    assert found.root == model
    assert found.files == (
        CheckpointFile("config.json", model / "config.json", 2, None),
        CheckpointFile("model.safetensors", model / "model.safetensors", header.file_size, header),
    )
    assert found.weights == found.files[1:]
    assert dict(found.tensors) == {t.name: (found.files[1], t) for t in header.tensors}


def test_shards(shards: Path) -> None:
    found = open_checkpoint(shards)
    assert [f.path for f in found.weights] == [A, B]
    assert {name: f.path for name, (f, _) in found.tensors.items()} == {"a": A, "b": A, "c": B}
    assert [f.path for f in found.files] == [A, B, INDEX]


def test_the_single_file_goes_before_the_index(shards: Path) -> None:
    (shards / "model.safetensors").write_bytes(weights("z"))
    (shards / INDEX).write_text("not read")
    assert [f.path for f in open_checkpoint(shards).weights] == ["model.safetensors"]
    assert len(open_checkpoint(shards).files) == 4


def test_the_index_goes_before_other_files(shards: Path) -> None:
    (shards / "consolidated.safetensors").write_bytes(b"opaque")
    found = open_checkpoint(shards)
    assert [f.path for f in found.weights] == [A, B]
    assert found.files[0] == CheckpointFile("consolidated.safetensors", shards / "consolidated.safetensors", 6, None)


def test_the_only_weight_file_under_any_name(model: Path) -> None:
    (model / "model.safetensors").rename(model / "other.safetensors")
    assert [f.path for f in open_checkpoint(model).weights] == ["other.safetensors"]


def test_a_bare_file(model: Path) -> None:
    path = (model / "model.safetensors").rename(model / "my model.safetensors")
    found = open_checkpoint(path)
    assert found.root == path
    assert found.files == (CheckpointFile(path.name, path, path.stat().st_size, read_header(path)),)


def test_every_other_file_is_a_member_as_it_is(model: Path) -> None:
    for path in (
        ".gitattributes",
        "sub/.git/x",
        "sub/.cache/y",
        "sub/unet.safetensors",
        "sub/deep/é 🙂",
        "a\\b",
    ):
        (model / path).parent.mkdir(parents=True, exist_ok=True)
        (model / path).write_bytes(b"not weights")
    for skipped in (".git/HEAD", ".cache/huggingface/download/x.lock"):
        (model / skipped).parent.mkdir(parents=True)
        (model / skipped).touch()
    os.mkfifo(model / ".cache" / "fifo")
    (model / "empty folder").mkdir()
    paths = [f.path for f in open_checkpoint(model).files]
    assert paths == sorted(paths)
    assert set(paths) == {
        *("config.json", "model.safetensors", ".gitattributes", "sub/.git/x", "sub/.cache/y"),
        *("sub/unet.safetensors", "sub/deep/é 🙂", "a\\b"),
    }
    assert [f.path for f in open_checkpoint(model).weights] == ["model.safetensors"]


def test_a_file_named_like_a_skipped_folder_is_a_member(model: Path) -> None:
    (model / ".git").write_text("gitdir: elsewhere")
    assert ".git" in [f.path for f in open_checkpoint(model).files]


def test_the_layout_of_the_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    (snapshot / "sub").mkdir(parents=True)
    (blobs / "aa").write_bytes(weights("w"))
    (blobs / "bb").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/aa")
    (snapshot / "sub" / "config.json").symlink_to("../../../blobs/bb")
    (tmp_path / "main").symlink_to("snapshots/0123")
    for root in (snapshot, tmp_path / "main"):
        found = open_checkpoint(root)
        assert [(f.path, f.size) for f in found.files] == [
            ("model.safetensors", (blobs / "aa").stat().st_size),
            ("sub/config.json", 2),
        ]
        assert list(found.tensors) == ["w"]
    assert open_checkpoint(snapshot / "model.safetensors").files[0].path == "model.safetensors"


def test_an_adapter_beside_a_model_is_a_file_like_others(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    (model / "adapter_model.safetensors").write_bytes(b"opaque")
    assert [f.path for f in open_checkpoint(model).weights] == ["model.safetensors"]


def test_a_folder_deeper_than_the_stack(model: Path) -> None:
    folders = [f"{model}" + "/d" * depth for depth in range(1, 1501)]
    for folder in folders:
        os.mkdir(folder)
    try:
        Path(folders[-1], "f").touch()
        assert len(open_checkpoint(model).files) == 3
    finally:
        # pytest itself cannot remove a tree as deep as this one.
        Path(folders[-1], "f").unlink()
        for folder in reversed(folders):
            os.rmdir(folder)


# --------------------------------------------------------------------------------------- no checkpoint at all


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    assert "Qwen/Qwen3 does not exist; name a local folder" in refusal(tmp_path / "Qwen/Qwen3")
    assert "cannot be opened: its path is malformed" in refusal("a\0b")
    assert "cannot be opened: file name too long" in refusal("x" * 5000)
    assert "is empty" in refusal("")
    (tmp_path / "file").touch()
    assert "cannot be opened: not a directory" in refusal(tmp_path / "file" / "model")


def test_links_at_the_root(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    assert "loop cannot be opened: too many levels of symbolic links" in refusal(tmp_path / "loop")
    assert "gone is a dangling symbolic link" in refusal(tmp_path / "gone")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    os.mkfifo(tmp_path / "m.safetensors")
    assert "model.gguf is not a checkpoint" in refusal(tmp_path / "model.gguf")
    assert "m.safetensors is not a checkpoint" in refusal(tmp_path / "m.safetensors")


def test_a_bare_file_with_a_bad_name(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b.safetensors"
    path.write_bytes(weights("a"))
    assert r"'a\x1b.safetensors' has control characters" in refusal(path)


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert refusal(tmp_path) == f"{tmp_path} is not a checkpoint: it has no .safetensors file"
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "x.safetensors").touch()
    assert "subfolder ('unet/x.safetensors'); name that folder" in refusal(tmp_path)


def test_pickled_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    message = refusal(tmp_path)
    assert "is not a checkpoint: its weights are pickled ('pytorch_model.bin')" in message
    assert "does not read" in message


def test_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(weights("lora_A"))
    (tmp_path / "other.safetensors").write_bytes(b"opaque")
    found = open_checkpoint(tmp_path)
    assert found.is_adapter
    assert [file.path for file in found.weights] == ["adapter_model.safetensors"]


@pytest.mark.parametrize("names", [["adapter_model.bin"], ["x.safetensors"], []])
def test_an_adapter_without_its_weights(tmp_path: Path, names: list[str]) -> None:
    for name in ("adapter_config.json", *names):
        (tmp_path / name).write_bytes(weights("lora_A"))
    message = refusal(tmp_path)
    assert f"{tmp_path} is an adapter (LoRA or another) without adapter_model.safetensors" in message
    assert "no pickled weights" in message


def test_an_adapter_without_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(weights("lora_A"))
    assert "and no adapter_config.json, which says what they mean" in refusal(tmp_path)


def test_several_weight_files_without_an_index(tmp_path: Path) -> None:
    for i in range(7):
        (tmp_path / f"w{i}.safetensors").write_bytes(weights("a"))
    message = refusal(tmp_path)
    assert "'w0.safetensors', 'w1.safetensors'" in message
    assert "and no model.safetensors.index.json" in message


def test_a_damaged_weight_file_is_named(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"{}")
    assert f"{model}/model.safetensors has 2 bytes, too few" in refusal(model)


# -------------------------------------------------------------------------------------- what is in the folder


def test_a_link_to_a_folder(model: Path, tmp_path: Path) -> None:
    (model / "sub").mkdir()
    (model / "sub" / "up").symlink_to("..")
    assert "sub/up is a symbolic link to a folder" in refusal(model)


def test_a_dangling_link(model: Path) -> None:
    (model / "tokenizer.json").symlink_to("../blobs/gone")
    assert "tokenizer.json is a dangling symbolic link" in refusal(model)


def test_a_loop_of_links(model: Path) -> None:
    (model / "x").symlink_to("y")
    (model / "y").symlink_to("x")
    assert "cannot be opened: too many levels of symbolic links" in refusal(model)


def test_a_fifo(model: Path) -> None:
    os.mkfifo(model / "pipe")
    assert "pipe is a FIFO, not a file" in refusal(model)


def test_a_socket(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("sock")
    assert "sock is a socket, not a file" in refusal(model)


def test_a_device(model: Path) -> None:
    (model / "null").symlink_to("/dev/null")
    assert "null is a device, not a file" in refusal(model)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (b"a\xff", r"'a\udcff' is not valid Unicode"),
        (b"a\xed\xa0\x80", "is not valid Unicode"),
        (b"a\nb", r"'a\nb' has control characters"),
        (b"a\x1b[2Jb", r"'a\x1b[2Jb' has control characters"),
        ("a\x9b".encode(), r"'a\x9b' has control characters"),
    ],
)
@pytest.mark.parametrize("folder", [False, True])
def test_file_names_that_are_refused(model: Path, name: bytes, said: str, folder: bool) -> None:
    path = os.path.join(os.fsencode(model), name)
    os.mkdir(path) if folder else os.close(os.open(path, os.O_CREAT))
    assert said in refusal(model)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(model: Path) -> None:
    (model / "sub").mkdir(mode=0)
    assert "sub cannot be listed: permission denied" in refusal(model)
    (model / "sub").rmdir()
    (model / "model.safetensors").chmod(0)
    assert "model.safetensors cannot be read: permission denied" in refusal(model)


# -------------------------------------------------------------------------------------------------- the index


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ("\ufeff{}", "not JSON"),
        ('{"weight_map": {"a": NaN}}', "NaN"),
        ('{"weight_map": {}, "weight_map": {}}', "has the key 'weight_map' twice"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "has the key 'a' twice"),
        ('{"metadata": {"n": 1, "n": 2}, "weight_map": {"a": "x"}}', "has the key 'n' twice"),
        ("[" * 100_000, "nested too deep"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
        ('{"weight_map": {"a": 1e400}}', "puts tensor 'a' in 1e400, not a file name"),
        ('{"weight_map": {"a": null}}', "puts tensor 'a' in None, not a file name"),
    ],
)
def test_a_broken_index(shards: Path, text: str, said: str) -> None:
    (shards / INDEX).write_text(text)
    message = refusal(shards)
    assert str(shards / INDEX) in message
    assert said in message


def test_an_index_that_is_not_utf8_or_too_long(shards: Path) -> None:
    (shards / INDEX).write_bytes(b'{"weight_map\xff')
    assert "is not UTF-8 at byte 12" in refusal(shards)
    os.truncate(shards / INDEX, 100_000_001)
    assert "longer than 100000000 bytes" in refusal(shards)


@pytest.mark.parametrize(
    "shard",
    [
        "/etc/passwd",
        "../x.safetensors",
        "..",
        ".",
        "",
        "sub/x.safetensors",
        "a\\b",
        "a\0b",
        "a\x1b",
        "./" + B,
        "\ud800",
    ],
)
def test_a_shard_that_is_no_plain_file_name(shards: Path, shard: str) -> None:
    (shards / "sub").mkdir()
    (shards / "sub" / "x.safetensors").write_bytes(weights("c"))
    (shards.parent / "x.safetensors").write_bytes(weights("c"))
    (shards / "a\\b").write_bytes(weights("c"))
    sharded(shards, {A: ["a", "b"]}, {"a": A, "b": A, "c": shard})
    message = refusal(shards)
    assert INDEX in message
    assert "puts tensor 'c' in " in message
    assert "not a plain file name" in message


def test_a_missing_shard(shards: Path) -> None:
    (shards / B).unlink()
    assert f"{INDEX} puts tensor 'c' in '{B}', which is missing" in refusal(shards)
    (shards / B).mkdir()
    assert "which is missing" in refusal(shards)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": A, "b": A, "c": B, "d": B}, f"puts tensor 'd' in '{B}', which does not hold it"),
        ({"a": A, "b": B, "c": B}, f"puts tensor 'b' in '{B}', but it is in '{A}'"),
        ({"a": A, "c": B}, f"does not list tensor 'b', which is in '{A}'"),
        ({"a": A, "b": A, "c": "config.json"}, "config.json has 2 bytes, too few"),
    ],
)
def test_an_index_that_disagrees(shards: Path, weight_map: dict[str, Any], said: str) -> None:
    (shards / "config.json").write_text("{}")
    (shards / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert said in refusal(shards)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    root = sharded(tmp_path / "m", {A: ["a", "b"], B: ["b", "c"]})
    assert f"tensor 'b' is in both '{A}' and '{B}'" in refusal(root)


def test_a_shard_that_the_index_does_not_name_is_opaque(shards: Path) -> None:
    (shards / "extra.safetensors").write_bytes(weights("a"))
    assert [f.path for f in open_checkpoint(shards).weights] == [A, B]
