"""The merge methods by name. Packages add their own by entry points: NAME = module:ClassOfMethod."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from mergefs.errors import RecipeError
from mergefs.merge.breadcrumbs import Breadcrumbs, BreadcrumbsTies
from mergefs.merge.dare import DareLinear, DareTies
from mergefs.merge.della import Della, DellaLinear
from mergefs.merge.fusion import ArceeFusion
from mergefs.merge.linear import Linear, TaskArithmetic
from mergefs.merge.method import Method
from mergefs.merge.ram import Ram, RamPlusTl
from mergefs.merge.sce import Sce
from mergefs.merge.single import NearSwap, Passthrough
from mergefs.merge.spherical import Karcher, ModelStock, MultiSlerp, NuSlerp, Slerp
from mergefs.merge.ties import Ties

GROUP = "mergefs.methods"

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
        Sce(),
        Ram(),
        RamPlusTl(),
        ArceeFusion(),
        NearSwap(),
        Passthrough(),
    )
}


def own() -> tuple[Method, ...]:
    """Return mergefs's own methods."""
    return tuple(_METHODS.values())


def names() -> tuple[str, ...]:
    """Return the names of all methods: mergefs's own, then those of other packages."""
    return (*_METHODS, *(name for name in _entry_points() if name not in _METHODS))


def parameters() -> frozenset[str]:
    """Return the names of all parameters that mergefs's own methods have."""
    return frozenset(name for known in _METHODS.values() for name in known.parameters)


def method(name: str) -> Method:
    """Return a method.

    Raises:
        RecipeError: when this mergefs has none of that name.
    """
    if name in _METHODS:
        return _METHODS[name]
    found = _entry_points().get(name)
    if found is None:
        raise RecipeError(f"unknown merge_method '{name}': this mergefs has {', '.join(names())}")
    return _load(found)


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=GROUP)}


@cache
def _load(found: EntryPoint) -> Method:
    """Return the method of another package.

    Raises:
        RecipeError: when it cannot be loaded, or is no method of that name.
    """
    try:
        made = found.load()()
    except Exception as error:
        raise RecipeError(f"merge_method '{found.name}' ({found.value}) cannot be loaded: {error}") from error
    if not isinstance(made, Method) or made.name != found.name:
        raise RecipeError(f"merge_method '{found.name}' ({found.value}) is no mergefs method of that name")
    return made
