"""The merge methods by name."""

from __future__ import annotations

from mergefs.errors import RecipeError
from mergefs.merge.breadcrumbs import Breadcrumbs, BreadcrumbsTies
from mergefs.merge.dare import DareLinear, DareTies
from mergefs.merge.della import Della, DellaLinear
from mergefs.merge.linear import Linear, TaskArithmetic
from mergefs.merge.method import Method
from mergefs.merge.single import NearSwap, Passthrough
from mergefs.merge.spherical import Karcher, ModelStock, MultiSlerp, NuSlerp, Slerp
from mergefs.merge.ties import Ties

_METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Linear(),
        TaskArithmetic(),
        Ties(),
        DareLinear(),
        DareTies(),
        Slerp(),
        NuSlerp(),
        MultiSlerp(),
        Karcher(),
        ModelStock(),
        Breadcrumbs(),
        BreadcrumbsTies(),
        Della(),
        DellaLinear(),
        NearSwap(),
        Passthrough(),
    )
}


def names() -> tuple[str, ...]:
    """Return the names of all methods."""
    return tuple(_METHODS)


def method(name: str) -> Method:
    """Return a method.

    Raises:
        RecipeError: when this mergefs has none of that name.
    """
    if name not in _METHODS:
        raise RecipeError(f"unknown merge_method '{name}': this mergefs has {', '.join(_METHODS)}")
    return _METHODS[name]
