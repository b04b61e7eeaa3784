"""From a recipe to a plan: which models, which numbers, and which expert blocks within the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.reader import Kind, ReadCounter
from mergefs.errors import BudgetError, RecipeError
from mergefs.manifest import Manifest, Tensor
from mergefs.merge.derive import base_scale
from mergefs.merge.method import Method
from mergefs.merge.span import Span, SpanMethod
from mergefs.planner.aim import Aim
from mergefs.planner.budget import parse_budget
from mergefs.planner.candidates import Candidates, base_cost, find_candidates
from mergefs.planner.frontier import Frontier, by_blocks, by_tiers, hash_rank
from mergefs.planner.importance import block_weights
from mergefs.planner.layers import layer_count, position
from mergefs.planner.measured import Measurer
from mergefs.planner.plan import EXACT, Numbers, Plan, TensorPlan
from mergefs.planner.quality import Quality, assess
from mergefs.planner.simulation import Simulation
from mergefs.recipe import Recipe
from mergefs.store import Store
from mergefs.units import format_size

_WEIGHED_BY = 1 << 14
"""Blocks that are planned for to find out how what experts have in common is best weighed."""

_SHARES = (0.0, 0.25, 0.5, 1.0)
"""Of the other experts' blocks: what may be taken to be left."""


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
        budget_bytes: the budget in bytes, or None; with an error to be kept to, what that takes.
        reference_bytes: physical bytes that are read of the first expert because deltas are taken from it.
        candidates: every changed expert block, and what it costs.
        depth: int64 for each: the depth to which it is read.
        quality: how much error is left at each depth; None where there was nothing to choose.
        frontier: the steps that were chosen from; None likewise.
    """

    plan: Plan
    base: Manifest
    experts: tuple[Manifest, ...]
    expert_raw_bytes: int
    budget_bytes: int | None
    reference_bytes: int
    candidates: Candidates
    depth: NDArray[np.int64]
    quality: Quality | None
    frontier: Frontier | None

    @property
    def expert_bytes(self) -> int:
        """Physical bytes that the merge will read of experts, at most."""
        return int(self.candidates.cost_at(self.depth).sum()) + self.reference_bytes

    @property
    def everything(self) -> bool:
        """Whether all changed blocks are read whole, so that the result is exact."""
        return bool((self.depth == self.candidates.tiers).all())

    @cached_property
    def predicted_error(self) -> float | None:
        """The merged delta's error relative to its norm, weighted by importance; None where nothing is known."""
        if self.everything:
            return 0.0
        return None if self.quality is None else self.quality.predict(self.depth)

    def reread_bytes(self, before: Plan, is_read: Callable[[Tensor, int], bool]) -> int:
        """Return how many of the bytes an earlier plan of the same models read as well.

        Args:
            before: the earlier plan.
            is_read: whether a block of the result is derived anew.
        """
        found = self.candidates
        depth = planned_depths(found, before)
        sizes = found.cost_at(np.minimum(depth, self.depth))
        again = np.zeros(len(found), bool)
        for number, tensor in enumerate(found.tensors):
            mine = found.of_tensor(number)
            read = np.array([is_read(tensor, block) for block in range(found.block_counts[number])], bool)
            again[mine] = read[found.block[mine]]
        return int(sizes[again].sum())


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


def make_plan(store: Store, recipe: Recipe, models: Models, aim: Aim, *, seed: int, counter: ReadCounter) -> Planned:
    """Resolve a recipe.

    Args:
        store: the repository.
        recipe: what is asked for.
        models: its models (see `find_models`), under a lease of the caller's.
        aim: what may be read, or how much error may be left.
        seed: of random methods, and of the planner `hash`.
        counter: where metadata, and expert bytes read for statistics that are not known yet, are counted; its
            expert limit is set to the budget.

    Raises:
        RecipeError: when the models do not fit each other.
        BudgetError: when the budget is malformed, cannot be planned for, or does not allow the error asked for.
        ImportanceError: when the importance does not fit the base.
    """
    manifests = {identity: store.manifest(identity) for identity in models.all}
    counter.add(Kind.METADATA, sum(len(m.encoded) for m in manifests.values()))
    base, experts = manifests[models.base], tuple(manifests[e] for e in models.experts)
    for name, expert in zip(recipe.models, experts, strict=True):
        check_fit(base, recipe.base_model or models.base[:12], expert, name)
    raw = sum(expert.tensor_bytes for expert in experts)
    limit = None if aim.budget is None else parse_budget(aim.budget, raw)
    different, which = _numbers(recipe, base)
    numbers = {name: different[number] for name, number in which.items()}
    draft = _draft(recipe, models, seed, different)
    measured = Measurer(store, models.base, models.experts, counter, baseless=models.baseless)
    found = find_candidates(store.catalog, base, experts, numbers, measured)
    weights = block_weights(found.tensors, store.block_elements, aim.importance)
    reference = base_cost(store.catalog, base) if models.baseless else 0
    spare = None if limit is None else limit - reference - int(found.full_cost.sum())
    chooses = bool(aim.max_error) or (spare is not None and spare < 0)
    if limit is not None:
        counter.limit_expert(limit)
    if chooses or spare is not None:
        measured.limit(0 if chooses or spare is None else spare, found.cost_of)
    cuts = {
        tensor.name: cut_offs(numbers[tensor.name], recipe.method, measured, tensor)
        for number, tensor in enumerate(found.tensors)
        if found.of_tensor(number).start < found.of_tensor(number).stop
    }
    drafts = {
        tensor.name: TensorPlan(
            tensor.name,
            (),
            cuts.get(tensor.name, ((), ()))[0],
            which[tensor.name],
            _factors(recipe, numbers[tensor.name], measured, tensor),
            cuts.get(tensor.name, ((), ()))[1],
        )
        for tensor in found.tensors
    }
    depth, quality, frontier = found.tiers, None, None
    if chooses:
        if models.baseless:
            raise BudgetError(
                "these models have no common base in the repository, so a budget cannot choose among their"
                " deltas: ingest them with --base, or merge without a budget"
            )
        for e, name in found.unknown:
            measured.statistics(e, name)
        quality = _assess(store, recipe, draft, found, measured, drafts, weights)
        frontier = _frontier(found, quality, aim, limit, seed)
        budgeted = partial(_frontier, found, quality, replace(aim, max_error=None), limit, seed)
        depth, limit = _choose(found, quality, frontier, aim, limit, budgeted)
        counter.limit_expert(limit)
    digits = found.digits(depth)
    tensors = tuple(
        replace(drafts[tensor.name], depths=digits[tensor.name])
        for tensor in found.tensors
        if any(mine.strip("0") for mine in digits[tensor.name]) or base_scale(draft, drafts[tensor.name]) != 1.0
    )
    everything = bool((depth == found.tiers).all())
    plan = replace(draft, budget=None if everything else limit, tensors=tensors)
    return Planned(plan, base, experts, raw, limit, reference, found, depth, quality, frontier)


def _assess(
    store: Store,
    recipe: Recipe,
    draft: Plan,
    found: Candidates,
    measured: Measurer,
    drafts: dict[str, TensorPlan],
    weights: list[NDArray[np.float64]],
) -> Quality:
    simulation = None
    if recipe.method.decides:
        tensors = [
            (number, tensor, drafts[tensor.name])
            for number, tensor in enumerate(found.tensors)
            if found.of_tensor(number).start < found.of_tensor(number).stop
        ]
        simulation = Simulation(draft, recipe.method, tensors, measured, store.block_elements, weights)
    coefficients = np.array(
        [
            planned.factors[1:] or recipe.method.coefficients(draft.numbers_of(planned))
            for planned in (drafts[tensor.name] for tensor in found.tensors)
        ]
    )
    return assess(found, measured, coefficients, weights, simulation)


def _frontier(found: Candidates, quality: Quality, aim: Aim, limit: int | None, seed: int) -> Frontier:
    floor = np.zeros(len(found), np.int64) if aim.floor is None else planned_depths(found, aim.floor)
    if aim.planner == "hash":
        return by_blocks(found.cost, quality.errors(0.0), found.tiers, floor, hash_rank(seed, len(found)))
    steps = by_tiers if aim.planner == "tiers" else by_blocks
    return steps(found.cost, quality.errors(_others(quality, steps, floor, aim, limit)), found.tiers, floor)


def _others(
    quality: Quality, steps: Callable[..., Frontier], floor: NDArray[np.int64], aim: Aim, limit: int | None
) -> float:
    """Return which share of the other experts' blocks is best taken to be left when a block's errors are weighed."""
    every = max(1, len(quality.found) // _WEIGHED_BY)
    rows = np.flatnonzero(quality.found.places % every == 0)
    some, least = quality.only(rows), floor[rows]
    found = some.found
    best = (np.inf, 0.0)
    for others in _SHARES:
        frontier = steps(found.cost, some.errors(others), found.tiers, least)
        if aim.max_error:
            score = float(found.cost_at(_least(some, frontier, aim.max_error)).sum())
        else:
            assert limit is not None
            part = found.full_cost.sum() / max(1, quality.found.full_cost.sum())
            score = float(some.error_terms(frontier.within(int(limit * part))).sum())
        best = min(best, (score, others))
    return best[1]


def _choose(
    found: Candidates,
    quality: Quality,
    frontier: Frontier,
    aim: Aim,
    limit: int | None,
    frontier_for_budget: Callable[[], Frontier],
) -> tuple[NDArray[np.int64], int]:
    """Return the depths, and the most bytes that they may take.

    Raises:
        BudgetError: when the budget does not cover the floor, or does not allow the error asked for.
    """
    if limit is not None and frontier.floor_cost > limit:
        raise BudgetError(
            f"a budget of {limit} bytes is less than the {frontier.floor_cost} bytes that the model was made from: give"
            " more than that"
        )
    if aim.max_error is None:
        assert limit is not None
        return frontier.within(limit), limit
    # No error is everything, whatever a sample says.
    depth = _least(quality, frontier, aim.max_error) if aim.max_error else found.tiers
    needed = int(found.cost_at(depth).sum())
    if limit is not None and needed > limit:
        # A plan for the budget alone may be another one; and what fits of later steps may do what the next one does.
        filled = frontier_for_budget().within(limit)
        reached = quality.predict(filled) or 0.0
        if reached > aim.max_error or not aim.max_error:
            raise BudgetError(
                f"an error of {aim.max_error:g} takes {format_size(needed)} ({needed} bytes), more than the budget of"
                f" {limit} bytes, which allows an error of {reached:.3f}"
            )
        return filled, limit
    return depth, needed


def _least(quality: Quality, frontier: Frontier, error: float) -> NDArray[np.int64]:
    """Return the depths after the fewest steps that leave no more error than that."""
    low, high = 0, len(frontier)
    while low < high:
        middle = (low + high) // 2
        left = quality.predict(frontier.after(middle))
        if left is not None and left <= error:
            high = middle
        else:
            low = middle + 1
    return frontier.after(high)


def planned_depths(found: Candidates, plan: Plan) -> NDArray[np.int64]:
    """Return the depth of each candidate in a plan of the same models."""
    depth = np.zeros(len(found), np.int64)
    for number, tensor in enumerate(found.tensors):
        planned = plan.tensor_by_name.get(tensor.name)
        if planned is not None:
            grid = np.array([np.frombuffer(mine.encode(), np.uint8) for mine in planned.depths], np.int64) - ord("0")
            mine = found.of_tensor(number)
            depth[mine] = grid[found.expert[mine], found.block[mine]]
    return np.where(depth == EXACT, found.tiers, np.minimum(depth, found.tiers))


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


def _numbers(recipe: Recipe, base: Manifest) -> tuple[tuple[Numbers, ...], dict[str, int]]:
    """Return the method's different parameters, and which of them are those of each float tensor."""
    names = [tensor.name for tensor in base.tensors if tensor.dtype.is_float]
    layers = layer_count(names)
    different: list[Numbers] = []
    which = {}
    for name in names:
        numbers = recipe.numbers(name, position(name, layers))
        if numbers not in different:
            different.append(numbers)
        which[name] = different.index(numbers)
    return tuple(different), which


def _draft(recipe: Recipe, models: Models, seed: int, numbers: tuple[Numbers, ...]) -> Plan:
    """Return the plan without its tensors."""
    return Plan(
        recipe.method.name,
        models.base,
        models.experts,
        models.baseless,
        numbers,
        recipe.dtype,
        seed if recipe.method.is_random else 0,
        None,
        (),
        recipe.text,
    )


def _factors(recipe: Recipe, numbers: Numbers, measured: Measurer, tensor: Tensor) -> tuple[float, ...]:
    try:
        recipe.method.check(numbers, tensor.shape, measured.block_elements)
        if not isinstance(recipe.method, SpanMethod):
            return ()
        return recipe.method.factors(numbers, Span(measured.products(tensor), recipe.base_model is not None))
    except RecipeError as error:
        raise RecipeError(f"tensor '{tensor.name}': {error}") from error


def cut_offs(
    numbers: Numbers, method: Method, measured: Measurer, tensor: Tensor
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the thresholds and the ceilings of a tensor; see `TensorPlan`."""
    if not method.trims:
        return (), ()
    lows, highs = [], []
    for expert, own in enumerate(numbers.experts):
        kept = method.kept(own, tensor.elements)
        low, high = 0.0, np.inf
        if kept is not None and numbers.weights[expert] != 0.0:
            removed, count = kept
            low = measured.threshold(expert, tensor, removed + count) if count else np.inf
            if removed and count:
                high = measured.threshold(expert, tensor, removed + 1)
        lows.append(low)
        highs.append(high)
    return tuple(lows) if any(lows) else (), tuple(highs) if any(high < np.inf for high in highs) else ()
