"""Fitting models to each other: manifests under the names and shapes that the result has, so that they can be merged.

What is fitted, and how, is in spec/merging.md. Fitted models share all blocks with the models that they are made from,
but for those in which rows of one model meet rows of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mergefs.blocks import codecs
from mergefs.blocks.floats import from_float, to_float
from mergefs.blocks.reader import BlockReader, Kind, ReadCounter
from mergefs.blocks.writer import BlockWriter
from mergefs.catalog.leases import Lease, NoLease
from mergefs.dtypes import DTYPES, DType
from mergefs.errors import RecipeError
from mergefs.hashing import digest
from mergefs.manifest import Blob, Difference, FileRecipe, Lineage, Manifest, Tensor
from mergefs.planner.adapters import stand_on
from mergefs.planner.measured import Measurer
from mergefs.planner.models import Models, check_mergeable, model_and_adapter
from mergefs.planner.relaid import relaid
from mergefs.planner.stacking import is_whole, stack_models
from mergefs.planner.tokenizers import choose_template, fit_tokenizer
from mergefs.planner.vocabulary import embedding, has_rows_of_vocabulary, head, ties
from mergefs.recipe import Recipe
from mergefs.statistics.sample import positions
from mergefs.statistics.tensor import statistics_key
from mergefs.store import Publication, Store

_SHOWN = 3


def fit_models(
    store: Store, recipe: Recipe, models: Models, lease: Lease | NoLease, counter: ReadCounter, *, strict: bool = False
) -> Models:
    """Return the models as a plan takes them: all with the base's tensors, in the base's shapes.

    Args:
        store: the repository.
        recipe: that names them.
        models: as they were found.
        lease: on them, by which fitted ones are protected as well.
        counter: where the bytes are counted that are read to compose blocks.
        strict: refuse to fit anything.

    Raises:
        RecipeError: when they cannot be fitted, or may not be.
    """
    with Fitter(store, lease, counter) as fitter:
        named = {name: fitter.standing(recipe, models, name) for name in models.named}
        together = fitter.together(recipe, models, named)
        base, experts, pairs = together.base, [e for _, e in together.experts], together.experts
        for name, expert in pairs:
            _check_kinship(base, together.base_name, expert, name)
        notes: list[str] = []
        if not all(_same_tensors(base, expert) for expert in experts) or fitter.redundant_head(base):
            base, notes = fitter.base(together.base, together.base_name, pairs)
            experts = []
            for name, expert in pairs:
                found, more = fitter.expert(base, together.base_name, expert, name)
                experts.append(found)
                notes += more
            if strict and notes:
                raise RecipeError(f"{notes[0]}; --strict-shapes refuses that: leave it out to merge them so")
            fitter.keep(base, together.base)
            for found, (_, expert) in zip(experts, pairs, strict=True):
                fitter.keep(found, expert, (together.base, base))
        files: tuple[FileRecipe, ...] | None = None
        about_tokens: list[str] = []
        if models.tokenizer is not None:
            chosen = store.manifest(models.tokenizer)
            files, about_tokens = fit_tokenizer(recipe, chosen, base, named, fitter.read)
        template = choose_template(recipe, named, fitter.read)
    found_as = (together.followed, *(models.additions.get(name, models.named[name]) for name in recipe.models))
    unchanged = (base.id, *(e.id for e in experts)) == (models.base, *models.experts)
    return replace(
        models,
        base=base.id,
        experts=tuple(expert.id for expert in experts),
        baseless=together.baseless,
        found=() if unchanged else found_as,
        notes=tuple(dict.fromkeys((*together.notes, *notes, *about_tokens))),
        tokenizer_files=files,
        chat_template=template,
    )


@dataclass(frozen=True)
class _Together:
    """The models that are to be fitted to each other.

    Attributes:
        base, base_name: what deltas are taken from, and what messages call it.
        experts: names and models.
        baseless: see `Models`.
        followed: id of the model whose files the result follows.
        notes: sentences about what was stacked.
    """

    base: Manifest
    base_name: str
    experts: tuple[tuple[str, Manifest], ...]
    baseless: bool
    followed: str
    notes: tuple[str, ...] = ()


def prepare(store: Store, base: Manifest, expert: Manifest, lease: Lease) -> None:
    """Fit an expert that was just ingested to its base, and measure the tensors that only then can be compared, so that
    merges under a budget need not read them. Does nothing for models that fit already, or cannot be merged.

    The fitted model is kept as long as both are.
    """
    if _same_tensors(base, expert) or not _are_kin(base, expert):
        return
    with Fitter(store, lease, ReadCounter()) as fitter:
        try:
            target, _ = fitter.base(base, "", [("", expert)])
            fitted, _ = fitter.expert(target, "", expert, "")
        except RecipeError:
            return
        fitter.keep(target, base, because_of=(base, expert))
        fitter.keep(fitted, expert, (base, target), because_of=(base, expert))
    _measure(store, target, fitted)


def prepare_delta(store: Store, base: Manifest, delta: Manifest, name: str, lease: Lease) -> None:
    """Make the expert that a delta that was just ingested stands for, and measure it; see `prepare`."""
    with Fitter(store, lease, ReadCounter()) as fitter:
        fitted = stand_on(store, base, delta, name, fitter.reader)
        fitter.keep(fitted, base, because_of=(base, delta))
    _measure(store, base, fitted)


def _measure(store: Store, base: Manifest, expert: Manifest) -> None:
    """Put statistics of an expert's tensors into the catalog."""
    measured = Measurer(store, base.id, (expert.id,), ReadCounter())
    for tensor in expert.tensors:
        if tensor.dtype.is_float and tensor.blocks:
            measured.statistics(0, tensor.name)


@dataclass(frozen=True)
class _Rows:
    """A tensor of another model that stands for one of the base's.

    Attributes:
        tensor: of the other model.
        common: how many elements both have, from the first one on.
    """

    tensor: Tensor
    common: int


class Fitter:
    """Makes fitted manifests. To be used in a `with` block, in which nothing it has stored is collected.

    Args:
        store: the repository.
        lease: of the caller, on all models.
        counter: see `fit_models`.

    Attributes:
        reader: counts there.
    """

    def __init__(self, store: Store, lease: Lease | NoLease, counter: ReadCounter) -> None:
        self._store = store
        self._lease = lease
        self.reader = BlockReader(store.catalog, store.backend, counter)
        self._writer: BlockWriter | None = None

    def __enter__(self) -> Fitter:
        if isinstance(self._lease, Lease):
            store = self._store
            self._writer = BlockWriter(
                store.catalog, store.backend, store.path / "tmp", self._lease, sync=store.sync
            ).__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        if self._writer is not None:
            self._writer.__exit__(*reason)  # type: ignore[arg-type]

    def standing(self, recipe: Recipe, models: Models, name: str) -> Manifest:
        """Return a model as a recipe names it: with the adapter or the delta that stands on it.

        Raises:
            RecipeError, CheckpointError: see `stand_on`.
        """
        store = self._store
        model = store.manifest(models.named[name])
        if name not in models.additions:
            return model
        other, base = store.manifest(models.additions[name]), store.manifest(models.base)
        found = stand_on(store, model, other, model_and_adapter(store, name, recipe.adapters)[1] or name, self.reader)
        self.keep(found, model, (base, base), because_of=(model, other))
        return found

    def together(self, recipe: Recipe, models: Models, named: Mapping[str, Manifest]) -> _Together:
        """Return the models that a recipe merges: as it names them, or stacked from its slices.

        Args:
            recipe: that names them.
            models: as they were found.
            named: every model by its name in the recipe.

        Raises:
            RecipeError: when a model cannot be read beside the others, or the slices cannot be stacked.
        """
        base_name = recipe.base_model or models.base[:12]
        base = self._store.manifest(models.base)
        for name, model in named.items():
            check_mergeable(base, base_name, model, name)
        if recipe.slices is None or is_whole(recipe, named):
            names = recipe.models
            if recipe.slices is not None:
                names = tuple(source.model for source in recipe.experts_of(recipe.slices[0]))
            own = recipe.base_of(recipe.slices[0]) if recipe.slices is not None else None
            if own is not None:
                base, base_name = named[own], own
            experts = tuple((name, named[name]) for name in names)
            return _Together(base, base_name, experts, models.baseless, base.id)
        stacks = stack_models(self._store, recipe, named, self.read, self._store_blob)
        if self._writer is not None:
            self._writer.flush()
        for stack in stacks.all:
            entry: dict[str, object] = {"raw_bytes": stack.raw_bytes}
            self._store.keep(stack, self._lease, entry, stacks.known if stack is stacks.all[-1] else ())
        experts = tuple(zip(stacks.names, stacks.experts, strict=True))
        return _Together(stacks.base, stacks.base_name, experts, stacks.baseless, stacks.followed, stacks.notes)

    def keep(
        self,
        fitted: Manifest,
        model: Manifest,
        bases: tuple[Manifest, Manifest] | None = None,
        because_of: tuple[Manifest, ...] = (),
    ) -> None:
        """Store a fitted manifest, unless it is the model itself.

        Args:
            fitted: what was made.
            model: what it was made from.
            bases: an expert's base, and the fitted one: statistics that are known of the one pair are the other's too.
            because_of: models for whose sake gc is to keep it.
        """
        if fitted.id == model.id and (bases is None or bases[0].id == bases[1].id):
            return
        if self._writer is not None:
            self._writer.flush()
        extra = () if bases is None else self._known_statistics(fitted, model, *bases)
        entry: dict[str, object] = {"raw_bytes": fitted.raw_bytes}
        if because_of and fitted.id != model.id:
            entry["kept_for"] = [model.id for model in because_of]
        self._store.keep(fitted, self._lease, entry, extra)

    def redundant_head(self, base: Manifest) -> Tensor | None:
        """Return the copy of its embedding that a model has as a head though its config says that it ties them."""
        own = head(base)
        return own if own is not None and embedding(base) is not None and ties(base, self.read) else None

    def base(self, base: Manifest, name: str, experts: Sequence[tuple[str, Manifest]]) -> tuple[Manifest, list[str]]:
        """Return the base with the tensors of the result, and sentences about what was done.

        Tensors that it lacks come from the first expert that has them; a head that it ties to its embedding is left
        out.
        """
        notes = []
        dropped: set[str] = set()
        tied = ties(base, self.read)
        copy = self.redundant_head(base)
        if copy is not None:
            dropped.add(copy.name)
            notes.append(f"'{name}' ties its head to its embedding: its copy '{copy.name}' is left out")
        added: dict[str, Tensor] = {}
        for whose, expert in experts:
            for tensor in expert.tensors:
                if tensor.name in base.tensor_by_name or tensor.name in added:
                    continue
                if tied and tensor is head(expert):
                    same = _same_blocks(tensor, embedding(expert))
                    what = "the same as its embedding" if same else "not the same as its embedding, and is left out"
                    notes.append(f"'{name}' ties its head to its embedding; '{tensor.name}' of '{whose}' is {what}")
                    continue
                added[tensor.name] = replace(tensor, added=None)  # a base is what its files hold
                notes.append(f"tensor '{tensor.name}' is in '{whose}' and not in '{name}': taken from '{whose}'")
        if not dropped and not added:
            return base, notes
        files, tensors = relaid(base, dropped, list(added.values()), self.read, self._store_blob)
        sources = [base.id, *(e.id for _, e in experts if any(t.name in e.tensor_by_name for t in added.values()))]
        lineage = Lineage("fitted", sources=tuple(dict.fromkeys(sources)))
        return Manifest(base.block_elements, files, tensors, lineage), _shortened(notes)

    def expert(self, base: Manifest, base_name: str, expert: Manifest, name: str) -> tuple[Manifest, list[str]]:
        """Return an expert with the base's tensors in the base's shapes, and sentences about what was done.

        Raises:
            RecipeError: when a tensor's shape does not fit.
        """
        if _same_tensors(base, expert):
            return expert, []
        notes: list[str] = []
        tensors = []
        for tensor in base.tensors:
            twin = self._twin(base, tensor, expert)
            if twin is None:
                tensors.append(tensor)
                notes.append(f"tensor '{tensor.name}' is not in '{name}': kept as it is")
                continue
            if twin.name != tensor.name:
                notes.append(f"'{name}' ties its head to its embedding: '{twin.name}' is merged as '{tensor.name}'")
            if twin.dtype.is_float is not tensor.dtype.is_float:
                raise RecipeError(
                    f"tensor '{tensor.name}' is {tensor.dtype.name} in '{base_name}' and {twin.dtype.name} in '{name}':"
                    " they cannot be merged"
                )
            if twin.shape == tensor.shape:
                tensors.append(replace(twin, name=tensor.name))
                continue
            if not tensor.dtype.is_float:
                tensors.append(tensor)
                continue
            if not has_rows_of_vocabulary(tensor.name) or twin.shape[1:] != tensor.shape[1:] or not tensor.shape:
                raise RecipeError(
                    f"tensor '{tensor.name}' has shape {list(tensor.shape)} in '{base_name}' and"
                    f" {list(twin.shape)} in '{name}': they cannot be merged"
                )
            if isinstance(twin.added, Difference) or (twin.added and twin.added.magnitude and twin.added.transposed):
                raise RecipeError(
                    f"tensor '{tensor.name}' has shape {list(tensor.shape)} in '{base_name}' and {list(twin.shape)} in"
                    f" '{name}', which is a delta or a DoRA adapter: they cannot be merged"
                )
            tensors.append(self._fit_rows(tensor, twin))
            notes.append(_about_rows(tensor, base_name, twin, name))
        lineage = Lineage("fitted", sources=(expert.id, base.id))
        return Manifest(base.block_elements, (), tuple(tensors), lineage), _shortened(notes)

    def _twin(self, base: Manifest, tensor: Tensor, expert: Manifest) -> Tensor | None:
        twin = expert.tensor_by_name.get(tensor.name)
        if twin is None and tensor is head(base) and ties(expert, self.read):
            return embedding(expert)
        return twin

    def _fit_rows(self, tensor: Tensor, twin: Tensor) -> Tensor:
        """Return the twin with the base's number of rows: its own as far as it has them, then the base's."""
        slab = tensor.elements // tensor.shape[0]
        rows = _Rows(twin, slab * min(tensor.shape[0], twin.shape[0]))
        dtype = twin.dtype if twin.dtype is tensor.dtype else _wider(twin.dtype, tensor.dtype)
        theirs = twin.grid(self._store.block_elements)
        blocks = []
        for number, (first, stop) in enumerate(tensor.grid(self._store.block_elements).elements()):
            same_extent = number < len(theirs) and theirs.extent(number) == (first, stop)
            if same_extent and stop <= rows.common and twin.dtype is dtype:
                blocks.append(twin.blocks[number])
            elif first >= rows.common and tensor.dtype is dtype:
                blocks.append(tensor.blocks[number])
            else:
                blocks.append(self._compose(tensor, rows, number, (first, stop), dtype))
        return Tensor(tensor.name, dtype, tensor.shape, tuple(blocks), twin.added)

    def _compose(self, tensor: Tensor, rows: _Rows, number: int, extent: tuple[int, int], dtype: DType) -> str:
        """Store the block in which the expert's rows end and the base's go on, and return its id."""
        first, stop = extent
        middle = min(max(rows.common, first), stop)
        below = bytes.fromhex(tensor.blocks[number] or "")
        known = self.reader.read_with_root(below, Kind.BASE)
        raw = b""
        if middle > first:
            block = rows.tensor.blocks[number]
            assert block is not None
            theirs = bytes(self.reader.read(bytes.fromhex(block), Kind.EXPERT, known))
            raw = _cast(theirs[: (middle - first) * rows.tensor.dtype.itemsize], rows.tensor.dtype, dtype)
        raw += _cast(bytes(known[below])[(middle - first) * tensor.dtype.itemsize :], tensor.dtype, dtype)
        made = digest(raw)
        writer = self._writable()
        if writer.known(made):
            writer.reuse(made)
        elif dtype is not tensor.dtype:
            writer.add(made, codecs.encode(raw, dtype, exact=self._store.exact), raw_length=len(raw), dtype=dtype.code)
        else:
            root, root_raw = next(iter(known.items()))
            sample = positions(tensor.elements, first, stop)
            encoded = codecs.encode_tiered(raw, dtype, root_raw, self._store.exact, sample)
            writer.add(made, encoded, raw_length=len(raw), dtype=dtype.code, base=root)
        return made.hex()

    def _known_statistics(self, fitted: Manifest, model: Manifest, base: Manifest, target: Manifest) -> Publication:
        """Return the catalog's entries for tensors that are the same in both pairs of models."""
        found = []
        with self._store.catalog.read() as txn:
            for tensor in fitted.tensors:
                if model.tensor_by_name.get(tensor.name) != tensor:
                    continue
                if base.tensor_by_name.get(tensor.name) != target.tensor_by_name[tensor.name]:
                    continue
                old = statistics_key(model.id, base.id, tensor.name)
                new = statistics_key(fitted.id, target.id, tensor.name)
                for table in ("statistics", "thresholds"):
                    found += [(table, new + key[len(old) :], value) for key, value in txn.items(table, old)]
        return found

    def read(self, blob: Blob) -> bytes:
        """Return the bytes of a small file's blob."""
        return bytes(self.reader.read(bytes.fromhex(blob.block), Kind.METADATA))

    def _store_blob(self, data: bytes) -> Blob:
        block, writer = digest(data), self._writable()
        if writer.known(block):
            writer.reuse(block)
        else:
            u8 = DTYPES["U8"]
            writer.add(block, codecs.encode(data, u8), raw_length=len(data), dtype=u8.code)
        return Blob(block.hex(), len(data))

    def _writable(self) -> BlockWriter:
        # Asking for a lease says what is wrong where the repository is open for reading only.
        return self._writer or BlockWriter(
            self._store.catalog, self._store.backend, self._store.path / "tmp", self._store.lease("fit")
        )


def _same_tensors(base: Manifest, expert: Manifest) -> bool:
    """Tell whether two models have the same tensors, in the same shapes and of the same kinds."""
    return {(t.name, t.shape, t.dtype.is_float) for t in base.tensors} == {
        (t.name, t.shape, t.dtype.is_float) for t in expert.tensors
    }


def _are_kin(base: Manifest, expert: Manifest) -> bool:
    """Tell whether two models have at least half of the base's tensors in common."""
    return 2 * sum(tensor.name in expert.tensor_by_name for tensor in base.tensors) >= len(base.tensors)


def _check_kinship(base: Manifest, base_name: str, expert: Manifest, name: str) -> None:
    """Check that two models are of one architecture.

    Raises:
        RecipeError: when not.
    """
    if not _are_kin(base, expert):
        common = sum(tensor.name in expert.tensor_by_name for tensor in base.tensors)
        raise RecipeError(
            f"'{name}' has {common} of the {len(base.tensors)} tensors of '{base_name}', the first that it lacks is"
            f" '{next(t.name for t in base.tensors if t.name not in expert.tensor_by_name)}': they cannot be merged"
        )


def _same_blocks(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and (tensor.dtype, tensor.shape, tensor.blocks) == (other.dtype, other.shape, other.blocks)


def _about_rows(tensor: Tensor, base_name: str, twin: Tensor, name: str) -> str:
    mine, theirs = tensor.shape[0], twin.shape[0]
    rest = (
        f"rows {theirs:,} to {mine - 1:,} of '{base_name}' are kept"
        if theirs < mine
        else f"rows {mine:,} to {theirs - 1:,} of '{name}' are left out"
    )
    return (
        f"tensor '{tensor.name}' has {mine:,} rows in '{base_name}' and {theirs:,} in '{name}': the first"
        f" {min(mine, theirs):,} are merged, {rest}"
    )


def _wider(first: DType, second: DType) -> DType:
    """Return a float dtype that holds what both do."""
    return DTYPES["F64"] if "F64" in (first.name, second.name) else DTYPES["F32"]


def _cast(raw: bytes, dtype: DType, wanted: DType) -> bytes:
    return raw if dtype is wanted else from_float(to_float(raw, dtype), wanted)


def _shortened(notes: Iterable[str]) -> list[str]:
    """Return the notes, with only the first few of those that differ by the tensor's name alone."""
    shown: list[str] = []
    alike: dict[str, int] = {}
    for note in notes:
        kind = re.sub("^tensor '[^']*'", "tensors", note)
        alike[kind] = alike.get(kind, 0) + 1
        if alike[kind] <= _SHOWN:
            shown.append(note)
    return shown + [f"and {count - _SHOWN} more: {kind}" for kind, count in alike.items() if count > _SHOWN]
