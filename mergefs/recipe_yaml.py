"""Reading recipes: mergekit's YAML, checked as far as it can be without the models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mergefs.errors import RecipeError
from mergefs.lines import Items, Map, Place, load_documents
from mergefs.merge import registry
from mergefs.merge.method import Method
from mergefs.recipe import DTYPES, Recipe, Slice, Source
from mergefs.setting import Setting, read_setting

KEYS = (
    "base_model",
    "chat_template",
    "dtype",
    "merge_method",
    "models",
    "modules",
    "name",
    "out_dtype",
    "parameters",
    "slices",
    "tokenizer",
    "tokenizer_source",
)
"""The keys of a recipe."""
MODULE_KEYS = ("models", "parameters", "slices")
SLICE_KEYS = ("base_model", "parameters", "sources")
SOURCE_KEYS = ("layer_range", "model", "parameters")
MODEL_KEYS = ("model", "parameters")

NAMED_TEMPLATES = ("alpaca", "chatml", "exaone", "llama3", "mistral")
"""Chat templates that mergekit has of its own."""


@dataclass(frozen=True)
class _Merged:
    """What a recipe, or its module, says is merged: whole models, each with its own settings, or slices."""

    models: tuple[tuple[str, dict[str, Setting]], ...] = ()
    slices: tuple[Slice, ...] | None = None


def read_recipes(text: str, file: str) -> list[Recipe]:
    """Read the recipes of YAML text, each a document of its own.

    Args:
        text: the YAML.
        file: what messages call it.

    Raises:
        RecipeError: when something in it is unknown, missing, not supported or out of range.
    """
    found = []
    for value, own in load_documents(text, file) or [(None, "")]:
        if not isinstance(value, Map):
            raise RecipeError(f"{file} is not a recipe: it needs keys such as merge_method and models")
        found.append(_Reader(value, Place(file), own).recipe())
    return found


class _Reader:
    """Reads one recipe."""

    def __init__(self, value: Map, place: Place, text: str) -> None:
        self._value = value
        self._place = place
        self._text = text
        self._adapters: dict[str, tuple[str, str]] = {}
        self._ignored: dict[str, None] = {}

    def recipe(self) -> Recipe:
        """Return the recipe."""
        value, place = self._value, self._place
        _check_keys(value, KEYS, "a recipe", place)
        method = _method(value, place)
        base = None
        if value.get("base_model") is not None:
            base = self._model_name(value["base_model"], place.value(value, "base_model"))
        given = _parameters(value, place, method, self._ignored)
        merged, of_module = self._merged(method)
        given = _before(of_module, given)
        if value.get("name") is not None and not isinstance(value["name"], str):
            raise RecipeError(f"{place.value(value, 'name')}: the name {value['name']!r} is not text")
        models = [(name, own) for name, own in merged.models if method.base_is_model or name != base]
        if base is not None and merged.slices is None and method.base_is_model and "weight" in given:
            # As mergekit has it: the base takes part, with the weight that is given for all.
            models += [(base, {})] if base not in [name for name, _ in models] else []
        names = [name for name, _ in models]
        recipe = Recipe(
            method,
            base,
            tuple(names),
            tuple(own for _, own in models),
            given,
            _dtype(value, place),
            self._text,
            merged.slices,
            self._adapters,
            self._tokenizer(),
            _chat_template(value, place),
            value.get("name"),
            value.line,
            tuple(self._ignored),
        )
        if merged.slices is None:
            self._check_models(recipe)
        else:
            used = [source.model for part in merged.slices for source in recipe.experts_of(part)]
            recipe = replace(recipe, models=tuple(dict.fromkeys(used)))
            self._check_slices(recipe, merged.slices)
        return recipe

    # -- models and slices ---------------------------------------------------------------------------------

    def _merged(self, method: Method) -> tuple[_Merged, dict[str, Setting]]:
        """Return what is merged, and the settings of the module that it is in."""
        value, place = self._value, self._place
        chosen = [key for key in ("models", "slices", "modules") if value.get(key) is not None]
        if len(chosen) != 1:
            raise RecipeError(
                f"{place.key(value, chosen[1]) if chosen else place}: a recipe has one of 'models', 'slices' and"
                f" 'modules'{', and this one has ' + ' and '.join(chosen) if chosen else ''}"
            )
        if chosen[0] != "modules":
            return self._models_or_slices(value, method), {}
        modules, at = value["modules"], place.value(value, "modules")
        if not isinstance(modules, Map) or not modules:
            raise RecipeError(f"{at}: 'modules' has to map a module's name to its models or slices")
        if len(modules) > 1:
            raise RecipeError(
                f"{place.key(modules, list(modules)[1])}: the modules {', '.join(modules)}: models of several modules"
                " are not supported; give one"
            )
        ((name, module),) = modules.items()
        if not isinstance(module, Map):
            raise RecipeError(f"{place.value(modules, name)}: module '{name}' has to have models or slices")
        _check_keys(module, MODULE_KEYS, "a module", place)
        if (module.get("models") is None) is (module.get("slices") is None):
            raise RecipeError(f"{place.key(modules, name)}: a module has one of 'models' and 'slices'")
        return self._models_or_slices(module, method), _parameters(module, place, method, self._ignored)

    def _models_or_slices(self, value: Map, method: Method) -> _Merged:
        if value.get("models") is not None:
            return _Merged(models=tuple(self._models(value, method)))
        return _Merged(slices=tuple(self._slices(value, method)))

    def _models(self, value: Map, method: Method) -> list[tuple[str, dict[str, Setting]]]:
        found = []
        for item, place in _list(value, "models", "- model: NAME", self._place):
            _check_keys(item, MODEL_KEYS, "a model", self._place)
            found.append((self._named(item, place), _parameters(item, self._place, method, self._ignored)))
        return found

    def _slices(self, value: Map, method: Method) -> list[Slice]:
        found = []
        for number, (item, place) in enumerate(_list(value, "slices", "- sources: [...]", self._place), start=1):
            _check_keys(item, SLICE_KEYS, "a slice", self._place)
            base = None
            if item.get("base_model") is not None:
                base = self._model_name(item["base_model"], self._place.value(item, "base_model"))
            if "sources" not in item:
                raise RecipeError(f"{place}: slice {number} has no 'sources'")
            sources = self._sources(item, number, method)
            lengths = {source.layers for source in sources}
            if len(lengths) > 1:
                raise RecipeError(
                    f"{place}: the sources of slice {number} have {' and '.join(map(str, sorted(lengths)))} layers:"
                    " they have to have the same number"
                )
            found.append(Slice(tuple(sources), _parameters(item, self._place, method, self._ignored), base, place.line))
        return found

    def _sources(self, value: Map, number: int, method: Method) -> list[Source]:
        found = []
        for item, place in _list(value, "sources", "- model: NAME", self._place):
            _check_keys(item, SOURCE_KEYS, "a source", self._place)
            name = self._named(item, place)
            if "layer_range" not in item:
                raise RecipeError(f"{place}: slice {number} has no layer_range for '{name}'")
            given = item["layer_range"]
            if not isinstance(given, Items) or len(given) != 2 or any(type(layer) is not int for layer in given):
                raise RecipeError(
                    f"{self._place.value(item, 'layer_range')}: slice {number} has the layer_range {given!r} for"
                    f" '{name}': it is [first layer, layer behind the last]"
                )
            first, stop = given
            if not 0 <= first <= stop:
                raise RecipeError(
                    f"{self._place.value(item, 'layer_range')}: slice {number} has the layer_range [{first}, {stop}]"
                    f" for '{name}': it has to be 0 <= first <= stop"
                )
            found.append(Source(name, first, stop, _parameters(item, self._place, method, self._ignored)))
        return found

    def _named(self, item: Map, place: Place) -> str:
        if "model" not in item:
            raise RecipeError(f"{place}: 'model' is missing, so this is not a model: give a ref, an id or a path")
        return self._model_name(item["model"], self._place.value(item, "model"))

    def _model_name(self, value: Any, place: Place) -> str:
        """Return how the recipe names a model: text, or mergekit's map of its parts."""
        if isinstance(value, Map):
            return self._model_of_parts(value, place)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)  # an all-digit ref or id without quotes
        if not isinstance(value, str) or not value:
            raise RecipeError(f"{place}: {value!r} is not a model: give a ref, a manifest's id or a path")
        model, _, adapter = value.rpartition("+")
        if model and adapter:
            self._adapters[value] = (model, adapter)
        return value

    def _model_of_parts(self, value: Map, place: Place) -> str:
        if "path" in value or "revision" in value:
            for key in value:
                if key not in ("path", "revision"):
                    raise RecipeError(f"{self._place.key(value, key)}: unknown key '{key}' in a model's path")
            if value.get("revision") is not None:
                raise RecipeError(
                    f"{self._place.key(value, 'revision')}: a model's revision cannot be chosen here: ingest the"
                    " revision under a name of its own, and give that"
                )
            return self._model_name(value.get("path"), self._place.value(value, "path"))
        for key in value:
            if key not in ("model", "lora", "override_architecture"):
                raise RecipeError(f"{self._place.key(value, key)}: unknown key '{key}' in a model")
        if value.get("override_architecture") is not None:
            raise RecipeError(
                f"{self._place.key(value, 'override_architecture')}: override_architecture is not supported: set"
                " 'architectures' in the model's config.json"
            )
        if "model" not in value:
            raise RecipeError(f"{place}: the model has no 'model' or 'path'")
        name = self._model_name(value["model"], self._place.value(value, "model"))
        if value.get("lora") is None:
            return name
        lora = self._model_name(value["lora"], self._place.value(value, "lora"))
        self._adapters[f"{name}+{lora}"] = (name, lora)
        return f"{name}+{lora}"

    # -- what the recipe as a whole has to be --------------------------------------------------------------

    def _check_models(self, recipe: Recipe) -> None:
        method, place = recipe.method, self._place.at(self._value.line)
        listed = self._value.get("models")
        if listed is None:
            (module,) = self._value["modules"].values()
            listed = module["models"]
        if method.needs_base and recipe.base_model is None:
            raise RecipeError(f"{place}: {method.name} needs a base_model")
        if not recipe.models:
            raise RecipeError(f"{place.at(listed.line)}: it names no model besides the base")
        _check_count(method, len(recipe.models), str(place.at(listed.line)))
        lines = [
            line
            for item, line in zip(listed, listed.lines, strict=True)
            if method.base_is_model or self._model_name(item["model"], place) != recipe.base_model
        ]
        lines += [listed.line] * (len(recipe.models) - len(lines))  # a base that is not listed
        for name, own, line in zip(recipe.models, recipe.own, lines, strict=True):
            _check_given(method, {**recipe.given, **own}, f"{place.at(line)}: model {name}", per_model=True)
        _check_given(method, recipe.given, str(place), per_model=False)
        if not any(_has_filters(part) for part in (recipe.given, *recipe.own)):
            for at in (0.0, 1.0):
                self._try(recipe, at, None, place)

    def _check_slices(self, recipe: Recipe, slices: tuple[Slice, ...]) -> None:
        method = recipe.method
        counts = [len(recipe.experts_of(part)) for part in slices]
        for number, (part, count) in enumerate(zip(slices, counts, strict=True), start=1):
            place = self._place.at(part.line)
            if method.needs_base and recipe.base_of(part) is None:
                raise RecipeError(f"{place}: {method.name} needs a base_model")
            _check_count(method, count, f"{place}: slice {number}")
            for source in recipe.experts_of(part):
                given = {**recipe.given, **part.given, **source.own}
                _check_given(method, given, f"{place}: model {source.model} in slice {number}", per_model=True)
            _check_given(method, {**recipe.given, **part.given}, f"{place}: slice {number}", per_model=False)
        weighs = "weight" in method.parameters and method.parameters["weight"].per_model
        if len(set(counts)) > 1 and not weighs:
            at = next(number for number, count in enumerate(counts) if count != counts[0])
            raise RecipeError(
                f"{self._place.at(slices[at].line)}: slice {at + 1} has {counts[at]} models and slice 1 {counts[0]}:"
                f" {method.name} has no weights, so that all slices have to have the same number"
            )
        for part in slices:
            if any(_has_filters(s) for s in (recipe.given, part.given, *(source.own for source in part.sources))):
                continue
            for at_ in (0.0, 1.0):
                self._try(recipe, at_, part, self._place.at(part.line))

    def _try(self, recipe: Recipe, at: float, part: Slice | None, place: Place) -> None:
        try:
            recipe.numbers("", at, part)
        except RecipeError as error:
            raise RecipeError(f"{place}: {error}") from error

    # -- the tokenizer -------------------------------------------------------------------------------------

    def _tokenizer(self) -> str | None:
        value, place = self._value, self._place
        source, at = value.get("tokenizer_source"), place.value(value, "tokenizer_source")
        form = value.get("tokenizer")
        if form is not None:
            at = place.value(value, "tokenizer")
            if source is not None:
                raise RecipeError(f"{at}: give one of 'tokenizer_source' and 'tokenizer'")
            if not isinstance(form, Map):
                raise RecipeError(f"{at}: 'tokenizer' has the form {{source: base}}, not {form!r}")
            for key in form:
                if key in ("tokens", "pad_to_multiple_of"):
                    if form[key]:
                        raise RecipeError(
                            f"{place.key(form, key)}: '{key}' of a tokenizer is not supported yet, and would change the"
                            " result: remove it"
                        )
                elif key != "source":
                    raise RecipeError(f"{place.key(form, key)}: unknown key '{key}' in a tokenizer: it has source")
            source, at = form.get("source", "union"), place.value(form, "source")
        if source is None:
            return None
        if source == "union":
            raise RecipeError(
                f"{at}: the tokenizer source 'union' (what a 'tokenizer' without a source means) is not supported yet:"
                " give 'base' or a model, as tokenizer_source"
            )
        if source == "base":
            if value.get("base_model") is None:
                raise RecipeError(f"{at}: the tokenizer is to be the base's, and there is no base_model")
            return "base"
        return self._model_name(source, at)


def _check_keys(value: Map, known: tuple[str, ...], what: str, place: Place) -> None:
    for key in value:
        if key not in known:
            raise RecipeError(f"{place.key(value, key)}: unknown key '{key}' in {what}: it has {', '.join(known)}")


def _method(value: Map, place: Place) -> Method:
    name = value.get("merge_method")
    if not isinstance(name, str) or name not in registry.names():
        raise RecipeError(
            f"{place.value(value, 'merge_method')}: unknown merge_method {name!r}: this mergefs has"
            f" {', '.join(registry.names())}"
        )
    return registry.method(name)


def _list(value: Map, key: str, form: str, place: Place) -> list[tuple[Map, Place]]:
    """Return the maps in a list, and where each begins."""
    items = value[key]
    if not isinstance(items, Items) or not items:
        raise RecipeError(f"{place.value(value, key)}: '{key}' has to be a list, of at least one '{form}'")
    found = []
    for item, line in zip(items, items.lines, strict=True):
        if not isinstance(item, Map):
            raise RecipeError(f"{place.at(line)}: each of '{key}' needs the form '{form}', not {item!r}")
        found.append((item, place.at(line)))
    return found


def _parameters(parent: Map, place: Place, method: Method, ignored: dict[str, None]) -> dict[str, Setting]:
    """Return the settings under the key `parameters` of a map; enter the names of those that only other methods have
    among the ignored ones."""
    value = parent.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, Map):
        raise RecipeError(f"{place.value(parent, 'parameters')}: 'parameters' has to map names to values")
    found = {}
    for name, given in value.items():
        spec = method.parameters.get(name)
        if spec is None and name in registry.parameters():
            ignored[name] = None
            continue
        if spec is None:
            raise RecipeError(
                f"{place.key(value, name)}: {method.name} has no parameter '{name}': it has"
                f" {', '.join(method.parameters)}"
            )
        found[name] = read_setting(given, spec, name, place.value(value, name))
    return found


def _before(first: Mapping[str, Setting], then: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return settings of which the first ones go before the others, tensor by tensor."""
    found = dict(then)
    for name, setting in first.items():
        found[name] = Setting(setting.conditions + (then[name].conditions if name in then else ()))
    return found


def _has_filters(settings: Mapping[str, Setting]) -> bool:
    return any(len(s.conditions) > 1 or s.conditions[0].filter is not None for s in settings.values())


def _check_count(method: Method, count: int, where: str) -> None:
    if not method.fewest <= count <= method.most:
        wanted = str(method.fewest) if method.fewest == method.most else f"at least {method.fewest}"
        if method.fewest < method.most < 1 << 16:
            wanted = f"{method.fewest} to {method.most}"
        besides = " besides the base" if method.needs_base else ""
        raise RecipeError(f"{where}: {method.name} merges {wanted} model(s){besides}, and {count} are named")


def _check_given(method: Method, given: Mapping[str, Setting], where: str, *, per_model: bool) -> None:
    for name, spec in method.parameters.items():
        if spec.per_model is per_model and spec.default is None and name not in given:
            raise RecipeError(f"{where} has no {name}: give one under its parameters, or under the recipe's")


def _dtype(value: Map, place: Place) -> str | None:
    found = None
    for key in ("out_dtype", "dtype"):
        given = value.get(key)
        if given is None:
            continue
        name = given.removeprefix("torch.") if isinstance(given, str) else None
        # With an out_dtype, dtype is what mergekit calculates in: that is float32 or more here.
        if name not in DTYPES and not (name == "float64" and key == "dtype" and found is not None):
            raise RecipeError(f"{place.value(value, key)}: unknown dtype {given!r}: it is one of {', '.join(DTYPES)}")
        found = found or DTYPES.get(name)
    return found


def _chat_template(value: Map, place: Place) -> str | None:
    given, at = value.get("chat_template"), place.value(value, "chat_template")
    if given is None or given == "":
        return None
    if not isinstance(given, str):
        raise RecipeError(f"{at}: the chat_template {given!r} is not text: give 'auto', a template or a file of one")
    if given in NAMED_TEMPLATES:
        raise RecipeError(
            f"{at}: mergekit's chat template '{given}' is not part of mergefs: give 'auto', a template's text or a"
            " file of one"
        )
    return given
