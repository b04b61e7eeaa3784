"""Opening a Hugging Face model directory: which files belong to it, and which of them hold its weights."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mergefs.checkpoint import adapter
from mergefs.checkpoint.safetensors import Header, TensorEntry, read_header
from mergefs.checkpoint.strict import LONGEST_JSON, flaw, parse_object, quote, reason, shown
from mergefs.errors import CheckpointError

SUFFIX = ".safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

ZARR_ROOTS = ("zarr.json", ".zgroup", ".zmetadata")
"""Files of which a folder has one where it is a Zarr group's."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_WEIGHTS = (SUFFIX, *_PICKLES, ".gguf", ".onnx", ".h5", ".msgpack", ".npy", ".npz")
# Bookkeeping of `git clone` and of `hf download --local-dir`, not part of the model.
_SKIPPED = (".git", ".cache")
_AGAIN = "download or save the checkpoint again"


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint.

    Attributes:
        path: where it is in the checkpoint, with `/` between folders.
        source: where its bytes are read from (symbolic links not resolved).
        size: its bytes.
        header: its safetensors header when it holds weights of the model, else None.
    """

    path: str
    source: Path
    size: int
    header: Header | None


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face directory, or a single safetensors file, whose headers have been checked.

    Attributes:
        root: the directory or the file.
        files: every file of the checkpoint, sorted by path.
    """

    root: Path
    files: tuple[CheckpointFile, ...]

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter, and no model by itself."""
        return any(file.path == adapter.WEIGHTS and file.header is not None for file in self.files) and any(
            file.path == adapter.CONFIG for file in self.files
        )

    @property
    def weights(self) -> tuple[CheckpointFile, ...]:
        """The files that hold the model's weights, sorted by path."""
        return tuple(f for f in self.files if f.header is not None)

    @cached_property
    def tensors(self) -> Mapping[str, tuple[CheckpointFile, TensorEntry]]:
        """Every tensor of the model by its name, with the file that holds it."""
        return MappingProxyType({t.name: (f, t) for f in self.files if f.header is not None for t in f.header.tensors})


def open_checkpoint(path: str | Path) -> Checkpoint:
    """List a checkpoint's files and read its weights' headers.

    The weights of a directory are `model.safetensors`, else the shards that `model.safetensors.index.json` names, else
    `adapter_model.safetensors` beside `adapter_config.json`, else the only `*.safetensors` file beside them. Every
    other file below it, except in `.git/` and `.cache/` at its top, belongs to the checkpoint as it is. Symbolic links
    to files are followed.

    Raises:
        CheckpointError: when there is no checkpoint at `path`, it has only pickled weights,
            a weight file or the index is damaged or they disagree, or something in the directory is neither
            a readable file nor a directory with a name that can be printed.
    """
    if not os.fspath(path):
        raise CheckpointError("the path of the checkpoint is empty; name a folder or a safetensors file")
    root, where = Path(path), shown(path)
    try:
        mode = os.stat(root).st_mode
    except FileNotFoundError:
        problem = "is a dangling symbolic link" if root.is_symlink() else "does not exist"
        remedy = "name a local folder or safetensors file (mergefs downloads nothing)"
        raise CheckpointError(f"{where} {problem}; {remedy}") from None
    except (OSError, ValueError) as error:
        problem = f"{where} cannot be opened: {reason(error)}"
        raise CheckpointError(f"{problem}; name a folder or safetensors file that you may read") from None
    if stat.S_ISDIR(mode):
        return _open_directory(root)
    if stat.S_ISREG(mode) and root.suffix == SUFFIX:
        return _open_file(root)
    raise CheckpointError(f"{where} is not a checkpoint: it is neither a folder nor a {SUFFIX} file")


def is_zarr(path: str | Path) -> bool:
    """Tell whether a folder is a Zarr group's, and no Hugging Face directory that also has such a file."""
    try:
        names = set(os.listdir(path))
    except (OSError, ValueError):
        return False
    return any(name in names for name in ZARR_ROOTS) and not any(name.endswith(SUFFIX) for name in names)


def companions(folder: Path) -> dict[str, Path]:
    """Return the files at the top of a folder that belong to a model besides its weights, by their names: neither
    weights of any form, nor hidden, nor Zarr's.

    Raises:
        CheckpointError: when the folder cannot be listed, or something there has a name that cannot be printed.
    """
    found = {}
    for entry in _listing(folder):
        _check_name(entry.name, shown(entry.path))
        is_other = entry.name.startswith(".") or entry.name in ZARR_ROOTS or entry.name == INDEX
        if not is_other and not entry.name.endswith(_WEIGHTS) and entry.is_file():
            found[entry.name] = Path(entry.path)
    return found


def _open_file(path: Path) -> Checkpoint:
    _check_name(path.name, shown(path))
    header = read_header(path)
    return Checkpoint(path, (CheckpointFile(path.name, path, header.file_size, header),))


def _open_directory(root: Path) -> Checkpoint:
    members = {f.path: f for f in _scan(root)}
    for name, header in _weights(root, members).items():
        members[name] = replace(members[name], size=header.file_size, header=header)
    return Checkpoint(root, tuple(members[path] for path in sorted(members)))


def _weights(root: Path, members: Mapping[str, CheckpointFile]) -> dict[str, Header]:
    """Return the headers of the model's weight files by their names."""
    if SINGLE in members:
        return {SINGLE: read_header(members[SINGLE].source)}
    if INDEX in members:
        return _shards(members)
    top = [name for name in members if "/" not in name]
    found = sorted(name for name in top if name.endswith(SUFFIX))
    if adapter.CONFIG in top:
        if adapter.WEIGHTS in top:
            return {adapter.WEIGHTS: read_header(members[adapter.WEIGHTS].source)}
        problem = f"{shown(root)} is an adapter (LoRA or another) without {adapter.WEIGHTS}"
        raise CheckpointError(f"{problem}; save it as safetensors (mergefs reads no pickled weights)")
    if found == [adapter.WEIGHTS]:
        problem = f"{shown(root)} has an adapter's weights and no {adapter.CONFIG}, which says what they mean"
        raise CheckpointError(f"{problem}; add that file")
    if not found:
        raise CheckpointError(f"{shown(root)} is not a checkpoint: {_why_none(top, members)}")
    if len(found) > 1:
        names = ", ".join(map(quote, found[:5])) + (", ..." if len(found) > 5 else "")
        problem = f"{shown(root)} has several weight files ({names}) and no {INDEX}"
        raise CheckpointError(f"{problem}; add the index or name one of the files")
    return {found[0]: read_header(members[found[0]].source)}


def _why_none(top: Iterable[str], members: Iterable[str]) -> str:
    pickles = sorted(name for name in top if name.endswith(_PICKLES))
    if pickles:
        return f"its weights are pickled ({quote(pickles[0])}), which mergefs does not read; save as safetensors"
    below = sorted(name for name in members if name.endswith(SUFFIX))
    if below:
        return f"its weights are in a subfolder ({quote(below[0])}); name that folder"
    return f"it has no {SUFFIX} file"


def _shards(members: Mapping[str, CheckpointFile]) -> dict[str, Header]:
    """Return the headers of the shards that the index names, once they agree with it."""
    where = shown(members[INDEX].source)
    weight_map = _weight_map(members[INDEX])
    for tensor, shard in weight_map.items():
        if flaw(shard) or "/" in shard or "\\" in shard or shard in (".", ".."):
            problem = f"{where} puts tensor {quote(tensor)} in {quote(shard)}, not a plain file name"
            raise CheckpointError(f"{problem}; {_AGAIN}")
        if shard not in members:
            problem = f"{where} puts tensor {quote(tensor)} in {quote(shard)}, which is missing"
            raise CheckpointError(f"{problem}; {_AGAIN}")
    headers = {shard: read_header(members[shard].source) for shard in sorted(set(weight_map.values()))}
    _check_agreement(where, weight_map, headers)
    return headers


def _weight_map(index: CheckpointFile) -> dict[str, str]:
    where = shown(index.source)
    fields, repeated = parse_object(_read_json(index), where, _AGAIN)
    if repeated:
        raise CheckpointError(f"{where} has the key {quote(repeated[0])} twice; {_AGAIN}")
    found: Any = fields.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{where} has no weight_map from tensors to files; {_AGAIN}")
    for tensor, shard in found.items():
        if not isinstance(shard, str):
            problem = f"{where} puts tensor {quote(tensor)} in {quote(shard)}, not a file name"
            raise CheckpointError(f"{problem}; {_AGAIN}")
    return found


def _read_json(index: CheckpointFile) -> bytes:
    where = shown(index.source)
    try:
        with open(index.source, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, LONGEST_JSON) + 1)  # what is asked for is set aside beforehand
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {reason(error)}; make it readable") from None
    if len(data) > LONGEST_JSON:
        raise CheckpointError(f"{where} is longer than {LONGEST_JSON} bytes, no index is; {_AGAIN}")
    return data


def _check_agreement(where: str, weight_map: Mapping[str, str], headers: Mapping[str, Header]) -> None:
    """Check that each tensor is in exactly the one shard where the index puts it."""
    home: dict[str, str] = {}
    for shard, header in headers.items():
        for entry in header.tensors:
            other = home.setdefault(entry.name, shard)
            if other != shard:
                problem = f"{where}: tensor {quote(entry.name)} is in both {quote(other)} and {quote(shard)}"
                raise CheckpointError(f"{problem}; {_AGAIN}")
    for name, shard in weight_map.items():
        if home.get(name) != shard:
            place = f", but it is in {quote(home[name])}" if name in home else ", which does not hold it"
            problem = f"{where} puts tensor {quote(name)} in {quote(shard)}{place}"
            raise CheckpointError(f"{problem}; {_AGAIN}")
    for name, shard in home.items():
        if name not in weight_map:
            problem = f"{where} does not list tensor {quote(name)}, which is in {quote(shard)}"
            raise CheckpointError(f"{problem}; {_AGAIN}")


def _scan(root: Path) -> list[CheckpointFile]:
    """Return every file below `root`, in no order."""
    found: list[CheckpointFile] = []
    # A list, not recursion: a hostile directory may be nested deeper than Python's stack.
    pending = [""]
    while pending:
        prefix = pending.pop()
        for entry in _listing(root / prefix):
            if not prefix and entry.name in _SKIPPED and entry.is_dir(follow_symlinks=False):
                continue
            member = _member(entry, prefix)
            if member is None:
                pending.append(f"{prefix}{entry.name}/")
            else:
                found.append(member)
    return found


def _listing(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise CheckpointError(f"{shown(folder)} cannot be listed: {reason(error)}; make it readable") from None


def _member(entry: os.DirEntry[str], prefix: str) -> CheckpointFile | None:
    """Return the file that `entry` is, or None when it is a directory to go through."""
    where = shown(entry.path)
    _check_name(entry.name, where)
    link = entry.is_symlink()
    try:
        state = entry.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{where} is a dangling symbolic link; {_AGAIN}") from None
    except OSError as error:
        raise CheckpointError(f"{where} cannot be opened: {reason(error)}; remove or mend it") from None
    if stat.S_ISREG(state.st_mode):
        return CheckpointFile(prefix + entry.name, Path(entry.path), state.st_size, None)
    if not stat.S_ISDIR(state.st_mode):
        raise CheckpointError(f"{where} is {_kind(state.st_mode)}, not a file; move it out of the checkpoint")
    if link:
        raise CheckpointError(f"{where} is a symbolic link to a folder; put the folder itself there")
    return None


def _check_name(name: str, where: str) -> None:
    problem = flaw(name)
    if problem:
        raise CheckpointError(f"{where}: the file name {quote(name)} {problem}; rename the file")


def _kind(mode: int) -> str:
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a FIFO" if stat.S_ISFIFO(mode) else "a device"
