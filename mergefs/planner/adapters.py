"""Experts that stand on another model: LoRA adapters, and explicit deltas. They become fitted models that have the
model's blocks, and say what is added to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mergefs.blocks.reader import BlockReader, Kind
from mergefs.checkpoint.adapter import CONFIG, WEIGHTS, Adapted, adapt, read_config
from mergefs.errors import CheckpointError, RecipeError
from mergefs.manifest import Blob, Difference, Lineage, LowRank, Manifest, Tensor, TensorData
from mergefs.store import Store


def is_adapter(model: Manifest) -> bool:
    """Tell whether a stored model is an adapter."""
    weights = model.file_by_path.get(WEIGHTS)
    return CONFIG in model.file_by_path and (
        weights is not None and any(isinstance(segment, TensorData) for segment in weights.segments)
    )


def is_delta(store: Store, identity: str) -> bool:
    """Tell whether a stored model was ingested as a delta."""
    return store.manifest_entry(identity).get("kind") == "delta"


def stand_on(store: Store, model: Manifest, other: Manifest, name: str, reader: BlockReader) -> Manifest:
    """Return a model with an adapter or a delta on it, as a fitted model without files.

    Args:
        store: the repository.
        model: what it stands on.
        other: the adapter or the delta.
        name: what messages call that.
        reader: for the adapter's configuration.

    Raises:
        RecipeError: when the model is lazy, or they do not fit each other.
        CheckpointError: see `read_config` and `adapt`.
    """
    if model.is_lazy:
        raise RecipeError(f"'{name}' stands on a lazy merge: 'mergefs materialize' makes that usable in a recipe")
    if is_adapter(other):
        tensors = _adapted(model, other, name, reader)
    elif is_delta(store, other.id):
        tensors = _moved(model, other, name)
    else:
        raise RecipeError(f"'{name}' is a whole model and no LoRA adapter: name it alone")
    return Manifest(model.block_elements, (), tensors, Lineage("fitted", sources=(model.id, other.id)))


def _adapted(model: Manifest, adapter: Manifest, name: str, reader: BlockReader) -> tuple[Tensor, ...]:
    blobs = [segment for segment in adapter.file_by_path[CONFIG].segments if isinstance(segment, Blob)]
    data = b"".join(bytes(reader.read(bytes.fromhex(blob.block), Kind.METADATA)) for blob in blobs)
    config = read_config(data, f"{CONFIG} of '{name}'")
    theirs, ours = ({tensor.name: tensor.shape for tensor in of.tensors} for of in (adapter, model))
    found = adapt(config, theirs, ours, f"adapter '{name}'")
    return tuple(_with(tensor, found, adapter.tensor_by_name, name) for tensor in model.tensors)


def _with(tensor: Tensor, found: Mapping[str, Adapted], theirs: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor of the model as the adapter changes it."""
    adapted = found.get(tensor.name)
    if adapted is None:
        return tensor
    if adapted.replacement is not None:
        other = theirs[adapted.replacement]
        if other.dtype.is_float is not tensor.dtype.is_float:
            raise RecipeError(
                f"tensor '{tensor.name}' is {tensor.dtype.name} in the model and {other.dtype.name} in adapter"
                f" '{name}': they cannot be merged"
            )
        tensor = replace(other, name=tensor.name)
    if adapted.factors is None:
        return tensor
    factors = adapted.factors
    parts = [theirs[part] for part in (factors.down, factors.up, factors.magnitude) if part is not None]
    for part in (tensor, *parts):
        if not part.dtype.is_float:
            raise RecipeError(f"tensor '{part.name}' of '{name}' is {part.dtype.name}: an adapter is for floats only")
    magnitude = None if factors.magnitude is None else theirs[factors.magnitude]
    if magnitude is not None and not _has_whole_norms(tensor, factors.transposed):
        raise CheckpointError(
            f"adapter '{name}': the norms that DoRA (use_dora) needs of tensor '{tensor.name}' go beyond a block, which"
            " mergefs does not support; fold the adapter into its model with peft, or use a larger block size"
        )
    added = LowRank(parts[0], parts[1], factors.scale, magnitude, factors.transposed)
    return replace(tensor, added=added)


def _has_whole_norms(tensor: Tensor, transposed: bool) -> bool:
    """Tell whether each block has all of a row, or with `transposed` of a column."""
    if len(tensor.blocks) <= 1:
        return True
    # Cut between rows, a tensor has fewer blocks than twice its rows; through them, at least two for each.
    return not transposed and len(tensor.blocks) <= tensor.shape[0]


def _moved(base: Manifest, delta: Manifest, name: str) -> tuple[Tensor, ...]:
    check_delta(base, delta.tensor_by_name, name)
    return tuple(
        replace(tensor, added=Difference(delta.tensor_by_name[tensor.name]))
        if tensor.dtype.is_float and tensor.elements and tensor.name in delta.tensor_by_name
        else tensor
        for tensor in base.tensors
    )


def check_delta(base: Manifest, delta: Mapping[str, Tensor], name: str) -> None:
    """Check that a delta is one of a base: it may lack tensors, which then are the base's.

    Raises:
        RecipeError: when not.
    """
    for tensor in delta.values():
        twin = base.tensor_by_name.get(tensor.name)
        if twin is None:
            raise RecipeError(f"tensor '{tensor.name}' of the delta '{name}' is not in its base: name another base")
        if twin.shape != tensor.shape or twin.dtype.is_float is not tensor.dtype.is_float:
            raise RecipeError(
                f"tensor '{tensor.name}' is {tensor.dtype.name} {list(tensor.shape)} in the delta '{name}' and"
                f" {twin.dtype.name} {list(twin.shape)} in its base: name another base"
            )
