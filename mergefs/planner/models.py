"""The models of a recipe: which they are, and whether they can be merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os.path import exists

from mergefs.errors import RecipeError
from mergefs.manifest import Manifest
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
        additions: for each expert the LoRA adapter or the delta that stands on it, or None; () where no expert has one.
    """

    base: str
    experts: tuple[str, ...]
    baseless: bool
    found: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    additions: tuple[str | None, ...] = ()

    @property
    def all(self) -> set[str]:
        """Every one of them, once."""
        return {self.base, *self.experts, *(addition for addition in self.additions if addition is not None)}


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
    found = {name: _find(store, name, find) for name in dict.fromkeys(recipe.models)}
    experts = tuple(found[name][0] for name in recipe.models)
    additions = tuple(found[name][1] for name in recipe.models)
    additions = additions if any(additions) else ()
    plain = [expert for expert, addition in (found[name] for name in recipe.models) if addition is None]
    if recipe.base_model is not None:
        base, addition = found.get(recipe.base_model) or _find(store, recipe.base_model, find)
        if addition is not None:
            raise RecipeError(f"the base '{recipe.base_model}' is no whole model: name the model that it stands on")
        if recipe.method.needs_base and base in plain:
            raise RecipeError("the base is also one of the experts, under another name: leave it out of 'models'")
        return Models(base, experts, False, additions=additions)
    bases = {store.manifest_entry(expert).get("base", expert) for expert in experts}
    several = len(bases.union(experts)) > 1 or len(plain) < len(experts)
    if len(bases) == 1 and several and bases <= set(store.manifest_ids()):
        return Models(bases.pop(), experts, False, additions=additions)
    return Models(experts[0], experts, True, additions=additions)


def model_and_adapter(store: Store, name: str) -> tuple[str, str | None]:
    """Return the two parts of MODEL+ADAPTER; any other name, and one that is a ref or a path as it is, has no second
    one."""
    model, _, adapter = name.rpartition("+")
    return (name, None) if not model or not adapter or store.has(name) or exists(name) else (model, adapter)


def _find(store: Store, name: str, find: Callable[[str], str]) -> tuple[str, str | None]:
    """Return the manifest ids of a model as a recipe names it, and of what stands on it.

    Raises:
        NotFoundError: when it is not in the repository.
        RecipeError: when an adapter is named as a model.
    """
    model, adapter = model_and_adapter(store, name)
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
