"""Commands about recipes themselves."""

from __future__ import annotations

from collections.abc import Mapping

import click

from mergefs.cli.common import emit, json_option, repository
from mergefs.merge.parameters import Scalar
from mergefs.planner.layers import kind_of, layer_of
from mergefs.planner.meaning import Group, Meaning, Origin, meaning_of
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
        meaning = meaning_of(opened, asked)
    emit(meaning, as_json, lambda: _text(meaning))


def _text(meaning: Meaning) -> str:
    on = f" on {meaning.base[:12]}" if meaning.base else ""
    lines = [f"{meaning.method} of {', '.join(model.name for model in meaning.models)}{on}"]
    lines += [f"output dtype {meaning.dtype}"] if meaning.dtype else []
    lines += [f"tokenizer of {meaning.tokenizer}"] if meaning.tokenizer else []
    lines += ["chat template: the models' most frequent one"] if meaning.chat_template == "auto" else []
    if meaning.ignored:
        lines.append(f"ignored, for {meaning.method} has no such parameters: {', '.join(meaning.ignored)}")
    lines += meaning.notes
    for group in meaning.groups:
        kinds = dict.fromkeys(kind_of(name) for name in group.tensors)
        where = "" if group.slice is None else f"slice {group.slice}, "
        lines.append(f"\n{where}{_tensors(len(group.tensors))}{_layers(group)}: {', '.join(kinds)}")
        lines.append(f"  from {', '.join(_origin(origin) for origin in group.sources)}")
        if group.shared:
            lines.append(f"  all: {_numbers(group.shared)}")
        merged = [origin.model for origin in group.sources if not origin.is_base]
        for model, own in zip(merged, group.experts, strict=False):
            if own:
                lines.append(f"  {model}: {_numbers(own)}")
    return "\n".join(lines)


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _layers(group: Group) -> str:
    """Return in which layers of the result a group's tensors lie."""
    numbers = sorted({layer for name in group.tensors if (layer := layer_of(name)) is not None})
    if not numbers:
        return ""
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    if len(numbers) == 1:
        return f" of layer {numbers[0]}"
    return f" of layers {numbers[0]} to {numbers[-1]}" if whole else f" of layers {', '.join(map(str, numbers))}"


def _origin(origin: Origin) -> str:
    part = ""
    if origin.layer_range is not None:
        first, stop = origin.layer_range
        part = f", layers {first} to {stop - 1}" if stop > first else ", no layers"
    base = " (base)" if origin.is_base else ""
    return f"'{origin.model}'{part}{base}"


def _numbers(values: Mapping[str, Scalar]) -> str:
    return ", ".join(
        f"{name} {str(value).lower() if isinstance(value, bool) else f'{value:g}'}" for name, value in values.items()
    )
