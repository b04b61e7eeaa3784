"""Plans as earlier versions wrote them, read in the form of now. A plan keeps its bytes and its id for good.

What each form lacks is in spec/manifest.md.
"""

from __future__ import annotations

from typing import Any

_BEFORE_NUMBERS = ("weights", "densities", "settings")


def as_now(value: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's JSON in the form of now; one that has it is returned as it is.

    Args:
        value: what was read; not changed.

    Raises:
        KeyError, TypeError, ValueError: when it is in none of the forms.
    """
    tensors = value["tensors"]
    if "models" in value and "numbers" in value and all("ceilings" in tensor for tensor in tensors):
        return value
    value = {"models": [], **value}
    tensors = [{"numbers": 0, "factors": [], "ceilings": [], **tensor} for tensor in tensors]
    if "numbers" not in value:
        weights, densities, settings = (value.pop(key) for key in _BEFORE_NUMBERS)
        experts = [{"weight": w, "density": d} for w, d in zip(weights, densities, strict=True)]
        value["numbers"] = [{"experts": experts, "shared": settings}]
    if "baseless" not in value:
        # There were no tiers then: a block was read whole or not at all, and only models without a base had one of
        # the experts in its place.
        value["baseless"] = value["base"] in value["experts"]
        tensors = [{**t, "depths": [depths.replace("1", "9") for depths in t["depths"]]} for t in tensors]
    return {**value, "tensors": tensors}
