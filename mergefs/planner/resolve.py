"""From a recipe to a plan: which models, which numbers, and which expert blocks within the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.reader import Kind, ReadCounter
from mergefs.errors import BudgetError, RecipeError
from mergefs.hashing import digest
from mergefs.manifest import Manifest, Tensor
from mergefs.merge.expert import FactorCache
from mergefs.merge.method import Method, Whole
from mergefs.merge.passes import changed_blocks, find_facts
from mergefs.merge.sources import Sources
from mergefs.merge.trimming import Cuts
from mergefs.planner.aim import Aim
from mergefs.planner.budget import parse_budget
from mergefs.planner.candidates import Candidates, base_cost, factors_cost, find_candidates
from mergefs.planner.choice import choose, make_frontier, planned_depths
from mergefs.planner.frontier import Frontier
from mergefs.planner.importance import block_weights
from mergefs.planner.layers import layer_count
from mergefs.planner.measured import Measurer
from mergefs.planner.models import Models
from mergefs.planner.plan import Numbers, Plan, TensorPlan
from mergefs.planner.quality import Quality, assess
from mergefs.planner.simulation import Simulation
from mergefs.recipe import Recipe
from mergefs.store import Store

_UNCUT: Cuts = (), ()
_CONTENT_BYTES = 6
"""Of a hash: as many as a float64 holds as an integer."""


@dataclass(frozen=True)
class Planned:
    """A plan and what the planner knows about it.

    Attributes:
        plan: the plan.
        base: its base's manifest.
        experts: its experts' manifests.
        expert_raw_bytes: what a naive merge would read: the tensor bytes of all experts.
        budget_bytes: the budget in bytes, or None; with an error to be kept to, what that takes.
        reference_bytes: physical bytes that are read whatever is chosen: of the first expert where deltas are taken
            from it, and of adapters.
        candidates: every changed expert block, and what it costs.
        depth: int64 for each: the depth to which it is read.
        quality: how much error is left at each depth; None where there was nothing to choose.
        frontier: the steps that were chosen from; None likewise.
        notes: sentences about what was fitted so that these models can be merged.
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
    notes: tuple[str, ...] = ()

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


def make_plan(
    store: Store,
    recipe: Recipe,
    models: Models,
    aim: Aim,
    *,
    seed: int,
    counter: ReadCounter,
    factors: FactorCache | None = None,
) -> Planned:
    """Resolve a recipe.

    Args:
        store: the repository.
        recipe: what is asked for.
        models: its models (see `find_models`), fitted to each other (see `fit_models`), under a lease of the caller's.
        aim: what may be read, or how much error may be left.
        seed: of random methods, and of the planner `hash`.
        counter: where metadata, and expert bytes read for statistics that are not known yet, are counted; its
            expert limit is set to the budget.
        factors: where adapters' factors are kept that are read for statistics.

    Raises:
        RecipeError: when the models do not fit each other.
        BudgetError: when the budget is malformed, cannot be planned for, or does not allow the error asked for.
        ImportanceError: when the importance does not fit the base.
    """
    manifests = {identity: store.manifest(identity) for identity in (models.base, *models.experts)}
    counter.add(Kind.METADATA, sum(len(m.encoded) for m in manifests.values()))
    base, experts = manifests[models.base], tuple(manifests[e] for e in models.experts)
    raw = sum(expert.tensor_bytes for expert in experts)
    limit = None if aim.budget is None else parse_budget(aim.budget, raw)
    different, which = numbers_of_tensors(recipe, base)
    numbers = {name: different[number] for name, number in which.items()}
    draft = _draft(recipe, models, seed, different)
    measured = Measurer(store, models.base, models.experts, counter, baseless=models.baseless, factors=factors)
    found = find_candidates(store.catalog, base, experts, numbers, measured)
    weights = block_weights(found.tensors, store.block_elements, aim.importance)
    reference = base_cost(store.catalog, base) if models.baseless else 0
    reference += factors_cost(store.catalog, experts, numbers)
    # Fitting the models may have read some of the experts.
    spent = counter.totals.expert
    room = None if limit is None else limit - spent
    if room is not None and room < 0:
        raise BudgetError(
            f"fitting the models to each other took {spent} expert bytes, more than the budget of {limit}"
        )
    spare = None if room is None else room - reference - int(found.full_cost.sum())
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
    measured.keep_thresholds()
    sources = Sources(draft, base, experts, measured.reader, factors)
    drafts = {
        tensor.name: TensorPlan(
            tensor.name,
            (),
            cuts.get(tensor.name, _UNCUT)[0],
            which[tensor.name],
            _factors(recipe, numbers[tensor.name], measured, sources, tensor, cuts.get(tensor.name, _UNCUT)),
            cuts.get(tensor.name, _UNCUT)[1],
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
        if room is not None and room < reference:
            raise BudgetError(
                f"a budget of {room} bytes is less than the {reference} bytes of the factors of its adapters, which are"
                " always read: give more than that"
            )
        room = None if room is None else room - reference
        quality = _assess(store, recipe, draft, found, measured, drafts, weights)
        frontier = make_frontier(found, quality, aim, room, seed)
        budgeted = partial(make_frontier, found, quality, replace(aim, max_error=None), room, seed)
        depth, room = choose(found, quality, frontier, aim, room, budgeted, reference + spent)
        limit = room + reference + spent
        counter.limit_expert(limit)
    digits = found.digits(depth)
    tensors = tuple(
        replace(drafts[tensor.name], depths=digits[tensor.name])
        for tensor in found.tensors
        if any(mine.strip("0") for mine in digits[tensor.name])
        or recipe.method.base_scale(numbers[tensor.name], drafts[tensor.name]) != 1.0
    )
    everything = bool((depth == found.tiers).all())
    plan = replace(draft, budget=None if everything else limit, tensors=tensors)
    return Planned(plan, base, experts, raw, limit, reference, found, depth, quality, frontier, models.notes)


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
            recipe.method.coefficients(draft.numbers_of(planned), planned)
            for planned in (drafts[tensor.name] for tensor in found.tensors)
        ]
    )
    return assess(found, measured, coefficients, weights, simulation)


def numbers_of_tensors(recipe: Recipe, base: Manifest) -> tuple[tuple[Numbers, ...], dict[str, int]]:
    """Return the method's different parameters, and which of them are those of each float tensor."""
    names = [tensor.name for tensor in base.tensors if tensor.dtype.is_float]
    layers = layer_count(names)
    different: list[Numbers] = []
    which = {}
    for name in names:
        numbers = recipe.numbers_of(name, layers)
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
        models.found,
        models.tokenizer_files,
        models.chat_template,
    )


def _factors(
    recipe: Recipe, numbers: Numbers, measured: Measurer, sources: Sources, tensor: Tensor, cuts: Cuts
) -> tuple[float, ...]:
    twins = [tensor, *(expert.tensor_by_name[tensor.name] for expert in sources.experts)]
    content = digest("\0".join(f"{twin.dtype.name} {twin.blocks}" for twin in twins).encode())
    whole = Whole(
        tensor.shape,
        len(sources.experts),
        recipe.names_a_base,
        any(mine.strip("0") for mine in changed_blocks(sources, tensor)),
        int.from_bytes(content[:_CONTENT_BYTES]),
        cuts,
        partial(measured.products, tensor),
        partial(find_facts, sources, tensor, allow=partial(measured.allow_pass, tensor.name)),
    )
    try:
        recipe.method.check(numbers, tensor.shape, measured.block_elements)
        return recipe.method.factors(numbers, whole)
    except RecipeError as error:
        raise RecipeError(f"tensor '{tensor.name}': {error}") from error


def cut_offs(numbers: Numbers, method: Method, measured: Measurer, tensor: Tensor) -> Cuts:
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
