"""The values of a recipe's parameters: one value, a gradient over the layers, or different ones by tensors' names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mergefs.errors import RecipeError
from mergefs.merge.parameters import ParameterSpec, Scalar

_EVERY = "*"


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


def read_setting(value: Any, spec: ParameterSpec, what: str) -> Setting:
    """Return a setting from what the YAML has.

    Args:
        value: a scalar; a list of scalars: a gradient; or one or a list of {filter, value}.
        spec: what the values may be.
        what: how messages name the parameter.

    Raises:
        RecipeError: when it is none of these, or a value is of another type or out of range.
    """
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return Setting((Condition(None, (_scalar(value, spec, what),)),))
    if not value:
        raise RecipeError(f"{what} is an empty list: give a value, a gradient such as [0, 0.5, 1], or filters")
    if not any(isinstance(item, dict) for item in value):
        return Setting((Condition(None, tuple(_scalar(item, spec, what) for item in value)),))
    return Setting(tuple(_condition(item, spec, what) for item in value))


def _condition(item: Any, spec: ParameterSpec, what: str) -> Condition:
    if not isinstance(item, dict) or not set(item) <= {"filter", "value"} or "value" not in item:
        raise RecipeError(f"{what}: each filter has the form '- filter: NAME' with a 'value', not {item!r}")
    pattern = item.get("filter")
    if pattern is not None and not isinstance(pattern, str):
        raise RecipeError(f"{what}: the filter {pattern!r} is not text: give a part of tensors' names")
    values = item["value"] if isinstance(item["value"], list) else [item["value"]]
    if not values:
        raise RecipeError(f"{what}: the filter {pattern!r} has an empty list of values")
    return Condition(None if pattern in (None, _EVERY) else pattern, tuple(_scalar(v, spec, what) for v in values))


def _scalar(value: Any, spec: ParameterSpec, what: str) -> Scalar:
    if spec.is_flag:
        if not isinstance(value, bool) and value not in (0, 1):
            raise RecipeError(f"{what} is {value!r}: it is true or false")
        return bool(value)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RecipeError(f"{what} is {value!r}: it has to be a number")
    if not spec.lowest <= number <= spec.highest:
        raise RecipeError(f"{what} is {number:g}: it has to be in {spec.lowest:g}..{spec.highest:g}")
    return number
