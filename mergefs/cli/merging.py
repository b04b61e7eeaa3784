"""Commands about recipes, plans and merges."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mergefs.checkpoint.directory import open_checkpoint
from mergefs.cli.common import (
    emit,
    json_option,
    keep_freed_memory,
    plain,
    progress,
    repository,
    table,
    threads_option,
)
from mergefs.errors import NotFoundError, RecipeError, UserError
from mergefs.merge.accuracy import ErrorReport
from mergefs.merge.run import MergeReport
from mergefs.planner.aim import PLANNERS, Aim
from mergefs.planner.budget import parse_budget
from mergefs.planner.explain import Explanation, curve, explain_plan, tier_bytes
from mergefs.planner.importance import load_importance
from mergefs.planner.plot import check_plot, draw_curve
from mergefs.planner.resolve import Planned
from mergefs.recipe import Recipe
from mergefs.refs import check_ref_name
from mergefs.repository import Repository
from mergefs.units import format_size, parse_size

seed_option = click.option("--seed", type=click.IntRange(0, 2**53 - 1), default=0, help="Of random methods.")
memory_option = click.option("--max-memory", default="1GiB", show_default=True, help="For blocks under way.")

_NO_AIM = {"budget": None, "max_error": None, "planner": "tiers", "importance": None}


def aim_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say what may be read; the command gets them as one `aim`, see `Repository.plan`."""

    @functools.wraps(command)
    def with_aim(*args: Any, importance: Path | None, **options: Any) -> None:
        aim = {key: options.pop(key) for key in ("budget", "max_error", "planner")}
        aim["importance"] = None if importance is None else load_importance(importance)
        # What can be refused is refused before anything is done.
        Aim(**aim)
        if aim["budget"] is not None:
            parse_budget(aim["budget"], 1 << 60)
        command(*args, aim=aim, **options)

    for option in (
        click.option(
            "--importance",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="How much errors matter, by tensor or row: safetensors or JSON.",
        ),
        click.option(
            "--planner",
            type=click.Choice(PLANNERS),
            default="tiers",
            show_default=True,
            help="How a budget is spent; blocks and hash are there for comparison.",
        ),
        click.option(
            "--max-error",
            type=float,
            metavar="E",
            help="Read the fewest bytes that keep the predicted error of the merged delta within E of its norm.",
        ),
        click.option(
            "--budget", metavar="B", help="The most expert bytes to read: 10% of what a naive merge reads, or 2GiB."
        ),
    ):
        with_aim = option(with_aim)
    return with_aim


strict_option = click.option(
    "--strict-shapes", is_flag=True, help="Refuse models whose tensors' names and shapes are not the same."
)


@click.command()
@click.argument("recipe")
@aim_options
@seed_option
@strict_option
@json_option
@click.pass_obj
def plan(repo: str | None, recipe: str, aim: dict[str, Any], seed: int, strict_shapes: bool, as_json: bool) -> None:
    """Resolve RECIPE (mergekit YAML) into a plan and store it until the next gc."""
    began = time.monotonic()
    with repository(repo) as opened:
        planned = opened.plan(Recipe.load(recipe), seed=seed, strict_shapes=strict_shapes, **aim)
        value = _plan_value(opened, planned, began, len(planned.plan.encoded))
    emit(value, as_json, lambda: _plan_text(planned, value))


@click.command()
@click.argument("recipe")
@aim_options
@seed_option
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the curve of error against bytes: .png or .svg (the extra 'plot').",
)
@json_option
@click.pass_obj
def explain(repo: str | None, recipe: str, aim: dict[str, Any], seed: int, plot: Path | None, as_json: bool) -> None:
    """Show what the plan for RECIPE reads and skips, per expert, layer and kind of tensor, and what it costs."""
    began = time.monotonic()
    if plot is not None:
        check_plot(plot)
    with repository(repo) as opened:
        planned = opened.plan(Recipe.load(recipe), seed=seed, save=False, **aim)
        explanation = explain_plan(planned)
        if plot is not None:
            draw_curve(planned, plot)
        value = {**_plan_value(opened, planned, began, 0), **plain(explanation)}
    emit(value, as_json, lambda: _plan_text(planned, value) + "\n\n" + _explanation_text(explanation, value["curve"]))


@click.command()
@click.argument("recipe", required=False)
@click.option("--as", "name", required=True, metavar="NAME", help="The result's name.")
@click.option("--plan", "planned", metavar="PLAN", help="Run this stored plan instead of a recipe.")
@aim_options
@seed_option
@strict_option
@click.option("--lazy", is_flag=True, help="Publish at once; blocks are derived when they are read.")
@memory_option
@click.option("--ingest", "may_ingest", is_flag=True, help="Ingest models that the recipe names as paths.")
@click.option(
    "--report", "wants_error", is_flag=True, help="Then derive it exactly as well, and tell the actual error."
)
@threads_option
@json_option
@click.pass_obj
def merge(
    repo: str | None,
    recipe: str | None,
    name: str,
    planned: str | None,
    aim: dict[str, Any],
    seed: int,
    strict_shapes: bool,
    lazy: bool,
    max_memory: str,
    may_ingest: bool,
    wants_error: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Merge models by RECIPE (mergekit YAML), or by a stored plan, into the model NAME.

    Of a file of several recipes, the last one gives NAME; an earlier one, called X, gives NAME.X, which later ones may
    name as X.
    """
    keep_freed_memory()
    # What can be refused is refused before anything is ingested.
    check_ref_name(name)
    work: dict[str, Any] = {"lazy": lazy, "threads": threads, "max_memory": parse_size(max_memory)}
    if (recipe is None) is (planned is None):
        raise UserError("give either a recipe or --plan")
    if planned is not None and (seed or may_ingest or strict_shapes or aim != _NO_AIM):
        raise UserError("a plan has its budget, seed and models already: leave the other options out")
    earlier: list[MergeReport] = []
    with repository(repo) as opened:
        if recipe is None:
            assert planned is not None
            with progress("merging") as tell:
                report = opened.merge_planned(planned, name, progress=tell, **work)
        else:
            *parts, last = Recipe.load_all(recipe)
            names = _names_of_parts(recipe, parts, name)
            work |= {"seed": seed, "strict_shapes": strict_shapes}
            found = _Ingesting(opened, [*parts, last], threads) if may_ingest else _Found(opened)
            for part, target in zip(parts, names, strict=True):
                with progress(f"merging {target}") as tell:
                    earlier.append(
                        opened.merge(part, target, lookup=found, progress=tell, **{**work, "lazy": False}, **aim)
                    )
                found.results[str(part.name)] = earlier[-1].manifest
            with progress("merging") as tell:
                report = opened.merge(last, name, lookup=found, progress=tell, **work, **aim)
        error = None
        if wants_error:
            error = opened.measure_error(
                report.manifest, report.predicted_error, importance=aim["importance"], threads=threads
            )
    value = {**plain(report), **({} if error is None else {"report": plain(error)})}
    if earlier:
        value["earlier"] = plain(earlier)
    emit(
        value,
        as_json,
        lambda: "\n".join(map(_merge_text, [*earlier, report])) + ("" if error is None else "\n" + _error_text(error)),
    )


@click.command()
@click.argument("ref")
@aim_options
@click.option("--as", "name", metavar="NAME", help="The result's name; by default REF moves to it.")
@memory_option
@threads_option
@json_option
@click.pass_obj
def refine(
    repo: str | None,
    ref: str,
    aim: dict[str, Any],
    name: str | None,
    max_memory: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Merge REF's models again, reading deeper: what changed is derived anew, the rest is shared."""
    keep_freed_memory()
    memory = parse_size(max_memory)
    with repository(repo) as opened, progress("refining") as tell:
        report = opened.refine(ref, new_name=name, threads=threads, max_memory=memory, progress=tell, **aim)
    emit(
        report,
        as_json,
        lambda: (
            f"{_merge_text(report)}\nit refines {report.refines[:12]}; {format_size(report.reread_bytes)} of that had"
            " been read for it before"
        ),
    )


@click.command()
@click.argument("ref")
@memory_option
@threads_option
@json_option
@click.pass_obj
def materialize(repo: str | None, ref: str, max_memory: str, threads: int | None, as_json: bool) -> None:
    """Derive and store every block of the lazy merge REF."""
    keep_freed_memory()
    with repository(repo) as opened, progress("materializing") as tell:
        report = opened.materialize(ref, threads=threads, max_memory=parse_size(max_memory), progress=tell)
    emit(report, as_json, lambda: _merge_text(report))


def _names_of_parts(file: str, parts: list[Recipe], name: str) -> list[str]:
    """Return the refs for the results of all recipes of a file but the last one.

    Raises:
        RecipeError: when one of them has no name, or two have the same.
        RefNameError: when it has one that cannot be a ref.
    """
    for number, part in enumerate(parts):
        where = f"{file}, line {part.line}"
        if part.name is None:
            raise RecipeError(f"{where}: of several recipes, each but the last needs a 'name'")
        if part.name in [other.name for other in parts[:number]]:
            raise RecipeError(f"{where}: the name '{part.name}' is there twice")
        check_ref_name(f"{name}.{part.name}")
    return [f"{name}.{part.name}" for part in parts]


class _Found:
    """Finds recipes' models: results of earlier recipes of the same file, then what the repository has.

    Attributes:
        results: manifest ids of those results, by the recipes' names.
    """

    def __init__(self, opened: Repository) -> None:
        self._opened = opened
        self.results: dict[str, str] = {}

    def __call__(self, model: str) -> str:
        return self.results.get(model) or self._opened.resolve(model)


class _Ingesting(_Found):
    """The same, ingesting models that are paths before anything is merged: the base first, the others against it."""

    def __init__(self, opened: Repository, recipes: list[Recipe], threads: int | None) -> None:
        super().__init__(opened)
        self._threads = threads
        self._found: dict[str, str] = {}
        self._adapters = {name: parts for recipe in recipes for name, parts in recipe.adapters.items()}
        made = {recipe.name for recipe in recipes[:-1]}
        wanted = [[name for name in (*recipe.named, *recipe.others) if name not in made] for recipe in recipes]
        self._check_paths([name for names in wanted for name in names])
        for recipe, names in zip(recipes, wanted, strict=True):
            base = recipe.base_model if recipe.base_model in names else None
            for name in names:
                self._find(name, None if base is None or name == base else self._find(base, None))

    def __call__(self, model: str) -> str:
        return self.results.get(model) or self._found[model]

    def _find(self, name: str, base: str | None) -> str:
        model, adapter = self._parts(name)
        if adapter is not None:
            self._find(adapter, None)
        if model not in self._found:
            try:
                self._found[model] = self._opened.resolve(model)
            except NotFoundError:
                self._found[model] = self._ingest(model, base)
        return self._found[model]

    def _parts(self, name: str) -> tuple[str, str | None]:
        from mergefs.planner.models import model_and_adapter

        return model_and_adapter(self._opened, name, self._adapters)

    def _check_paths(self, models: list[str]) -> None:
        """Open every checkpoint that would be ingested, so that a bad one is refused before anything is."""
        for model in (part for name in models for part in self._parts(name) if part is not None):
            if not self._opened.has(model):
                if not Path(model).exists():
                    raise NotFoundError(f"'{model}' is neither a model of this repository nor a path")
                open_checkpoint(model)

    def _ingest(self, model: str, base: str | None) -> str:
        path = Path(model)
        stem = path.resolve().name.removesuffix(".safetensors")
        name = "".join(c if c.isascii() and (c.isalnum() or c in "._@+-") else "-" for c in stem).lstrip(".-")
        name = name.replace("..", ".") or "model"
        refs = self._opened.refs()
        unique, number = name, 2
        while unique in refs:
            unique, number = f"{name}@{number}", number + 1
        with progress(f"ingesting {unique}") as tell:
            report = self._opened.ingest(path, unique, base=base, threads=self._threads, progress=tell)
        if unique != name and refs[name] == report.manifest:
            self._opened.remove([unique])
            unique = name
        click.echo(f"ingested {model} as {unique}", err=True)
        return report.manifest


def _plan_value(opened: Repository, planned: Planned, began: float, written: int) -> dict[str, Any]:
    blocks = opened.forecast(planned)
    return {
        "plan": planned.plan.id,
        "manifest": None,
        "ref": None,
        "method": planned.plan.method,
        "budget_bytes": planned.budget_bytes,
        "expert_raw_bytes": planned.expert_raw_bytes,
        "read": {"expert": planned.expert_bytes, "base": None, "metadata": None},
        "tier_bytes": tier_bytes(planned.candidates, planned.depth),
        "written_bytes": written,
        "everything": planned.everything,
        "predicted_error": planned.predicted_error,
        "curve": curve(planned),
        "blocks": {
            **plain(blocks),
            "lazy": 0,
            "changed": len(planned.candidates),
            "read": int((planned.depth > 0).sum()),
        },
        "seconds": time.monotonic() - began,
        "notes": planned.notes,
    }


def _plan_text(planned: Planned, value: dict[str, Any]) -> str:
    blocks = value["blocks"]
    counts = f"{blocks['shared']} shared, {blocks['remembered']} remembered, {blocks['derived']} to derive"
    return "\n".join((_reading_text(planned), f"blocks: {counts}", *planned.notes))


def _reading_text(planned: Planned) -> str:
    chosen, total = int((planned.depth > 0).sum()), len(planned.candidates)
    budget = "no budget" if planned.budget_bytes is None else f"budget {format_size(planned.budget_bytes)}"
    what = "everything" if planned.everything else f"{chosen} of {total} changed expert blocks"
    share = planned.expert_bytes / planned.expert_raw_bytes if planned.expert_raw_bytes else 0.0
    text = (
        f"plan {planned.plan.id[:12]}, {planned.plan.method}: reads {what}, {format_size(planned.expert_bytes)}"
        f" ({share:.1%} of the experts' {format_size(planned.expert_raw_bytes)}; {budget})"
    )
    if planned.everything:
        return text + ": the result is exact"
    if not chosen:
        smallest = int(planned.candidates.cost[:, 1].min())
        return text + f": the result is the base, for a block's first tier takes {format_size(smallest)} at least"
    error = planned.predicted_error
    tiers = ", ".join(format_size(size) for size in tier_bytes(planned.candidates, planned.depth))
    return text + (
        f"\nread of the first, second, third and exact tiers: {tiers}"
        + ("" if error is None else f"\npredicted error of the merged delta: {error:.3f} of its norm")
    )


def _explanation_text(explanation: Explanation, points: list[dict[str, float]]) -> str:
    parts = []
    for title, rows in (("expert", explanation.experts), ("layer", explanation.layers), ("kind", explanation.kinds)):
        head = [title, "changed", "read", "bytes", "of", "1st", "2nd", "3rd", "exact", "error", "cancelled"]
        body = [
            [
                row["name"],
                str(row["blocks"]),
                str(row["blocks_read"]),
                format_size(row["bytes_read"]),
                format_size(row["bytes"]),
                *(format_size(size) for size in row["tier_bytes"]),
                "-" if row["error"] is None else f"{row['error']:.3f}",
                _percent(row["cancelled"]),
            ]
            for row in rows
        ]
        parts.append(table([head, *body], right=range(1, len(head))))
    if points:
        body = [[format_size(int(point["bytes"])), f"{point['error']:.3f}"] for point in points]
        parts.append(table([["reading", "error"], *body], right=(0, 1)))
    return "\n\n".join(parts)


def _error_text(report: ErrorReport) -> str:
    predicted, actual = (
        "unknown" if error is None else f"{error:.4f}" for error in (report.predicted_error, report.actual_error)
    )
    return (
        f"error of the merged delta: {predicted} predicted, {actual} actual; to find out,"
        f" {format_size(report.read.expert)} of experts were read in {report.seconds:.1f} s"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _merge_text(report: MergeReport) -> str:
    moved = f"\n'{report.ref}' named {report.previous[:12]} before" if report.previous else ""
    share = report.read.expert / report.expert_raw_bytes if report.expert_raw_bytes else 0.0
    blocks = (
        f"{report.blocks.shared} blocks shared, {report.blocks.remembered} remembered, {report.blocks.derived} derived,"
        f" {report.blocks.lazy} lazy"
    )
    return (
        f"{report.ref} is {report.manifest[:12]}: {blocks}; read {format_size(report.read.expert)} of experts"
        f" ({share:.1%} of {format_size(report.expert_raw_bytes)}) and {format_size(report.read.base)} of the base,"
        f" wrote {format_size(report.written_bytes)}, in {report.seconds:.1f} s{moved}"
        + "".join(f"\n{note}" for note in report.notes)
    )
