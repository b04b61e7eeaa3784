"""Recipes: what the user asks for, in mergekit's YAML. How they are read is in `recipe_yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mergefs.errors import RecipeError
from mergefs.merge.method import Method
from mergefs.merge.parameters import INT8_MASK, ParameterSpec, Scalar
from mergefs.planner.layers import comes_first, layer_of, position, with_layer
from mergefs.planner.plan import Numbers
from mergefs.setting import Setting

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""The output dtypes of a recipe, and their safetensors names."""

Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class Source:
    """Layers of a model that go into a slice.

    Attributes:
        model: as the recipe names it.
        first, stop: its first layer, and the one behind its last.
        own: what the recipe gives for it alone.
    """

    model: str
    first: int
    stop: int
    own: Settings

    @property
    def layers(self) -> int:
        """How many layers."""
        return self.stop - self.first


@dataclass(frozen=True)
class Slice:
    """Layers of the result that lie one after another and come from the same sources.

    Attributes:
        sources: all of the same number of layers.
        given: what the recipe gives for the slice.
        base_model: the slice's own base, or None for the recipe's.
        line: of the recipe's text, for messages.
    """

    sources: tuple[Source, ...]
    given: Settings
    base_model: str | None = None
    line: int | None = None

    @property
    def layers(self) -> int:
        """How many layers."""
        return self.sources[0].layers


@dataclass(frozen=True)
class Recipe:
    """A checked recipe.

    Attributes:
        method: the merge method.
        base_model: how the recipe names the base, or None.
        models: how it names each model, in order (the base left out where the method takes one). With slices: each
            different name once, in the order in which they come first.
        own: for each model, what the recipe gives for it alone; empty with slices, whose sources have their own.
        given: what the recipe gives for all models.
        dtype: the output dtype's safetensors name, or None for the base's.
        text: the YAML as given.
        slices: what the result's layers are stacked from; None where models are merged whole.
        adapters: for each name of the form `base+adapter` the two parts. A ref of the whole name goes before that.
        tokenizer: whose tokenizer the result gets: `base`, or a model's name; None where the recipe does not say.
        chat_template: `auto`, a template's text or its file's path; None where the recipe does not say.
        name: what later recipes of the same file call its result; None where the recipe does not say.
        line: where it begins in its file.
        ignored: parameters of other methods that the recipe gives; this method has none of their names.
    """

    method: Method
    base_model: str | None
    models: tuple[str, ...]
    own: tuple[Settings, ...]
    given: Settings
    dtype: str | None
    text: str
    slices: tuple[Slice, ...] | None = None
    adapters: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    tokenizer: str | None = None
    chat_template: str | None = None
    name: str | None = None
    line: int = 1
    ignored: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a recipe from a YAML file.

        Raises:
            RecipeError: when the file cannot be read, is not a recipe, or has several.
        """
        return _only(cls.load_all(path), str(path))

    @classmethod
    def load_all(cls, path: str | Path) -> list[Recipe]:
        """Read the recipes of a YAML file (mergekit's `mega` form), of which later ones may name earlier ones' results.

        Raises:
            RecipeError: when the file cannot be read, or something in it is not a recipe.
        """
        from mergefs.recipe_yaml import read_recipes

        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise RecipeError(f"the recipe {path} cannot be read: {reason}") from error
        return read_recipes(text, str(path))

    @classmethod
    def parse(cls, text: str, where: str = "the recipe") -> Recipe:
        """Read a recipe from YAML text.

        Args:
            text: the YAML.
            where: what messages call it; they name the line as well.

        Raises:
            RecipeError: when something in it is unknown, missing, not supported or out of range.
        """
        from mergefs.recipe_yaml import read_recipes

        return _only(read_recipes(text, where), where)

    @property
    def named(self) -> tuple[str, ...]:
        """Every model that is merged or a base, once, the recipe's base first."""
        bases = [part.base_model for part in self.slices or ()]
        return tuple(dict.fromkeys(name for name in (self.base_model, *self.models, *bases) if name is not None))

    @property
    def names_a_base(self) -> bool:
        """Whether the recipe, or a slice of it, names a base."""
        return self.base_model is not None or any(part.base_model is not None for part in self.slices or ())

    @property
    def others(self) -> tuple[str, ...]:
        """Models that are named for something else than to be merged: the one whose tokenizer the result gets."""
        return () if self.tokenizer is None else (self.tokenizer_of,)

    @property
    def tokenizer_of(self) -> str:
        """The name of the model whose tokenizer the result gets, where the recipe says so."""
        chosen = self.base_model if self.tokenizer == "base" else self.tokenizer
        assert chosen is not None
        return chosen

    @property
    def columns(self) -> int:
        """How many models are merged in one place at most."""
        if self.slices is None:
            return len(self.models)
        return max(len(self.experts_of(part)) for part in self.slices)

    def base_of(self, part: Slice) -> str | None:
        """Return the name of a slice's base, or None."""
        return part.base_model or self.base_model

    def base_source(self, part: Slice) -> Source | None:
        """Return the source of a slice that is its base: the first of the base's name, where the method takes one."""
        if self.method.base_is_model:
            return None
        base = self.base_of(part)
        return next((source for source in part.sources if source.model == base), None)

    def experts_of(self, part: Slice) -> tuple[Source, ...]:
        """Return the sources of a slice that are merged, without its base."""
        base = self.base_source(part)
        return tuple(source for source in part.sources if source is not base)

    def slice_of(self, tensor: str) -> tuple[int, int | None]:
        """Return the number of the slice in which a tensor of the result lies, and which of its layers it is of (None
        for one that is of none: embeddings are the first slice's, everything else the last one's).

        Raises:
            RecipeError: when there is no such layer.
        """
        assert self.slices is not None
        layer = layer_of(tensor)
        if layer is None:
            return (0 if comes_first(tensor) else len(self.slices) - 1), None
        for number, part in enumerate(self.slices):
            if layer < part.layers:
                return number, layer
            layer -= part.layers
        raise RecipeError(f"tensor '{tensor}' lies behind the last layer of the slices")

    def numbers_of(self, tensor: str, layers: int) -> Numbers:
        """Return the method's parameters for a tensor of the result.

        Args:
            tensor: its name.
            layers: how many the result has.

        Raises:
            RecipeError: see `numbers`.
        """
        if self.slices is None:
            return self.numbers(tensor, position(layer_of(tensor), layers))
        number, layer = self.slice_of(tensor)
        part = self.slices[number]
        return self.numbers(tensor, position(layer, part.layers), part, layer)

    def numbers(self, tensor: str, at: float, part: Slice | None = None, layer: int | None = None) -> Numbers:
        """Return the method's parameters for a tensor.

        A source's own setting goes before its slice's, and a model's own before what is given for all, and that before
        the method's default. Where a slice merges fewer models than others, the rest have the weight 0.

        Args:
            tensor: its name in the result.
            at: where it lies between the first layer, 0, and the last one, 1.
            part: the slice that it lies in.
            layer: which of the slice's layers it is of; filters for a source's parameters are about the names there.

        Raises:
            RecipeError: when a parameter that has no default is not given for it, or the weights cannot be normalized.
        """
        specs = self.method.parameters

        def value(name: str, parts: tuple[Settings, ...], whose: str, called: str) -> Scalar:
            for settings in parts:
                found = settings[name].value(called, at) if name in settings else None
                if found is not None:
                    return found
            default = specs[name].default
            if default is None:
                raise RecipeError(f"{whose} has no {name} for tensor '{called}': give one that its filters do not miss")
            return default

        if part is None:
            merged: list[tuple[str, str, tuple[Settings, ...]]] = [
                (name, tensor, (own, self.given)) for name, own in zip(self.models, self.own, strict=True)
            ]
            for_all: tuple[Settings, ...] = (self.given,)
        else:
            merged = [
                (
                    source.model,
                    tensor if layer is None else with_layer(tensor, source.first + layer),
                    (source.own, part.given, self.given),
                )
                for source in self.experts_of(part)
            ]
            for_all = (part.given, self.given)
        experts = [
            {name: value(name, parts, f"model {model}", called) for name in specs if specs[name].per_model}
            for model, called, parts in merged
        ]
        absent = {name: _absent(name, spec) for name, spec in specs.items() if spec.per_model}
        experts += [absent] * (self.columns - len(experts))
        shared = {
            name: value(name, for_all, "the recipe", tensor)
            for name in specs
            if not specs[name].per_model and name != INT8_MASK
        }
        numbers = Numbers(tuple(experts), shared)
        if self.method.name == "linear" and shared["normalize"] and abs(sum(numbers.weights)) < 1e-8:
            of = f" of tensor '{tensor}'" if tensor else ""
            raise RecipeError(f"the weights{of} add up to 0 and cannot be normalized: set normalize: false")
        return numbers


def _only(recipes: list[Recipe], where: str) -> Recipe:
    if len(recipes) > 1:
        raise RecipeError(
            f"{where}, line {recipes[1].line}: another recipe begins: 'mergefs merge' runs a file of several, for"
            " everything else give each a file of its own"
        )
    return recipes[0]


def _absent(name: str, spec: ParameterSpec) -> Scalar:
    """Return a parameter of a model that a slice does not have."""
    if name == "weight":
        return 0.0
    return spec.default if spec.default is not None else max(0.0, spec.lowest)
