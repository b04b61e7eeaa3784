"""The models of a recipe: which they are, and whether they can be merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os.path import exists

from mergefs.errors import RecipeError
from mergefs.manifest import FileRecipe, Manifest
from mergefs.planner.adapters import is_adapter, is_delta
from mergefs.recipe import Recipe
from mergefs.store import Store


@dataclass(frozen=True)
class Models:
    """The models of a recipe, by manifest id.

    Attributes:
        base: what deltas are taken from.
        experts: in the recipe's order.
        baseless: there is no base, so that deltas are taken from the first expert, whose bytes then count as an
            expert's.
        found: base and experts as the recipe names them, where these are fitted ones; else ().
        notes: sentences about what was fitted, for whoever plans with them.
        named: each model by the name that the recipe has for it; of MODEL+ADAPTER the model.
        additions: by such a name the LoRA adapter or the delta that stands on it.
        tokenizer: whose tokenizer the result gets; None where the recipe does not say.
        tokenizer_files: of that tokenizer, where they are not the base's.
        chat_template: the text of the one it gets; None for that of its tokenizer.
    """

    base: str
    experts: tuple[str, ...]
    baseless: bool
    found: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    additions: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str | None = None
    tokenizer_files: tuple[FileRecipe, ...] | None = None
    chat_template: str | None = None

    @property
    def all(self) -> set[str]:
        """Every one of them, once."""
        tokenizer = set() if self.tokenizer is None else {self.tokenizer}
        return {self.base, *self.experts, *self.named.values(), *self.additions.values()} | tokenizer


def find_models(store: Store, recipe: Recipe, lookup: Callable[[str], str] | None = None) -> Models:
    """Look the models of a recipe up, each once: a ref may move afterwards.

    Without a `base_model`, the base is the model that all the others were ingested against.

    Args:
        lookup: finds the manifest id of a model as the recipe names it; by default the store's `resolve`.

    Raises:
        NotFoundError: when a model is not in the repository.
        RecipeError: when a model is both base and expert of a method of deltas.
    """
    find = lookup or store.resolve
    both = {name: _find(store, recipe, name, find) for name in recipe.named}
    ids = {name: model for name, (model, _) in both.items()}
    additions = {name: addition for name, (_, addition) in both.items() if addition is not None}
    tokenizer = None if recipe.tokenizer is None else ids.get(recipe.tokenizer_of) or find(recipe.tokenizer_of)
    experts = tuple(ids[name] for name in recipe.models)
    for name in (recipe.base_model, *(part.base_model for part in recipe.slices or ())):
        if name in additions:
            raise RecipeError(f"the base '{name}' is no whole model: name the model that it stands on")
    base, baseless = _base(store, recipe, ids, experts, additions)
    return Models(base, experts, baseless, named=ids, additions=additions, tokenizer=tokenizer)


def _base(
    store: Store, recipe: Recipe, ids: Mapping[str, str], experts: tuple[str, ...], additions: Mapping[str, str]
) -> tuple[str, bool]:
    """Return what deltas are taken from, and whether it is the first expert for want of a base."""
    plain = [ids[name] for name in recipe.models if name not in additions]
    if recipe.base_model is not None:
        base = ids[recipe.base_model]
        if recipe.method.needs_base and recipe.slices is None and base in plain:
            raise RecipeError("the base is also one of the experts, under another name: leave it out of 'models'")
        return base, False
    if recipe.names_a_base:
        return next(ids[part.base_model] for part in recipe.slices or () if part.base_model is not None), False
    bases = {store.manifest_entry(expert).get("base", expert) for expert in experts}
    several = len(bases.union(experts)) > 1 or len(plain) < len(experts)
    if len(bases) == 1 and several and bases <= set(store.manifest_ids()):
        return bases.pop(), False
    return experts[0], True


def model_and_adapter(store: Store, name: str, adapters: Mapping[str, tuple[str, str]]) -> tuple[str, str | None]:
    """Return the two parts of MODEL+ADAPTER, as a recipe names them; any other name, and one that is a ref or a path as
    it is, has no second one.

    Args:
        store: the repository.
        name: of a model.
        adapters: see `Recipe.adapters`.
    """
    return (name, None) if name not in adapters or store.has(name) or exists(name) else adapters[name]


def _find(store: Store, recipe: Recipe, name: str, find: Callable[[str], str]) -> tuple[str, str | None]:
    """Return the manifest ids of a model as a recipe names it, and of what stands on it.

    Raises:
        NotFoundError: when it is not in the repository.
        RecipeError: when an adapter is named as a model.
    """
    model, adapter = model_and_adapter(store, name, recipe.adapters)
    identity = find(model)
    if is_adapter(store.manifest(identity)):
        raise RecipeError(f"'{model}' is a LoRA adapter and no whole model: name it as BASE+{model}")
    if adapter is not None:
        if is_delta(store, identity):
            raise RecipeError(f"'{model}' is a delta, and an adapter cannot stand on it: merge it into a model first")
        return identity, find(adapter)
    if is_delta(store, identity):
        return str(store.manifest_entry(identity)["base"]), identity
    return identity, None


def check_mergeable(base: Manifest, base_name: str, expert: Manifest, name: str) -> None:
    """Check that two models can be read block by block beside each other.

    Raises:
        RecipeError: when not.
    """
    if expert.is_lazy or base.is_lazy:
        lazy = name if expert.is_lazy else base_name
        raise RecipeError(f"'{lazy}' is a lazy merge: 'mergefs materialize {lazy}' makes it usable in a recipe")
    if base.block_elements != expert.block_elements:
        raise RecipeError(f"'{base_name}' and '{name}' were ingested with different block sizes")
