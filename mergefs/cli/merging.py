"""Commands about recipes, plans and merges."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from mergefs.checkpoint.directory import open_checkpoint
from mergefs.cli.common import emit, json_option, keep_freed_memory, progress, repository, table, threads_option
from mergefs.errors import NotFoundError
from mergefs.merge.engine import MergeReport
from mergefs.planner.budget import parse_budget
from mergefs.planner.explain import Explanation, explain_plan
from mergefs.planner.resolve import Planned
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.store import check_ref_name
from mergefs.units import format_size, parse_size

budget_option = click.option(
    "--budget", metavar="B", help="The most expert bytes to read: 10% of what a naive merge reads, or 2GiB."
)
seed_option = click.option("--seed", type=click.IntRange(0, 2**53 - 1), default=0, help="Of random methods.")
memory_option = click.option("--max-memory", default="1GiB", show_default=True, help="For blocks under way.")


@click.command()
@click.argument("recipe")
@budget_option
@seed_option
@json_option
@click.pass_obj
def plan(repo: str | None, recipe: str, budget: str | None, seed: int, as_json: bool) -> None:
    """Resolve RECIPE (mergekit YAML) into a plan and store it until the next gc."""
    began = time.monotonic()
    with repository(repo) as opened:
        planned = opened.plan(Recipe.load(recipe), budget=budget, seed=seed)
    emit(_plan_value(planned, began, len(planned.plan.encoded)), as_json, lambda: _plan_text(planned))


@click.command()
@click.argument("recipe")
@budget_option
@seed_option
@json_option
@click.pass_obj
def explain(repo: str | None, recipe: str, budget: str | None, seed: int, as_json: bool) -> None:
    """Show what the plan for RECIPE reads and skips, per expert and layer, and why."""
    began = time.monotonic()
    with repository(repo) as opened:
        planned = opened.plan(Recipe.load(recipe), budget=budget, seed=seed, save=False)
        explanation = explain_plan(planned)
    value = {**_plan_value(planned, began, 0), "experts": explanation.experts, "layers": explanation.layers}
    emit(value, as_json, lambda: _plan_text(planned) + "\n\n" + _explanation_text(explanation))


@click.command()
@click.argument("recipe")
@click.option("--as", "name", required=True, metavar="NAME", help="The result's name.")
@budget_option
@seed_option
@click.option("--lazy", is_flag=True, help="Publish at once; blocks are derived when they are read.")
@memory_option
@click.option("--ingest", "may_ingest", is_flag=True, help="Ingest models that the recipe names as paths.")
@threads_option
@json_option
@click.pass_obj
def merge(
    repo: str | None,
    recipe: str,
    name: str,
    budget: str | None,
    seed: int,
    lazy: bool,
    max_memory: str,
    may_ingest: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Merge models by RECIPE (mergekit YAML) into the model NAME."""
    keep_freed_memory()
    parsed = Recipe.load(recipe)
    # What can be refused is refused before anything is ingested.
    check_ref_name(name)
    memory = parse_size(max_memory)
    if budget is not None:
        parse_budget(budget, 1 << 60)
    with repository(repo) as opened:
        lookup = _Ingesting(opened, parsed, threads) if may_ingest else None
        with progress("merging") as tell:
            report = opened.merge(
                parsed,
                name,
                budget=budget,
                seed=seed,
                lazy=lazy,
                threads=threads,
                max_memory=memory,
                lookup=lookup,
                progress=tell,
            )
    emit(report, as_json, lambda: _merge_text(report))


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


class _Ingesting:
    """Finds a recipe's models, ingesting those that are paths: the base first, the others against it."""

    def __init__(self, opened: Repository, recipe: Recipe, threads: int | None) -> None:
        self._opened = opened
        self._threads = threads
        self._found: dict[str, str] = {}
        self._check_paths(recipe)
        base = None
        if recipe.base_model is not None:
            base = self._find(recipe.base_model, None)
        for model in recipe.models:
            self._find(model, base)

    def __call__(self, model: str) -> str:
        return self._found[model]

    def _find(self, model: str, base: str | None) -> str:
        if model not in self._found:
            try:
                self._found[model] = self._opened.resolve(model)
            except NotFoundError:
                self._found[model] = self._ingest(model, base)
        return self._found[model]

    def _check_paths(self, recipe: Recipe) -> None:
        """Open every checkpoint that would be ingested, so that a bad one is refused before anything is."""
        for model in (*recipe.models, *([recipe.base_model] if recipe.base_model else [])):
            try:
                self._opened.resolve(model)
            except NotFoundError:
                if not Path(model).exists():
                    raise NotFoundError(f"'{model}' is neither a model of this repository nor a path") from None
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


def _plan_value(planned: Planned, began: float, written: int) -> dict[str, Any]:
    from mergefs.merge.derive import needs_arithmetic

    found = planned.plan.tensor_by_name
    blocks = [
        needs_arithmetic(planned.plan, tensor, found[tensor.name].planned(number) if tensor.name in found else ())
        for tensor in planned.base.tensors
        for number in range(len(tensor.blocks))
    ]
    return {
        "plan": planned.plan.id,
        "manifest": None,
        "ref": None,
        "method": planned.plan.method,
        "budget_bytes": planned.budget_bytes,
        "expert_raw_bytes": planned.expert_raw_bytes,
        "read": {"expert": planned.expert_bytes, "base": None, "metadata": None},
        "written_bytes": written,
        "everything": planned.candidates.everything,
        "predicted_error": planned.candidates.predicted_error,
        "blocks": {
            "shared": blocks.count(False),
            "derived": blocks.count(True),
            "lazy": 0,
            "changed": len(planned.candidates.cost),
            "read": int((planned.candidates.depth > 0).sum()),
        },
        "seconds": time.monotonic() - began,
    }


def _plan_text(planned: Planned) -> str:
    chosen, total = int((planned.candidates.depth > 0).sum()), len(planned.candidates.cost)
    budget = "no budget" if planned.budget_bytes is None else f"budget {format_size(planned.budget_bytes)}"
    what = "everything" if planned.candidates.everything else f"{chosen} of {total} changed expert blocks"
    share = planned.expert_bytes / planned.expert_raw_bytes if planned.expert_raw_bytes else 0.0
    error = planned.candidates.predicted_error
    return (
        f"plan {planned.plan.id[:12]}, {planned.plan.method}: reads {what}, {format_size(planned.expert_bytes)}"
        f" ({share:.1%} of the experts' {format_size(planned.expert_raw_bytes)}; {budget})"
        + (f", predicted error of the merged delta {error:.2f}" if error else "")
    )


def _explanation_text(explanation: Explanation) -> str:
    parts = []
    for title, rows in (("expert", explanation.experts), ("layer", explanation.layers)):
        head = [title, "changed", "read", "bytes", "of", "energy read", "cancelled"]
        body = [
            [
                row["name"],
                str(row["blocks"]),
                str(row["blocks_read"]),
                format_size(row["bytes_read"]),
                format_size(row["bytes"]),
                _percent(row["energy_read"]),
                _percent(row["cancelled"]),
            ]
            for row in rows
        ]
        parts.append(table([head, *body], right=(1, 2, 3, 4, 5, 6)))
    return "\n\n".join(parts)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _merge_text(report: MergeReport) -> str:
    moved = f"\n'{report.ref}' named {report.previous[:12]} before" if report.previous else ""
    share = report.read.expert / report.expert_raw_bytes if report.expert_raw_bytes else 0.0
    return (
        f"{report.ref} is {report.manifest[:12]}: {report.blocks.shared} blocks shared, {report.blocks.derived}"
        f" derived, {report.blocks.lazy} lazy; read {format_size(report.read.expert)} of experts ({share:.1%} of"
        f" {format_size(report.expert_raw_bytes)}) and {format_size(report.read.base)} of the base, wrote"
        f" {format_size(report.written_bytes)}, in {report.seconds:.1f} s{moved}"
    )
