"""Stacking layers of several models into one: what a recipe with slices merges. See spec/merging.md.

The stacks are fitted manifests that share every block with the models that they are made of: the base, a complete model
with files, and one for each column of sources, without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mergefs.catalog.environment import Transaction
from mergefs.errors import RecipeError
from mergefs.manifest import Lineage, Manifest, Tensor
from mergefs.planner.layers import comes_first, kind_of, layer_count, layer_of, stack_of, with_layer
from mergefs.planner.relaid import StoreBlob
from mergefs.planner.stacked_files import Origin, stacked_files
from mergefs.planner.vocabulary import ReadBlob, embedding, has_rows_of_vocabulary, head, ties
from mergefs.recipe import Recipe, Slice, Source
from mergefs.statistics.tensor import products_key, statistics_key
from mergefs.store import Publication, Store


@dataclass(frozen=True)
class Stacks:
    """The models of a recipe with slices, stacked.

    Attributes:
        base: what deltas are taken from, with the files of the result.
        experts: one for each column of sources.
        baseless: some of the base is an expert's own, and its bytes count as an expert's.
        base_name: what messages call the base.
        names: what messages call the experts.
        followed: id of the model whose files the base follows.
        known: what the catalog knows of the models' tensors, for the stacks'.
        notes: sentences about what was stacked.
    """

    base: Manifest
    experts: tuple[Manifest, ...]
    baseless: bool
    base_name: str
    names: tuple[str, ...]
    followed: str
    known: Publication
    notes: tuple[str, ...]

    @property
    def all(self) -> tuple[Manifest, ...]:
        """All different ones."""
        return tuple({manifest.id: manifest for manifest in (self.base, *self.experts)}.values())


Place = tuple[Manifest, Tensor]
"""A tensor, and the model that it is of."""


@dataclass(frozen=True)
class _Piece:
    """A tensor of the result.

    Attributes:
        name: there.
        base, experts: which model, and which tensor of it, stands for it in the base and in each column.
    """

    name: str
    base: Place
    experts: tuple[Place, ...]


def is_whole(recipe: Recipe, named: Mapping[str, Manifest]) -> bool:
    """Tell whether a recipe's slices are one, of all layers of every source: then models are merged as they are."""
    assert recipe.slices is not None
    return len(recipe.slices) == 1 and all(
        source.first == 0 and source.stop == _layers(named[source.model]) for source in recipe.slices[0].sources
    )


def stack_models(
    store: Store, recipe: Recipe, named: Mapping[str, Manifest], read: ReadBlob, store_blob: StoreBlob
) -> Stacks:
    """Stack what a recipe's slices name.

    Args:
        store: the repository.
        recipe: one with slices.
        named: its models.
        read: for the small files that are written anew.
        store_blob: called for those.

    Raises:
        RecipeError: when a slice names layers that a model does not have, or the models' layers do not go together.
    """
    return _Stacking(store, recipe, named, read).stacks(store_blob)


class _Stacking:
    """The stacking of one recipe's models."""

    def __init__(self, store: Store, recipe: Recipe, named: Mapping[str, Manifest], read: ReadBlob) -> None:
        assert recipe.slices is not None
        self._store = store
        self._recipe = recipe
        self._slices: tuple[Slice, ...] = recipe.slices
        self._named = named
        self._read = read
        self._ids = set(store.manifest_ids())
        self._lead = recipe.base_model or recipe.slices[0].sources[0].model
        """The model whose files the result follows."""
        self._check_layers()
        self._check_names()
        self._references = [self._reference(number, part) for number, part in enumerate(recipe.slices, start=1)]

    def stacks(self, store_blob: StoreBlob) -> Stacks:
        """Return the stacks; see `stack_models`."""
        recipe = self._recipe
        pieces = [*self._outside(first=True), *self._layers_of_slices(), *self._outside(first=False)]
        self._check_shapes(pieces)
        sources = tuple(dict.fromkeys(self._named[name].id for name in recipe.named))
        lineage = Lineage("fitted", sources=sources)
        taken = self._all_taken(pieces)
        tensors = [replace((piece.experts[0] if taken else piece.base)[1], name=piece.name) for piece in pieces]
        origins = [
            Origin(self._named[part.sources[0].model], part.sources[0].first + layer)
            for part in self._slices
            for layer in range(part.layers)
        ]
        files, order = stacked_files(self._named[self._lead], tensors, origins, self._read, store_blob)
        block_elements = self._named[self._lead].block_elements
        base = Manifest(block_elements, files, order, lineage)
        columns = range(recipe.columns)
        experts = tuple(
            Manifest(
                block_elements, (), tuple(replace(piece.experts[c][1], name=piece.name) for piece in pieces), lineage
            )
            for c in columns
        )
        if taken:
            experts = (base,)
        own = any(piece.base == piece.experts[0] for piece in pieces)
        return Stacks(
            base,
            experts,
            not taken and own and not any(self._uses_base(part) for part in self._slices),
            " + ".join(dict.fromkeys(name for name, _ in self._references)),
            tuple(" + ".join(dict.fromkeys(self._column(c))) for c in columns),
            self._named[self._lead].id,
            () if taken else self._known(pieces, base, experts),
            (self._note(),),
        )

    # -- checks --------------------------------------------------------------------------------------------

    def _check_layers(self) -> None:
        for number, part in enumerate(self._slices, start=1):
            for source in part.sources:
                there = _layers(self._named[source.model])
                if source.stop > there:
                    raise RecipeError(
                        f"slice {number} takes layers {source.first} to {source.stop - 1} of '{source.model}', which"
                        f" has {there} layers: its layer_range can end at {there}"
                    )

    def _check_names(self) -> None:
        """Check that all models name their layers alike."""
        wanted: tuple[str, str] | None = None
        for name in self._recipe.named:
            found = {stack for t in self._named[name].tensors if (stack := stack_of(t.name)) is not None}
            if len(found) > 1:
                raise RecipeError(
                    f"'{name}' has {len(found)} stacks of layers ({', '.join(sorted(found))}): slices are for models"
                    " that have one"
                )
            for stack in found:
                if wanted is not None and stack != wanted[1]:
                    raise RecipeError(
                        f"'{name}' names its layers '{stack}*' and '{wanted[0]}' '{wanted[1]}*': they cannot be stacked"
                    )
                wanted = (name, stack)

    def _check_shapes(self, pieces: list[_Piece]) -> None:
        """Check that tensors of other models have the shapes that they have in the model whose files are followed."""
        shapes: dict[str, set[tuple[int, ...]]] = {}
        for tensor in self._named[self._lead].tensors:
            shapes.setdefault(kind_of(tensor.name), set()).add(tensor.shape)
        rows: dict[int, str] = {}
        for piece in pieces:
            manifest, tensor = piece.base
            wanted = shapes.get(kind_of(piece.name), {tensor.shape})
            axis = 0
            if tensor.shape and has_rows_of_vocabulary(piece.name):
                rows.setdefault(tensor.shape[0], piece.name)
                axis = 1
            if tensor.shape[axis:] not in {shape[axis:] for shape in wanted}:
                raise RecipeError(
                    f"tensor '{tensor.name}' has shape {list(tensor.shape)} in '{self._name_of(manifest)}', which does"
                    f" not go with '{self._lead}': they cannot be stacked"
                )
        if len(rows) > 1:
            (one, first), (two, second) = list(rows.items())[:2]
            raise RecipeError(
                f"'{first}' of the stack has {one:,} rows and '{second}' {two:,}: take the first and the last slice"
                " from models of one vocabulary"
            )

    # -- what is stacked -----------------------------------------------------------------------------------

    def _uses_base(self, part: Slice) -> bool:
        return not self._recipe.method.base_is_model and self._recipe.base_of(part) is not None

    def _reference(self, number: int, part: Slice) -> tuple[str, int | None]:
        """Return the model that deltas of a slice are taken from, and its first layer there; None where it is its first
        expert."""
        recipe = self._recipe
        source = recipe.base_source(part)
        if source is not None:
            return source.model, source.first
        first = recipe.experts_of(part)[0]
        base = recipe.base_of(part)
        if base is not None:
            whole = first.first + part.layers <= _layers(self._named[base])
            alike = len({s.first for s in part.sources}) == 1
            if whole and (alike or recipe.method.base_is_model):
                return base, first.first
            if not recipe.method.base_is_model:
                raise RecipeError(
                    f"slice {number} does not say which layers of its base '{base}' it is about: name '{base}' among"
                    " its sources, with a layer_range"
                )
        return first.model, None

    def _column(self, column: int) -> Iterator[str]:
        for part in self._slices:
            experts = self._recipe.experts_of(part)
            if column < len(experts):
                yield experts[column].model

    def _base_tensor(self, number: int, layer: int | None, mine: Place) -> Place:
        """Return what an expert's tensor in a slice is compared with: its base's, or itself.

        Args:
            number: of the slice, from 0.
            layer: of the slice, or None for a tensor of no layer.
            mine: the first expert and its tensor.
        """
        name, first = self._references[number]
        reference = self._named[name]
        if first is None:
            ancestor = self._store.manifest_entry(mine[0].id).get("base")
            if ancestor is None or ancestor not in self._ids:
                return mine
            reference = self._store.manifest(str(ancestor))
            wanted = mine[1].name
        else:
            wanted = mine[1].name if layer is None else with_layer(mine[1].name, first + layer)
        twin = reference.tensor_by_name.get(wanted)
        fits = twin is not None and twin.shape == mine[1].shape and twin.dtype.is_float is mine[1].dtype.is_float
        return (reference, twin) if fits and twin is not None and not reference.is_lazy else mine

    def _piece(self, number: int, name: str, layer: int | None, lead: Source) -> _Piece:
        """Return a tensor of the result.

        Args:
            number: of the slice, from 0.
            name: of the tensor in the slice's first source.
            layer: of the slice, or None.
            lead: that source.
        """
        part = self._slices[number]
        experts = self._recipe.experts_of(part)
        twins: list[Place | None] = []
        for source in experts:
            called = name if layer is None else with_layer(name, source.first + layer)
            twin = self._named[source.model].tensor_by_name.get(called)
            twins.append(None if twin is None else (self._named[source.model], twin))
        own = (self._named[lead.model], self._named[lead.model].tensor_by_name[name])
        base_source = self._recipe.base_source(part)
        base = own if base_source is lead else self._base_tensor(number, layer, next(filter(None, twins)))
        padded = twins + [None] * (self._recipe.columns - len(twins))
        return _Piece(name, base, tuple(base if twin is None else twin for twin in padded))

    def _layers_of_slices(self) -> Iterator[_Piece]:
        done = 0
        for number, part in enumerate(self._slices):
            lead = self._recipe.base_source(part) or self._recipe.experts_of(part)[0]
            by_layer: dict[int, list[str]] = {}
            for tensor in self._named[lead.model].tensors:
                layer = layer_of(tensor.name)
                if layer is not None:
                    by_layer.setdefault(layer, []).append(tensor.name)
            for layer in range(part.layers):
                for name in by_layer.get(lead.first + layer, []):
                    yield replace(self._piece(number, name, layer, lead), name=with_layer(name, done + layer))
            done += part.layers

    def _outside(self, *, first: bool) -> Iterator[_Piece]:
        """Yield what lies before the first layer, or behind the last."""
        number = 0 if first else len(self._slices) - 1
        part = self._slices[number]
        lead = self._recipe.base_source(part) or self._recipe.experts_of(part)[0]
        model = self._named[lead.model]
        for tensor in model.tensors:
            if layer_of(tensor.name) is None and comes_first(tensor.name) is first:
                yield self._piece(number, tensor.name, None, lead)
        followed = self._named[self._lead]
        if not first and head(followed) is not None and head(model) is None and ties(model, self._read):
            shared = embedding(model)
            if shared is not None and not ties(followed, self._read):
                name = head(followed)
                assert name is not None
                yield replace(self._piece(number, shared.name, None, lead), name=name.name)

    def _all_taken(self, pieces: list[_Piece]) -> bool:
        """Tell whether the result is its only column as it stands, so that nothing has to be read."""
        recipe = self._recipe
        layers = sum(part.layers for part in self._slices)
        return recipe.columns == 1 and all(
            recipe.method.taken(recipe.numbers_of(piece.name, layers)) == 0
            and recipe.dtype in (None, piece.experts[0][1].dtype.name)
            for piece in pieces
            if piece.experts[0][1].dtype.is_float
        )

    # -- what is known of them -----------------------------------------------------------------------------

    def _known(self, pieces: list[_Piece], base: Manifest, experts: tuple[Manifest, ...]) -> Publication:
        found: list[tuple[str, bytes, bytes]] = []
        with self._store.catalog.read() as txn:
            for piece in pieces:
                found += _known_of(txn, piece, base, experts)
        return found

    def _name_of(self, manifest: Manifest) -> str:
        return next((name for name, mine in self._named.items() if mine.id == manifest.id), manifest.id[:12])

    def _note(self) -> str:
        parts = []
        for part in self._slices:
            parts.append(" and ".join(f"{_range(source)} of '{source.model}'" for source in part.sources))
        return f"the result has {sum(part.layers for part in self._slices)} layers: {', then '.join(parts)}"


def _known_of(
    txn: Transaction, piece: _Piece, base: Manifest, experts: tuple[Manifest, ...]
) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the catalog's entries about a tensor of the stacks that it has about the models' tensors."""
    below, twin = piece.base
    mine = [(base.id, below, twin), *((stack.id, *pair) for stack, pair in zip(experts, piece.experts, strict=True))]
    for stack, model, tensor in mine[1:]:
        if tensor.name == twin.name and model.id != below.id:
            old, new = statistics_key(model.id, below.id, tensor.name), statistics_key(stack, base.id, piece.name)
            for table in ("statistics", "thresholds"):
                for key, value in txn.items(table, old):
                    yield table, new + key[len(old) :], value
    for place, (one, model_a, tensor_a) in enumerate(mine):
        for two, model_b, tensor_b in mine[place:]:
            if {tensor_a.name, tensor_b.name} != {twin.name}:
                continue
            if below.id in (model_a.id if one != base.id else "", model_b.id if two != base.id else ""):
                continue  # its delta is 0, and its id stands for the base's elements
            first, second = sorted((model_a.id, model_b.id))
            old = products_key(first, second, below.id, twin.name)
            kept = txn.get("products", old)
            if kept is not None:
                first, second = sorted((one, two))
                yield "products", products_key(first, second, base.id, piece.name), kept


def _layers(model: Manifest) -> int:
    return layer_count(tensor.name for tensor in model.tensors)


def _range(source: Source) -> str:
    if source.layers == 0:
        return "none"
    return f"{source.first} to {source.stop - 1}"
