"""Manifests: the immutable description of one model, named by the hash of its canonical form.

The form, with test vectors, is in spec/manifest.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from mergefs import canonical
from mergefs.blocks.geometry import MOST_BLOCK_ELEMENTS, Grid, grid
from mergefs.checkpoint.strict import LARGEST, flaw
from mergefs.dtypes import DTYPES, DType
from mergefs.errors import CorruptionError, FormatVersionError
from mergefs.hashing import hex_digest, is_hex
from mergefs.parts import cut, flag, hex_id, items, natural, only, positive, real, text

FORMAT = "mergefs-manifest"
VERSION = 1
_ADDED = frozenset(("low_rank", "difference"))


@dataclass(frozen=True, slots=True)
class Blob:
    """A segment of a file that is one stored blob.

    Attributes:
        block: the id of its bytes (hexadecimal).
        size: its length in bytes.
    """

    block: str
    size: int


@dataclass(frozen=True, slots=True)
class TensorData:
    """A segment of a file that is all of a tensor's bytes, block after block."""

    tensor: str


@dataclass(frozen=True)
class FileRecipe:
    """One file of a model.

    Attributes:
        path: relative, with `/` between folders.
        size: in bytes.
        sha256: hexadecimal, or None where nobody has computed it yet (derived files).
        segments: what the file is made of, in order.
    """

    path: str
    size: int
    sha256: str | None
    segments: tuple[Blob | TensorData, ...]


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a tensor W: W + scale up down, or with `transposed` W + scale (up down)^T.

    With a magnitude m, each row of that (each column with `transposed`) is then divided by its norm and multiplied by
    its element of m.

    Attributes:
        down, up: the factors [rank, in] and [out, rank], tensors of the adapter.
        scale: see above.
        magnitude: a tensor of `out` elements, or None.
        transposed: W is [in, out], not [out, in].
    """

    down: Tensor
    up: Tensor
    scale: float
    magnitude: Tensor | None = None
    transposed: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it is made of."""
        return (self.down, self.up, *(() if self.magnitude is None else (self.magnitude,)))

    @property
    def key(self) -> object:
        """What is the same for those whose tensors are read together once."""
        return (self.transposed, *((part.dtype.name, part.shape, part.blocks) for part in self.tensors))


@dataclass(frozen=True)
class Difference:
    """What an explicit delta adds to a tensor: its own elements.

    Attributes:
        tensor: of the delta, in the shape of the tensor that it is added to.
    """

    tensor: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it is made of."""
        return (self.tensor,)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a model.

    Attributes:
        name, dtype, shape: as in the safetensors header.
        blocks: the id of each block (hexadecimal), or None for a block that is derived on demand.
        added: what is added to the elements of the blocks, in a fitted model; see `mergefs.merge.expert`.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    blocks: tuple[str | None, ...]
    added: LowRank | Difference | None = None

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.elements * self.dtype.itemsize

    def grid(self, block_elements: int) -> Grid:
        """Where the tensor is cut."""
        return grid(self.shape, block_elements)


@dataclass(frozen=True)
class Lineage:
    """Where a manifest came from.

    Attributes:
        kind: `checkpoint` (ingested), `merge`, `edit`, or `fitted`: a model under the names and shapes of others, made
            so that they can be merged.
        plan, base, experts: the ids of a merge's plan, base manifest (None where it has none) and expert
            manifests; of an edited merge's where some blocks are still to be derived.
        models: the ids of a merge's models, the base first, where others were fitted from them; else ().
        sources: the ids of the models that a fitted one was made from.
        parent: the id of the model that was edited.
    """

    kind: str
    plan: str | None = None
    base: str | None = None
    experts: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    parent: str | None = None


@dataclass(frozen=True)
class Manifest:
    """One model: its files, its tensors and their blocks, and its lineage.

    Attributes:
        block_elements: the grid's parameter (see `mergefs.blocks.geometry`).
        files: sorted by path.
        tensors: in the order of the files that hold them.
    """

    block_elements: int
    files: tuple[FileRecipe, ...]
    tensors: tuple[Tensor, ...]
    lineage: Lineage

    @cached_property
    def encoded(self) -> bytes:
        """The canonical form."""
        return canonical.encode(_to_json(self))

    @cached_property
    def id(self) -> str:
        """The manifest's name: the hash of its canonical form."""
        return hex_digest(self.encoded)

    @cached_property
    def tensor_by_name(self) -> dict[str, Tensor]:
        """The tensors by their names."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def file_by_path(self) -> dict[str, FileRecipe]:
        """The files by their paths."""
        return {file.path: file for file in self.files}

    @property
    def is_lazy(self) -> bool:
        """Whether some block is still to be derived."""
        return any(None in tensor.blocks for tensor in self.tensors)

    @property
    def raw_bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def block_sizes(self) -> Iterator[tuple[bytes, int]]:
        """Yield the id of every stored block and blob, and how many bytes it has to have; see `block_ids`."""
        for file in self.files:
            for segment in file.segments:
                if isinstance(segment, Blob):
                    yield bytes.fromhex(segment.block), segment.size
        for tensor in self.tensors:
            for part in (tensor, *(tensor.added.tensors if tensor.added else ())):
                regular = part.grid(self.block_elements)
                for number, block in enumerate(part.blocks):
                    if block is not None:
                        first, stop = regular.extent(number)
                        yield bytes.fromhex(block), (stop - first) * part.dtype.itemsize

    def block_ids(self) -> Iterator[bytes]:
        """Yield the id (32 bytes) of every stored block and blob, in the order of the files, with repeats."""
        for file in self.files:
            for segment in file.segments:
                if isinstance(segment, Blob):
                    yield bytes.fromhex(segment.block)
        for tensor in self.tensors:
            for part in (tensor, *(tensor.added.tensors if tensor.added else ())):
                for block in part.blocks:
                    if block is not None:
                        yield bytes.fromhex(block)


def decode(data: bytes) -> Manifest:
    """Read a manifest from its canonical form, checking everything that can be checked without the store.

    Raises:
        CorruptionError: when it is not canonical, or a part is missing, unknown or inconsistent.
        FormatVersionError: when it was written by a newer mergefs.
    """
    value = canonical.decode(data)
    try:
        manifest = _from_json(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(f"a manifest is malformed: {cut(repr(error))}") from error
    vars(manifest)["encoded"] = bytes(data)  # it was canonical
    return manifest


def safe_path(path: str) -> bool:
    """Tell whether a file's path stays inside the folder that it is written to."""
    parts = path.split("/")
    return (
        all(part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts)
        and not any(ord(c) < 32 or ord(c) == 127 or c == "\\" for c in path)
        and len(path.encode()) <= 4096
    )


def _to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "block_elements": manifest.block_elements,
        "files": [
            {
                "path": file.path,
                "size": file.size,
                "sha256": file.sha256,
                "segments": [
                    {"blob": s.block, "size": s.size} if isinstance(s, Blob) else {"tensor": s.tensor}
                    for s in file.segments
                ],
            }
            for file in manifest.files
        ],
        "tensors": [_tensor_json(tensor) for tensor in manifest.tensors],
        "lineage": _lineage_to_json(manifest.lineage),
    }


def _lineage_to_json(lineage: Lineage) -> dict[str, Any]:
    if lineage.kind == "checkpoint":
        return {"kind": lineage.kind}
    if lineage.kind == "fitted":
        return {"kind": lineage.kind, "sources": list(lineage.sources)}
    edited = {"parent": lineage.parent} if lineage.kind == "edit" else {}
    if edited and lineage.plan is None:
        return {"kind": lineage.kind, **edited}
    return {
        "kind": lineage.kind,
        **edited,
        "plan": lineage.plan,
        "base": lineage.base,
        "experts": list(lineage.experts),
        **({"models": list(lineage.models)} if lineage.models else {}),
    }


def _tensor_json(tensor: Tensor) -> dict[str, Any]:
    value: dict[str, Any] = {
        "name": tensor.name,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "blocks": list(tensor.blocks),
    }
    match tensor.added:
        case LowRank(down, up, scale, magnitude, transposed):
            value["low_rank"] = {
                "down": _tensor_json(down),
                "up": _tensor_json(up),
                "scale": repr(scale),
                "magnitude": None if magnitude is None else _tensor_json(magnitude),
                "transposed": transposed,
            }
        case Difference(difference):
            value["difference"] = _tensor_json(difference)
    return value


def _from_json(value: dict[str, Any]) -> Manifest:
    if value.get("format") != FORMAT:
        raise ValueError("it does not say that it is a manifest")
    if type(value.get("version")) is not int or value["version"] != VERSION:
        raise FormatVersionError(
            f"the manifest has version {value.get('version')!r}; this mergefs reads version {VERSION}: upgrade it"
        )
    only(value, {"format", "version", "block_elements", "files", "tensors", "lineage"})
    manifest = Manifest(
        positive(value["block_elements"]),
        tuple(decode_file(item) for item in items(value["files"])),
        tuple(_tensor(item) for item in items(value["tensors"])),
        _lineage(value["lineage"]),
    )
    _check(manifest)
    return manifest


def decode_file(value: dict[str, Any]) -> FileRecipe:
    """Read a file of a manifest or plan.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: when it is none.
    """
    only(value, {"path", "size", "sha256", "segments"})
    if not safe_path(value["path"]):
        raise ValueError(f"unsafe path {value['path']!r}")
    segments: list[Blob | TensorData] = []
    for item in items(value["segments"]):
        if "blob" in item:
            only(item, {"blob", "size"})
            segments.append(Blob(hex_id(item["blob"]), positive(item["size"])))
        else:
            only(item, {"tensor"})
            segments.append(TensorData(text(item["tensor"])))
    sha256 = value["sha256"]
    return FileRecipe(
        value["path"], natural(value["size"]), None if sha256 is None else hex_id(sha256), tuple(segments)
    )


def _tensor(value: dict[str, Any]) -> Tensor:
    if "low_rank" in value or "difference" in value:
        return replace(_plain_tensor({k: v for k, v in value.items() if k not in _ADDED}), added=_added(value))
    return _plain_tensor(value)


def _plain_tensor(value: dict[str, Any]) -> Tensor:
    only(value, {"name", "dtype", "shape", "blocks"})
    name = text(value["name"])
    if flaw(name):
        raise ValueError(f"the tensor name {name!r} {flaw(name)}")
    return Tensor(
        name,
        DTYPES[value["dtype"]],
        tuple(natural(n) for n in items(value["shape"])),
        _ids(items(value["blocks"])),
    )


def _added(value: dict[str, Any]) -> LowRank | Difference:
    (kind,) = set(value) & _ADDED
    if kind == "difference":
        return Difference(_plain_tensor(value[kind]))
    part = value[kind]
    only(part, {"down", "up", "scale", "magnitude", "transposed"})
    scale, magnitude, transposed = part["scale"], part["magnitude"], part["transposed"]
    return LowRank(
        _plain_tensor(part["down"]),
        _plain_tensor(part["up"]),
        real(scale),
        None if magnitude is None else _plain_tensor(magnitude),
        flag(transposed),
    )


def _ids(values: list[Any]) -> tuple[str | None, ...]:
    """Check many ids, or None, at once."""
    given = [value for value in values if value is not None]
    if not set(map(type, given)) <= {str} or not set(map(len, given)) <= {64} or not is_hex("".join(given)):
        given = [hex_id(value) for value in given]  # says which one is none
    return tuple(values)


def _lineage(value: dict[str, Any]) -> Lineage:
    if value["kind"] == "checkpoint":
        only(value, {"kind"})
        return Lineage("checkpoint")
    if value["kind"] == "fitted":
        only(value, {"kind", "sources"})
        return Lineage("fitted", sources=tuple(hex_id(source) for source in items(value["sources"])))
    parent = None
    if value["kind"] == "edit":
        parent = hex_id(value["parent"])
        if "plan" not in value:
            only(value, {"kind", "parent"})
            return Lineage("edit", parent=parent)
    elif value["kind"] != "merge":
        raise ValueError(f"unknown kind {value['kind']!r}")
    only(value, {"kind", "plan", "base", "experts", *({"models", "parent"} & set(value))})
    if (parent is None) != ("parent" not in value):
        raise ValueError("a merge has no parent")
    base = value["base"]
    models = tuple(hex_id(model) for model in items(value.get("models", [])))
    if "models" in value and not models:
        raise ValueError("an empty list of models")
    return Lineage(
        value["kind"],
        hex_id(value["plan"]),
        None if base is None else hex_id(base),
        tuple(hex_id(expert) for expert in items(value["experts"])),
        models,
        parent=parent,
    )


def _check(manifest: Manifest) -> None:
    tensors = manifest.tensor_by_name
    if manifest.block_elements > MOST_BLOCK_ELEMENTS:
        raise ValueError(f"blocks of {manifest.block_elements} elements")
    if len(tensors) != len(manifest.tensors):
        raise ValueError("a tensor is named twice")
    if [file.path for file in manifest.files] != sorted(set(manifest.file_by_path)):
        raise ValueError("files are not in the order of their paths, or a path is there twice")
    for path in manifest.file_by_path:
        above = path.rpartition("/")[0]
        while above:
            if above in manifest.file_by_path:
                raise ValueError(f"{above!r} is a file and a folder")
            above = above.rpartition("/")[0]
    for tensor in manifest.tensors:
        for part in (tensor, *(tensor.added.tensors if tensor.added else ())):
            # Beyond what an offset can hold there is no length either.
            if part.nbytes > LARGEST or len(part.blocks) != len(part.grid(manifest.block_elements)):
                raise ValueError(f"tensor {part.name!r} has {len(part.blocks)} blocks")
        if tensor.added is not None:
            if manifest.files or manifest.lineage.kind != "fitted":
                raise ValueError(f"something is added to tensor {tensor.name!r} of a model with files")
            _check_added(tensor, tensor.added)
    if manifest.is_lazy and manifest.lineage.plan is None:
        raise ValueError("blocks are to be derived, but there is no plan")
    if manifest.lineage.kind == "edit" and (manifest.lineage.plan is not None) != manifest.is_lazy:
        raise ValueError("an edit has a plan that no block needs")
    used: list[str] = []
    for file in manifest.files:
        size = 0
        for segment in file.segments:
            if isinstance(segment, Blob):
                size += segment.size
            else:
                used.append(segment.tensor)
                size += tensors[segment.tensor].nbytes
        if size != file.size:
            raise ValueError(f"file {file.path!r} has {size} bytes of segments and claims {file.size}")
    # A fitted expert is read by merges only and has no files.
    if sorted(used) != sorted(tensors) and (manifest.files or manifest.lineage.kind != "fitted"):
        raise ValueError("a tensor is in no file, or in two")


def _check_added(tensor: Tensor, added: LowRank | Difference) -> None:
    if not all(part.dtype.is_float and None not in part.blocks for part in (tensor, *added.tensors)):
        raise ValueError(f"what is added to tensor {tensor.name!r} is not stored, or not of floats")
    if isinstance(added, Difference):
        fits = added.tensor.shape == tensor.shape
    else:
        down, up = added.down.shape, added.up.shape
        fits = len(tensor.shape) == len(down) == len(up) == 2 and down[0] == up[1]
        # A tensor with another number of rows has the first of them in common with what is added.
        fits = fits and tensor.shape[1] == (up[0] if added.transposed else down[1])
        fits = fits and (added.magnitude is None or added.magnitude.elements == up[0])
    if not fits:
        raise ValueError(f"what is added to tensor {tensor.name!r} has another shape")
