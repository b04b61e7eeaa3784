"""Merging: by a recipe, by a stored plan, once more with a larger budget; and storing what was merged lazy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mergefs.again import again_if_collected
from mergefs.blocks.reader import ReadCounter, ReadTotals
from mergefs.errors import BudgetError, BudgetExceededError, NotFoundError
from mergefs.manifest import Manifest
from mergefs.merge.expert import FACTOR_SHARE, FactorCache
from mergefs.merge.lazy import load_plan, merge_plan
from mergefs.merge.run import DEFAULT_MEMORY, BlockCounts, Figures, MergeReport, Progress, Run
from mergefs.planner.aim import Aim
from mergefs.planner.check import check_plan
from mergefs.planner.fitting import fit_models
from mergefs.planner.models import Models, find_models
from mergefs.planner.resolve import make_plan
from mergefs.recipe import Recipe
from mergefs.refs import check_ref_name
from mergefs.store import Store


@dataclass(frozen=True)
class RefineReport(MergeReport):
    """What a refinement did.

    Attributes:
        refines: the id of the earlier result.
        reread_bytes: how many of the expert bytes were read for the earlier result already.
    """

    refines: str = ""
    reread_bytes: int = 0


@again_if_collected
def merge(
    store: Store,
    recipe: Recipe,
    name: str,
    *,
    aim: Aim = Aim(),  # noqa: B008
    seed: int = 0,
    lazy: bool = False,
    threads: int | None = None,
    max_memory: int = DEFAULT_MEMORY,
    lookup: Callable[[str], str] | None = None,
    strict_shapes: bool = False,
    progress: Progress | None = None,
) -> MergeReport:
    """Merge models into a new one.

    Args:
        store: the repository.
        recipe: what to merge, and how.
        name: the ref for the result.
        aim: what may be read, or how much error may be left; by default everything is read.
        seed: of random methods.
        lazy: publish at once; blocks are derived when they are read.
        threads: how many to work with; all cores by default.
        max_memory: bytes that the blocks under way may take.
        lookup: finds a model as the recipe names it; by default `Store.resolve`.
        strict_shapes: refuse models whose tensors' names and shapes are not the same.
        progress: told the bytes of the result that are derived, and those that are to be.

    Raises:
        RecipeError, BudgetError, NotFoundError, RefNameError: see `find_models`, `fit_models` and `make_plan`; nothing
            has changed then.
        CorruptionError: when a block that is needed is missing or damaged.
    """
    check_ref_name(name)
    began = time.monotonic()
    models = find_models(store, recipe, lookup)
    with store.lease("merge", models.all) as lease:
        counter = ReadCounter()
        models = fit_models(store, recipe, models, lease, counter, strict=strict_shapes)
        factors = _factors(store, models, max_memory)
        planned = make_plan(store, recipe, models, aim, seed=seed, counter=counter, factors=factors)
        run = Run(store, planned.plan, lease, counter, threads, max_memory, factors)
        figures = Figures.of(planned, name, began, {})
        return run.lazy(figures) if lazy else run.eager(figures, progress)


def _factors(store: Store, models: Models, max_memory: int) -> FactorCache:
    """Return what keeps what is read to make a plan until its run."""
    experts = map(store.manifest, models.experts)
    return FactorCache.of(store.manifest(models.base), experts, max_memory // FACTOR_SHARE)


@again_if_collected
def merge_planned(
    store: Store,
    text: str,
    name: str,
    *,
    lazy: bool = False,
    threads: int | None = None,
    max_memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> MergeReport:
    """Run a stored plan.

    Args:
        store: the repository.
        text: the plan's id, or at least its first eight digits.
        name, lazy, threads, max_memory, progress: see `merge`.

    Raises:
        NotFoundError: when there is no such plan, or a model of it is gone.
        PlanError: when it was made for other statistics than the catalog's.
    """
    began = time.monotonic()
    check_ref_name(name)
    plan = load_plan(store, store.resolve_plan(text))
    for identity in (plan.base, *plan.experts):
        store.resolve(identity)
    with store.lease("merge", {plan.base, *plan.experts}) as lease:
        check_plan(store, plan)
        run = Run(store, plan, lease, ReadCounter(plan.budget), threads, max_memory)
        raw = sum(store.manifest(expert).tensor_bytes for expert in plan.experts)
        figures = Figures(name, began, plan.budget, raw, None if plan.budget else 0.0, {})
        return run.lazy(figures) if lazy else run.eager(figures, progress)


@again_if_collected
def materialize(
    store: Store,
    name: str,
    *,
    threads: int | None = None,
    max_memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> MergeReport:
    """Derive and store every block of a lazy merge; its ref then names the stored manifest.

    A merge that is not lazy is left as it is.

    Raises:
        NotFoundError: when there is no ref of that name.
        RefMovedError: when the ref was moved or removed meanwhile.
        UserError: when the model is no merge.
        BudgetError: when experts that were repacked since take more than the budget of its plan.
    """
    began = time.monotonic()
    identity = store.resolve(name)
    if name not in store.refs():
        raise NotFoundError(f"'{name}' is a manifest's id: name a ref, which then names the stored model")
    manifest = store.manifest(identity)
    entry = store.manifest_entry(identity)
    planned = merge_plan(manifest, name, "there is nothing to materialize")
    if not manifest.is_lazy:  # its experts may be gone
        return _as_it_is(manifest, name, entry.get("merge", {}), began)
    plan = load_plan(store, planned)
    counter = ReadCounter(plan.budget)
    with store.lease("materialize", {identity, plan.base, *plan.experts}) as lease:
        run = Run(store, plan, lease, counter, threads, max_memory)
        raw = sum(store.manifest(expert).tensor_bytes for expert in plan.experts)
        before = entry.get("merge", {})
        kept = {"refines": before["refines"]} if "refines" in before else {}
        error = before.get("predicted_error")
        figures = Figures(name, began, plan.budget, raw, error, kept, expecting=identity)
        try:
            return run.eager(figures, progress)
        except BudgetExceededError as error:
            raise BudgetError(
                f"'{name}' cannot be stored within its budget of {plan.budget} bytes any more, since its experts were"
                " repacked: merge it again, or repack with --exact small"
            ) from error


def _as_it_is(manifest: Manifest, name: str, figures: Mapping[str, Any], began: float) -> MergeReport:
    """Return the report of having done nothing for a merge whose blocks are all stored."""
    return MergeReport(
        manifest.lineage.plan or "",
        manifest.id,
        name,
        None,
        figures.get("budget_bytes"),
        int(figures.get("expert_raw_bytes", 0)),
        figures.get("predicted_error"),
        ReadTotals(0, 0, 0),
        0,
        BlockCounts(sum(len(tensor.blocks) for tensor in manifest.tensors), 0, 0),
        time.monotonic() - began,
    )


@again_if_collected
def refine(
    store: Store,
    name: str,
    aim: Aim,
    *,
    new_name: str | None = None,
    threads: int | None = None,
    max_memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> RefineReport:
    """Merge a merge's models once more by the same recipe, with a larger budget.

    No block is read less deep than for the earlier result. Blocks of which nothing is read deeper are taken over
    from it without reading; for the others, the tiers that were read before are read again with the new ones.

    Args:
        store: the repository.
        name: the earlier result: a ref or an id.
        aim: what may be read in all, or how much error may be left; its floor is the earlier plan.
        new_name: the ref for the result; by default the earlier one's ref moves.
        threads, max_memory, progress: see `merge`.

    Raises:
        NotFoundError: when there is no such model, or an id is given and no `new_name`.
        RefMovedError: when the earlier one's ref was to move, and was moved or removed meanwhile.
        UserError: when it is no merge.
        BudgetError: when the budget is less than what the earlier result was made from, or cannot be planned for.
    """
    began = time.monotonic()
    identity = store.resolve(name)
    if new_name is None and name not in store.refs():
        raise NotFoundError(f"'{name}' is a manifest's id: name the refined model with --as")
    target = new_name or name
    check_ref_name(target)
    manifest = store.manifest(identity)
    before = load_plan(store, merge_plan(manifest, name, "there is nothing to refine"))
    recipe = Recipe.parse(before.recipe)
    models = Models(
        before.base,
        before.experts,
        before.baseless,
        before.models,
        tokenizer_files=before.tokenizer,
        chat_template=before.chat_template,
    )
    with store.lease("refine", {identity, *models.all}) as lease:
        counter = ReadCounter()
        factors = _factors(store, models, max_memory)
        aim = replace(aim, floor=before)
        planned = make_plan(store, recipe, models, aim, seed=before.seed, counter=counter, factors=factors)
        run = Run(store, planned.plan, lease, counter, threads, max_memory, factors)
        expecting = identity if target == name else None
        figures = replace(Figures.of(planned, target, began, {"refines": identity}), expecting=expecting)
        if manifest.is_lazy:
            return RefineReport(**vars(run.lazy(figures)), refines=identity, reread_bytes=0)
        report = run.eager(figures, progress)
        again = planned.reread_bytes(before, run.is_derived)
        return RefineReport(**vars(report), refines=identity, reread_bytes=again)
