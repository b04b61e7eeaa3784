"""The recipes that mergefs, mergekit and the plain pipeline run: methods, weights, and a later change of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

METHODS = ("linear", "slerp", "task_arithmetic", "ties", "dare_ties")
RANDOM = ("dare_ties",)
DENSITY = 0.5
T = 0.4
OTHER = {"weight": (0.77, 0.6), "layer": (0.66, 0.55)}
"""The changed weights, and t: others in a layer than everywhere, so that neither merge has blocks of the other."""
LAYER = "layers.0."


@dataclass(frozen=True)
class Case:
    """A merge of the base and its first K experts.

    Attributes:
        method: one of METHODS.
        k: number of experts; `slerp` has one.
        first: another weight of the first expert (of `slerp`: another t).
        layer: the same in one layer only.
    """

    method: str
    k: int
    first: float | None = None
    layer: float | None = None

    @property
    def name(self) -> str:
        """The method and K."""
        return self.method if self.method == "slerp" else f"{self.method} K={self.k}"

    @property
    def experts(self) -> list[str]:
        """The experts' names."""
        return [f"expert-{i}" for i in range(self.k)]

    def changed(self, variant: str) -> Case:
        """Return the merge with another `weight`, or with another in one `layer`; itself for other variants."""
        if variant not in OTHER:
            return self
        other = OTHER[variant][self.method == "slerp"]
        return replace(self, first=other) if variant == "weight" else replace(self, layer=other)

    def recipe(self, name: Callable[[str], str] = str) -> dict[str, Any]:
        """Return the recipe; `name` turns the models' names into what a tool knows them by."""
        value: dict[str, Any] = {"merge_method": self.method, "dtype": "bfloat16"}
        if self.method == "slerp":
            models = [{"model": name("base")}, {"model": name("expert-0")}]
            parameters = {"t": self._weight(T)}
            return {**value, "base_model": name("base"), "models": models, "parameters": parameters}
        if self.method != "linear":  # the base is no part of an average
            value["base_model"] = name("base")
        value["models"] = []
        for number, expert in enumerate(self.experts):
            own: dict[str, Any] = {"weight": weight(number)}
            if number == 0:
                own["weight"] = self._weight(weight(0))
            if "ties" in self.method:
                own["density"] = DENSITY
            value["models"].append({"model": name(expert), "parameters": own})
        return value

    def write(self, file: Path, name: Callable[[str], str] = str) -> Path:
        """Write the recipe into a file (JSON is YAML) and return the file."""
        file.write_text(json.dumps(self.recipe(name), indent=1))
        return file

    def _weight(self, plain: float) -> Any:
        everywhere = plain if self.first is None else self.first
        return everywhere if self.layer is None else [{"filter": LAYER, "value": self.layer}, {"value": everywhere}]


def weight(number: int) -> float:
    """Return the weight of an expert."""
    return round(0.4 + 0.02 * number, 4)


def case(method: str, k: int) -> Case:
    """Return the merge of a method and K experts."""
    return Case(method, 1 if method == "slerp" else k)
