"""The recipes that parity is shown for: every method, with different parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.definitions import RANDOM


@dataclass(frozen=True)
class Asked:
    """A recipe of a base and the first experts of a row.

    Attributes:
        method: the merge method.
        own: the parameters of each expert that takes part.
        shared: the other parameters.
        with_base: whether the recipe names the base.
    """

    method: str
    own: tuple[Mapping[str, float], ...]
    shared: Mapping[str, float | bool] = field(default_factory=dict)
    with_base: bool = True

    @property
    def is_random(self) -> bool:
        return self.method in RANDOM and any(mine.get("density", 1.0) < 1.0 for mine in self.own)

    @property
    def name(self) -> str:
        """The method and its parameters in a line."""
        names = dict.fromkeys(name for mine in self.own for name in mine)
        parts = []
        for name in names:
            values = [f"{mine[name]:g}" for mine in self.own]
            parts.append(f"{name} {values[0] if len(set(values)) == 1 else '/'.join(values)}")
        parts += [
            f"{name} {str(value).lower() if isinstance(value, bool) else f'{value:g}'}"
            for name, value in self.shared.items()
        ]
        if not self.with_base:
            parts.append("no base")
        return ", ".join([f"{self.method} K={len(self.own)}", *parts])

    def text(self, base: str, experts: Sequence[str], dtype: str | None = None) -> str:
        """Return the recipe as JSON, which is YAML.

        Args:
            base, experts: how the recipe names the models.
            dtype: of the result.
        """
        value: dict[str, Any] = {"merge_method": self.method}
        if self.with_base:
            value["base_model"] = base
        value["models"] = [
            {"model": name, **({"parameters": dict(mine)} if mine else {})}
            for name, mine in zip(experts, self.own, strict=False)
        ]
        if self.shared:
            value["parameters"] = dict(self.shared)
        if dtype:
            value["dtype"] = dtype
        return json.dumps(value)


def _weighted(*weights: float, **others: Sequence[float] | float) -> tuple[dict[str, float], ...]:
    """Return the own parameters of as many models as there are weights."""
    return tuple(
        {"weight": weight, **{n: float(v if isinstance(v, float | int) else v[i]) for n, v in others.items()}}
        for i, weight in enumerate(weights)
    )


_EVEN = (1.0, 1.0, 1.0)
_UNEVEN = (0.5, 0.3, 0.2)
_SIGNED = (0.7, -0.4, 1.3)

GRID: tuple[Asked, ...] = (
    Asked("linear", _weighted(*_EVEN), with_base=False),
    Asked("linear", _weighted(*_UNEVEN), {"normalize": False}, with_base=False),
    Asked("linear", ({}, {}), {"weight": 0.5, "density": 0.5}),
    Asked("linear", _weighted(*_SIGNED), with_base=False),
    Asked("task_arithmetic", _weighted(*_UNEVEN)),
    Asked("task_arithmetic", _weighted(*_SIGNED), {"normalize": True, "lambda": 0.8}),
    Asked("ties", _weighted(*_EVEN, density=0.5)),
    Asked("ties", _weighted(*_UNEVEN, density=(0.2, 0.333, 0.9)), {"normalize": False, "lambda": 1.1}),
    Asked("ties", _weighted(*_SIGNED, density=1.0)),
    Asked("ties", _weighted(*_UNEVEN, density=(0.0, 0.05, 1.0))),
    Asked("ties", _weighted(*_UNEVEN, density=(0.2, 0.333, 1.0)), {"rescale": True}),
    Asked("breadcrumbs", _weighted(*_EVEN, density=0.9, gamma=0.01)),
    Asked("breadcrumbs", _weighted(*_UNEVEN, density=0.5, gamma=0.05), {"rescale": True}),
    Asked("breadcrumbs", _weighted(*_UNEVEN, density=(0.5, 0.95, 0.3), gamma=0.1), {"normalize": True}),
    Asked("breadcrumbs_ties", _weighted(*_EVEN, density=0.9, gamma=0.05), {"rescale": True}),
    Asked("breadcrumbs_ties", _weighted(*_UNEVEN, density=0.4, gamma=0.02), {"lambda": 1.3}),
    Asked("dare_linear", _weighted(*_UNEVEN, density=0.5)),
    Asked("dare_linear", _weighted(*_UNEVEN, density=0.3), {"rescale": False, "normalize": True}),
    Asked("dare_linear", _weighted(*_UNEVEN, density=1.0)),
    Asked("dare_ties", _weighted(*_UNEVEN, density=0.5)),
    Asked("dare_ties", _weighted(*_SIGNED, density=(0.1, 0.5, 0.9)), {"normalize": True, "lambda": 0.7}),
    Asked("dare_ties", _weighted(*_UNEVEN, density=1.0)),
    Asked("della", _weighted(*_UNEVEN, density=0.5, epsilon=0.2)),
    Asked("della", _weighted(*_EVEN, density=0.7, epsilon=0.1), {"rescale": False, "normalize": False}),
    Asked("della", _weighted(*_UNEVEN, density=1.0)),
    Asked("della_linear", _weighted(*_UNEVEN, density=0.6, epsilon=0.15)),
    Asked("della_linear", _weighted(*_UNEVEN, density=1.0)),
    Asked("slerp", ({},), {"t": 0.3, "normalize": True}),
    Asked("slerp", ({},), {"t": 0.75}),
    Asked("nuslerp", _weighted(1.0, 3.0), with_base=False),
    Asked("nuslerp", _weighted(0.4, 0.6)),
    Asked("nuslerp", _weighted(1.0, 3.0), {"nuslerp_flatten": False}),
    Asked("nuslerp", _weighted(1.0, 1.0), {"nuslerp_flatten": False}, with_base=False),
    Asked("nuslerp", _weighted(0.4, 0.6), {"nuslerp_flatten": False, "nuslerp_row_wise": True}),
    Asked("nuslerp", _weighted(3.0, 1.0), {"nuslerp_flatten": False, "nuslerp_row_wise": True}, with_base=False),
    Asked("multislerp", _weighted(*_UNEVEN)),
    Asked("multislerp", _weighted(1.0, 2.0, 0.5), with_base=False),
    Asked("karcher", ({}, {}, {}), with_base=False),
    Asked("karcher", ({}, {}), {"max_iter": 50, "tol": 1e-7}),
    Asked("model_stock", ({}, {}, {})),
    Asked("model_stock", ({}, {}, {}), {"filter_wise": True}),
    Asked("sce", ({}, {}, {})),
    Asked("sce", ({}, {}, {}), {"select_topk": 0.5}),
    Asked("sce", ({}, {}), {"select_topk": 0.1}),
    Asked("arcee_fusion", ({},)),
    Asked("ram", ({}, {}, {})),
    Asked("ram", ({}, {}, {}), {"epsilon": 1e-3}),
    Asked("ramplus_tl", ({}, {}, {})),
    Asked("ramplus_tl", ({}, {}, {}), {"epsilon": 1e-3, "r": 0.5, "alpha": 2.0}),
    Asked("nearswap", ({},), {"t": 1e-3}),
    Asked("passthrough", ({"scale": 0.5},), with_base=False),
)
