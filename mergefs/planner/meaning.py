"""What a recipe means: which tensors of the result come from which models, and with which numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergefs.blocks.reader import BlockReader, Kind
from mergefs.hashing import digest
from mergefs.manifest import Blob, Manifest
from mergefs.merge.parameters import Scalar
from mergefs.planner.models import find_models
from mergefs.planner.resolve import numbers_of_tensors
from mergefs.planner.stacking import is_whole, stack_models
from mergefs.recipe import Recipe
from mergefs.store import Store


@dataclass(frozen=True)
class NamedModel:
    """A model as a recipe names it, and its manifest's id."""

    name: str
    manifest: str


@dataclass(frozen=True)
class Origin:
    """Where a group of tensors comes from.

    Attributes:
        model: as the recipe names it.
        layer_range: its first layer, and the one behind its last; None for whole models.
        is_base: it is what the others are compared with.
    """

    model: str
    layer_range: tuple[int, int] | None
    is_base: bool


@dataclass(frozen=True)
class Group:
    """Tensors of the result that are merged alike.

    Attributes:
        tensors: their names.
        slice: the number of their slice, from 1; None for whole models.
        sources: where they come from.
        experts: for each model that is merged, its own parameters.
        shared: the other parameters.
    """

    tensors: tuple[str, ...]
    slice: int | None
    sources: tuple[Origin, ...]
    experts: tuple[Mapping[str, Scalar], ...]
    shared: Mapping[str, Scalar]


@dataclass(frozen=True)
class Meaning:
    """What a recipe means.

    Attributes:
        method: the merge method.
        base: id of the manifest that deltas are taken from; None for a stack of several models' layers.
        models: that are merged, in the recipe's order; with slices each different one once.
        dtype: of the result's floats, or None for the base's.
        tokenizer, chat_template: as the recipe has them.
        ignored: parameters that have no effect, as the method does not have them.
        groups: of all float tensors.
        notes: sentences about what is stacked.
    """

    method: str
    base: str | None
    models: tuple[NamedModel, ...]
    dtype: str | None
    tokenizer: str | None
    chat_template: str | None
    ignored: tuple[str, ...]
    groups: tuple[Group, ...]
    notes: tuple[str, ...]


def meaning_of(store: Store, recipe: Recipe) -> Meaning:
    """Tell what a recipe means; nothing is stored.

    Raises:
        RecipeError, NotFoundError: when a model is missing, or the slices cannot be stacked.
    """
    models = find_models(store, recipe)
    named = {name: store.manifest(identity) for name, identity in models.named.items()}
    notes: tuple[str, ...] = ()
    stacked = recipe.slices is not None and not is_whole(recipe, named)
    result = _stack(store, recipe, named) if stacked else (store.manifest(models.base), notes)
    base, notes = result
    different, which = numbers_of_tensors(recipe, base)
    groups: dict[tuple[int | None, int], list[str]] = {}
    for name, number in which.items():
        part = None if recipe.slices is None else recipe.slice_of(name)[0]
        groups.setdefault((part, number), []).append(name)
    return Meaning(
        recipe.method.name,
        None if stacked else models.base,
        tuple(NamedModel(name, models.named[name]) for name in recipe.models),
        recipe.dtype,
        recipe.tokenizer,
        recipe.chat_template,
        recipe.ignored,
        tuple(
            Group(
                tuple(names),
                None if part is None else part + 1,
                _origins(recipe, part),
                different[number].experts,
                different[number].shared,
            )
            for (part, number), names in groups.items()
        ),
        notes,
    )


def _stack(store: Store, recipe: Recipe, named: Mapping[str, Manifest]) -> tuple[Manifest, tuple[str, ...]]:
    """Return the base of a recipe with slices, and sentences about it."""
    reader = BlockReader(store.catalog, store.backend)
    stacks = stack_models(
        store,
        recipe,
        named,
        lambda blob: bytes(reader.read(bytes.fromhex(blob.block), Kind.METADATA)),
        lambda data: Blob(digest(data).hex(), len(data)),
    )
    return stacks.base, stacks.notes


def _origins(recipe: Recipe, part: int | None) -> tuple[Origin, ...]:
    if part is None or recipe.slices is None:
        base = () if recipe.base_model is None else (Origin(recipe.base_model, None, True),)
        return (*base, *(Origin(name, None, False) for name in recipe.models))
    chosen = recipe.slices[part]
    base_source = recipe.base_source(chosen)
    return tuple(Origin(s.model, (s.first, s.stop), s is base_source) for s in chosen.sources)
