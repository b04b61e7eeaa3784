"""What the parameters of merge methods may be, as recipes give them."""

from __future__ import annotations

import math
from dataclasses import dataclass

Scalar = float | bool


@dataclass(frozen=True)
class ParameterSpec:
    """What a method's parameter may be.

    Attributes:
        default: used when the recipe does not give it; None when it has to.
        is_flag: true or false instead of a number.
        lowest, highest: of a number.
        per_model: whether each model may have its own.
    """

    default: Scalar | None
    is_flag: bool = False
    lowest: float = -math.inf
    highest: float = math.inf
    per_model: bool = False


ON = ParameterSpec(True, is_flag=True)
OFF = ParameterSpec(False, is_flag=True)
WEIGHT = ParameterSpec(None, per_model=True)
DENSITY = ParameterSpec(1.0, lowest=0.0, highest=1.0, per_model=True)
LAMBDA = ParameterSpec(1.0)
INT8_MASK = "int8_mask"
"""Chooses the dtype of mergekit's intermediate mask: accepted, and of no effect here."""

OF_DELTAS = {"weight": WEIGHT, "lambda": LAMBDA, INT8_MASK: OFF}
"""What all methods have that add up deltas."""
