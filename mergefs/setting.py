"""The values of a recipe's parameters: one value, a gradient over the layers, or different ones by tensors' names."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mergefs.errors import RecipeError
from mergefs.lines import Items, Map, Place
from mergefs.merge.parameters import ParameterSpec, Scalar

_EVERY = "*"
NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
"""Numbers that are written as text, as 1e-5 is in YAML 1.1."""


@dataclass(frozen=True)
class Condition:
    """A value, or a gradient, for some tensors.

    Attributes:
        filter: a part of the names of the tensors that it is for; None for all of them.
        values: one, or the values at equal distances from the first layer to the last one.
    """

    filter: str | None
    values: tuple[Scalar, ...]

    def at(self, position: float) -> Scalar:
        """Return the value at a place between the first layer, 0, and the last one, 1.

        Numbers are interpolated; of flags, the last one that lies at or before the place is taken.
        """
        place = position * (len(self.values) - 1)
        before = int(place)
        value = self.values[before]
        if isinstance(value, bool) or before == len(self.values) - 1:
            return value
        share = place - before
        return (1.0 - share) * value + share * self.values[before + 1]


@dataclass(frozen=True)
class Setting:
    """What a recipe gives for one parameter.

    Attributes:
        conditions: of which the first one that is for a tensor counts.
    """

    conditions: tuple[Condition, ...]

    def value(self, tensor: str, position: float) -> Scalar | None:
        """Return the value for a tensor; None where nothing is given for it.

        Args:
            tensor: its name.
            position: where it lies between the first layer, 0, and the last one, 1.
        """
        for condition in self.conditions:
            if condition.filter is None or condition.filter in tensor:
                return condition.at(position)
        return None


def read_setting(value: Any, spec: ParameterSpec, name: str, place: Place) -> Setting:
    """Return a setting from what the YAML has.

    Args:
        value: a scalar; a list of scalars: a gradient; or one or a list of {filter, value}.
        spec: what the values may be.
        name: of the parameter.
        place: of the value, for messages.

    Raises:
        RecipeError: when it is none of these, or a value is of another type or out of range.
    """
    if isinstance(value, Map):
        return Setting((_condition(value, spec, name, place),))
    if not isinstance(value, Items):
        return Setting((Condition(None, (_scalar(value, spec, name, place),)),))
    if not value:
        raise RecipeError(
            f"{place}: '{name}' is an empty list: give a value, a gradient such as [0, 0.5, 1], or filters"
        )
    if not any(isinstance(item, Map) for item in value):
        return Setting((Condition(None, _gradient(value, spec, name, place)),))
    lines = zip(value, value.lines, strict=True)
    return Setting(tuple(_condition(item, spec, name, place.at(line)) for item, line in lines))


def _condition(item: Any, spec: ParameterSpec, name: str, place: Place) -> Condition:
    if not isinstance(item, Map) or not set(item) <= {"filter", "value"} or "value" not in item:
        raise RecipeError(
            f"{place}: each filter of '{name}' has the form '- filter: NAME' with a 'value', not {item!r}"
        )
    pattern = item.get("filter")
    if pattern is not None and not isinstance(pattern, str):
        raise RecipeError(
            f"{place.value(item, 'filter')}: the filter {pattern!r} of '{name}' is not text: give a part of tensors'"
            " names"
        )
    given, at = item["value"], place.value(item, "value")
    if isinstance(given, Items):
        if not given:
            raise RecipeError(f"{at}: the filter {pattern!r} of '{name}' has an empty list of values")
        values = _gradient(given, spec, name, at)
    else:
        values = (_scalar(given, spec, name, at),)
    return Condition(None if pattern in (None, _EVERY) else pattern, values)


def _gradient(values: Items, spec: ParameterSpec, name: str, place: Place) -> tuple[Scalar, ...]:
    lines = zip(values, values.lines, strict=True)
    return tuple(_scalar(value, spec, name, place.at(line)) for value, line in lines)


def _scalar(value: Any, spec: ParameterSpec, name: str, place: Place) -> Scalar:
    if spec.is_flag:
        if not isinstance(value, bool) and (not isinstance(value, int | float) or value not in (0, 1)):
            raise RecipeError(f"{place}: '{name}' is {value!r}: it is true or false")
        return bool(value)
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value) if not isinstance(value, str) or re.search(NUMBER, value) else math.nan
    if not math.isfinite(number):
        raise RecipeError(f"{place}: '{name}' is {value!r}: it has to be a number")
    if not spec.lowest <= number <= spec.highest:
        raise RecipeError(f"{place}: '{name}' is {number:g}: it has to be in {spec.lowest:g}..{spec.highest:g}")
    return number
