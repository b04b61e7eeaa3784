"""From a recipe to a plan: which models, which numbers, and which expert blocks within the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mergefs.blocks.reader import Kind, ReadCounter
from mergefs.errors import BudgetError, RecipeError
from mergefs.manifest import Manifest, Tensor
from mergefs.merge.method import Method
from mergefs.merge.parameters import INT8_MASK
from mergefs.planner.allocate import Candidates, base_cost, candidates, choose
from mergefs.planner.budget import parse_budget
from mergefs.planner.measured import Measurer
from mergefs.planner.plan import Plan, TensorPlan
from mergefs.recipe import Recipe
from mergefs.statistics import trim_rank
from mergefs.store import Store


@dataclass(frozen=True)
class Models:
    """The models of a recipe, by manifest id.

    Attributes:
        base: what deltas are taken from.
        experts: in the recipe's order.
        baseless: there is no base, so that deltas are taken from the first expert, whose bytes then count as an
            expert's.
    """

    base: str
    experts: tuple[str, ...]
    baseless: bool

    @property
    def all(self) -> set[str]:
        """Every one of them, once."""
        return {self.base, *self.experts}


@dataclass(frozen=True)
class Planned:
    """A plan and what the planner knows about it.

    Attributes:
        plan: the plan.
        base: its base's manifest.
        experts: its experts' manifests.
        expert_raw_bytes: what a naive merge would read: the tensor bytes of all experts.
        budget_bytes: the budget in bytes, or None.
        expert_bytes: physical bytes that the merge will read of experts, at most.
        candidates: every changed expert block, with its cost, its worth and whether it is read.
    """

    plan: Plan
    base: Manifest
    experts: tuple[Manifest, ...]
    expert_raw_bytes: int
    budget_bytes: int | None
    expert_bytes: int
    candidates: Candidates


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
    ids = {name: find(name) for name in dict.fromkeys(recipe.models)}
    experts = tuple(ids[name] for name in recipe.models)
    if recipe.base_model is not None:
        base = ids.get(recipe.base_model) or find(recipe.base_model)
        if recipe.method.needs_base and base in experts:
            raise RecipeError("the base is also one of the experts, under another name: leave it out of 'models'")
        return Models(base, experts, False)
    bases = {store.manifest_entry(expert).get("base", expert) for expert in experts}
    if len(bases) == 1 and len(bases.union(experts)) > 1 and bases <= set(store.manifest_ids()):
        return Models(bases.pop(), experts, False)
    return Models(experts[0], experts, True)


def make_plan(
    store: Store, recipe: Recipe, models: Models, *, budget: str | None, seed: int, counter: ReadCounter
) -> Planned:
    """Resolve a recipe.

    Args:
        store: the repository.
        recipe: what is asked for.
        models: its models (see `find_models`), under a lease of the caller's.
        budget: `10%`, `2GiB`, or None for everything.
        seed: of random methods.
        counter: where metadata, and expert bytes read for statistics that are not known yet, are counted; its
            expert limit is set to the budget.

    Raises:
        RecipeError: when the models do not fit each other.
        BudgetError: when the budget is malformed, or cannot be planned for.
    """
    manifests = {identity: store.manifest(identity) for identity in models.all}
    counter.add(Kind.METADATA, sum(len(m.encoded) for m in manifests.values()))
    base, experts = manifests[models.base], tuple(manifests[e] for e in models.experts)
    for name, expert in zip(recipe.models, experts, strict=True):
        check_fit(base, recipe.base_model or models.base[:12], expert, name)
    raw = sum(expert.tensor_bytes for expert in experts)
    limit = None if budget is None else parse_budget(budget, raw)
    draft = _draft(recipe, models, seed)
    found = candidates(store.catalog, base, experts, draft.weights)
    reference = base_cost(store.catalog, base) if models.baseless else 0
    spare = None if limit is None else limit - reference - found.total_cost
    left = None if spare is None else max(0, spare)
    measured = Measurer(store, models.base, models.experts, counter, spare=left, cost=found.cost_of)
    if limit is not None:
        counter.limit_expert(limit)
    if limit is not None and spare is not None and spare < 0:
        if models.baseless:
            raise BudgetError(
                "these models have no common base in the repository, so a budget cannot choose among their"
                " deltas: ingest them with --base, or merge without a budget"
            )
        found = choose(found, measured, recipe.method.importance(draft), limit)
    depths = {name: found.depths(name) for name in found.tensors}
    tensors = tuple(
        TensorPlan(tensor.name, depths[tensor.name], _thresholds(draft, recipe.method, measured, tensor))
        for tensor in base.tensors
        if any(mine.strip("0") for mine in depths.get(tensor.name, ()))
    )
    plan = replace(draft, budget=None if found.everything else limit, tensors=tensors)
    return Planned(plan, base, experts, raw, limit, found.chosen_cost + reference, found)


def check_fit(base: Manifest, base_name: str, expert: Manifest, name: str) -> None:
    """Check that an expert has the base's tensors, in the same shapes.

    Raises:
        RecipeError: when not, naming the tensor and both shapes.
    """
    if expert.is_lazy or base.is_lazy:
        lazy = name if expert.is_lazy else base_name
        raise RecipeError(f"'{lazy}' is a lazy merge: 'mergefs materialize {lazy}' makes it usable in a recipe")
    if base.block_elements != expert.block_elements:
        raise RecipeError(f"'{base_name}' and '{name}' were ingested with different block sizes")
    for tensor in base.tensors:
        twin = expert.tensor_by_name.get(tensor.name)
        if twin is None:
            raise RecipeError(f"tensor '{tensor.name}' is in '{base_name}' and not in '{name}': they cannot be merged")
        if twin.shape != tensor.shape:
            raise RecipeError(
                f"tensor '{tensor.name}' has shape {list(tensor.shape)} in '{base_name}' and"
                f" {list(twin.shape)} in '{name}': they cannot be merged"
            )
        if twin.dtype.is_float is not tensor.dtype.is_float:
            raise RecipeError(
                f"tensor '{tensor.name}' is {tensor.dtype.name} in '{base_name}' and {twin.dtype.name} in '{name}':"
                " they cannot be merged"
            )
    for extra in expert.tensors:
        if extra.name not in base.tensor_by_name:
            raise RecipeError(f"tensor '{extra.name}' is in '{name}' and not in '{base_name}': they cannot be merged")


def _draft(recipe: Recipe, models: Models, seed: int) -> Plan:
    """Return the plan without its tensors."""
    return Plan(
        recipe.method.name,
        models.base,
        models.experts,
        models.baseless,
        tuple(float(p["weight"]) for p in recipe.parameters),
        tuple(float(p.get("density", 1.0)) for p in recipe.parameters),
        {k: v if isinstance(v, bool) else float(v) for k, v in recipe.shared.items() if k != INT8_MASK},
        recipe.dtype,
        seed if recipe.method.is_random else 0,
        None,
        (),
        recipe.text,
    )


def _thresholds(draft: Plan, method: Method, measured: Measurer, tensor: Tensor) -> tuple[float, ...]:
    if not method.trims or all(d >= 1.0 for d in draft.densities):
        return ()
    return tuple(
        measured.threshold(expert, tensor, trim_rank(density, tensor.elements))
        if 0.0 < density < 1.0
        else (0.0 if density else float("inf"))
        for expert, density in enumerate(draft.densities)
    )
