"""From a recipe to a plan: which models, which numbers, and which expert blocks within the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mergefs.blocks.reader import Kind, ReadCounter
from mergefs.errors import BudgetError, RecipeError
from mergefs.manifest import Manifest, Tensor
from mergefs.merge import registry
from mergefs.planner.allocate import Candidates, base_cost, candidates, choose
from mergefs.planner.budget import parse_budget
from mergefs.planner.measured import Measurer
from mergefs.planner.plan import Plan, TensorPlan
from mergefs.recipe import METHODS, Recipe
from mergefs.statistics import trim_rank
from mergefs.store import Store

RANDOM_METHODS = ("dare_linear", "dare_ties")


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
        notes: what the user should know, a sentence each.
    """

    plan: Plan
    base: Manifest
    experts: tuple[Manifest, ...]
    expert_raw_bytes: int
    budget_bytes: int | None
    expert_bytes: int
    candidates: Candidates
    notes: tuple[str, ...] = ()


def make_plan(
    store: Store,
    recipe: Recipe,
    *,
    budget: str | None,
    seed: int,
    counter: ReadCounter,
    lookup: Callable[[str], str] | None = None,
) -> Planned:
    """Resolve a recipe.

    Args:
        store: the repository; its models must not be collected meanwhile.
        recipe: what is asked for.
        budget: `10%`, `2GiB`, or None for everything.
        seed: of random methods.
        counter: where metadata, and expert bytes read for statistics that are not known yet, are counted.
        lookup: finds the manifest id of a model as the recipe names it; by default the store's `resolve`.

    Raises:
        RecipeError: when the models do not fit each other.
        NotFoundError: when a model is not in the repository.
        BudgetError: when the budget is malformed, or cannot be planned for.
    """
    find = lookup or store.resolve
    names = dict.fromkeys(([recipe.base_model] if recipe.base_model else []) + list(recipe.models))
    ids = {name: find(name) for name in names}
    expert_ids = tuple(ids[name] for name in recipe.models)
    base_id = ids[recipe.base_model] if recipe.base_model else common_base(store, expert_ids)
    if METHODS[recipe.method.name].needs_base and base_id in expert_ids:
        raise RecipeError("the base is also one of the experts, under another name: leave it out of 'models'")
    manifests = {identity: store.manifest(identity) for identity in {base_id, *expert_ids}}
    counter.add(Kind.METADATA, sum(len(m.encoded) for m in manifests.values()))
    base, experts = manifests[base_id], tuple(manifests[e] for e in expert_ids)
    labels = dict(zip(expert_ids, recipe.models, strict=True))
    for identity, expert in zip(expert_ids, experts, strict=True):
        check_fit(base, recipe.base_model or base_id[:12], expert, labels[identity])
    raw = sum(expert.tensor_bytes for expert in experts)
    limit = None if budget is None else parse_budget(budget, raw)
    draft = _draft(recipe, base_id, expert_ids, seed)
    found = candidates(store.catalog, base, experts, draft.weights)
    # Without a base, deltas are taken from one of the experts, whose bytes then count as an expert's.
    reference = base_cost(store.catalog, base) if base_id in expert_ids else 0
    spare = None if limit is None else limit - reference - found.total_cost
    measured = Measurer(
        store, base_id, expert_ids, counter, spare=None if spare is None else max(0, spare), cost=found.cost_of
    )
    if limit is not None and spare is not None and spare < 0:
        if base_id in expert_ids:
            raise BudgetError(
                "these models have no common base in the repository, so a budget cannot choose among their"
                " deltas: ingest them with --base, or merge without a budget"
            )
        found = choose(found, measured, registry.method(recipe.method.name).importance(draft), limit)
    binding = not found.everything
    depths = {name: found.depths(name) for name in found.tensors}
    tensors = tuple(
        TensorPlan(tensor.name, depths[tensor.name], _thresholds(draft, measured, tensor))
        for tensor in base.tensors
        if any(mine.strip("0") for mine in depths.get(tensor.name, ()))
    )
    plan = Plan(
        draft.method,
        base_id,
        expert_ids,
        draft.weights,
        draft.densities,
        draft.settings,
        draft.dtype,
        draft.seed,
        limit if binding else None,
        tensors,
        recipe.text,
    )
    return Planned(plan, base, experts, raw, limit, found.chosen_cost + reference, found)


def common_base(store: Store, experts: tuple[str, ...]) -> str:
    """Return the manifest that all experts were ingested against, or the first expert where there is none."""
    bases = {store.manifest_entry(expert).get("base", expert) for expert in experts}
    if len(bases) == 1:
        found = str(bases.pop())
        if found in set(store.manifest_ids()):
            return found
    return experts[0]


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


def _draft(recipe: Recipe, base: str, experts: tuple[str, ...], seed: int) -> Plan:
    """Return the plan without its tensors."""
    return Plan(
        recipe.method.name,
        base,
        experts,
        tuple(float(p["weight"]) for p in recipe.parameters),
        tuple(float(p.get("density", 1.0)) for p in recipe.parameters),
        {k: v if isinstance(v, bool) else float(v) for k, v in recipe.shared.items() if k != "int8_mask"},
        recipe.dtype,
        seed if recipe.method.name in RANDOM_METHODS else 0,
        None,
        (),
        recipe.text,
    )


def _thresholds(draft: Plan, measured: Measurer, tensor: Tensor) -> tuple[float, ...]:
    if draft.method != "ties" or all(d >= 1.0 for d in draft.densities):
        return ()
    return tuple(
        measured.threshold(expert, tensor, trim_rank(density, tensor.elements))
        if 0.0 < density < 1.0
        else (0.0 if density else float("inf"))
        for expert, density in enumerate(draft.densities)
    )
