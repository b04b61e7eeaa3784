"""Commands about recipes themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from mergefs.cli.common import emit, json_option, repository
from mergefs.merge.parameters import Scalar
from mergefs.planner.layers import kind_of
from mergefs.planner.models import find_models
from mergefs.planner.resolve import numbers_of_tensors
from mergefs.recipe import Recipe


@click.group()
def recipe() -> None:
    """Look at recipes without merging."""


@recipe.command()
@click.argument("file")
@json_option
@click.pass_obj
def check(repo: str | None, file: str, as_json: bool) -> None:
    """Tell what the recipe FILE means: its models, and for which tensors which numbers hold."""
    asked = Recipe.load(file)
    with repository(repo) as opened:
        models = find_models(opened, asked)
        different, which = numbers_of_tensors(asked, opened.manifest(models.base))
    groups = [
        {
            "tensors": [name for name, number in which.items() if number == place],
            "experts": [dict(own) for own in numbers.experts],
            "shared": dict(numbers.shared),
        }
        for place, numbers in enumerate(different)
    ]
    value = {
        "method": asked.method.name,
        "base": models.base,
        "models": [{"name": name, "manifest": m} for name, m in zip(asked.models, models.experts, strict=True)],
        "dtype": asked.dtype,
        "ignored": list(asked.ignored),
        "groups": groups,
    }
    emit(value, as_json, lambda: _text(value))


def _text(value: dict[str, Any]) -> str:
    lines = [f"{value['method']} of {', '.join(m['name'] for m in value['models'])} on {value['base'][:12]}"]
    if value["ignored"]:
        lines.append(f"ignored, for {value['method']} has no such parameters: {', '.join(value['ignored'])}")
    for group in value["groups"]:
        kinds = dict.fromkeys(kind_of(name) for name in group["tensors"])
        lines.append(f"\n{len(group['tensors'])} tensors: {', '.join(kinds)}")
        if group["shared"]:
            lines.append(f"  all: {_numbers(group['shared'])}")
        for model, own in zip(value["models"], group["experts"], strict=True):
            if own:
                lines.append(f"  {model['name']}: {_numbers(own)}")
    return "\n".join(lines)


def _numbers(values: Mapping[str, Scalar]) -> str:
    return ", ".join(
        f"{name} {str(value).lower() if isinstance(value, bool) else f'{value:g}'}" for name, value in values.items()
    )
