"""Methods of one model: `passthrough`, and `nearswap` (huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mergefs.merge.linear import SumMethod
from mergefs.merge.method import BlockInputs, Method
from mergefs.merge.parameters import ParameterSpec
from mergefs.planner.plan import Numbers, TensorPlan


class Passthrough(SumMethod):
    """The model itself, times `scale`."""

    name = "passthrough"
    parameters: ClassVar = {"scale": ParameterSpec(1.0, per_model=True)}
    needs_base = False
    base_is_model = True
    most = 1

    def taken(self, numbers: Numbers) -> int | None:
        """See `Method.taken`."""
        return 0 if numbers.each("scale")[0] == 1.0 else None

    def base_scale(self, numbers: Numbers, tensor: TensorPlan) -> float:
        """See `Method.base_scale`."""
        return numbers.each("scale")[0]

    def coefficients(self, numbers: Numbers, tensor: TensorPlan) -> tuple[float, ...]:
        """See `Method.coefficients`: here they are known exactly."""
        return numbers.each("scale")


class NearSwap(Method):
    """base + w d with w = t / |d|, at most 1: the model where it is near the base, t away from the base elsewhere."""

    name = "nearswap"
    parameters: ClassVar = {"t": ParameterSpec(None, lowest=0.0)}
    fewest, most = 1, 1
    placed = False
    by_parts = True

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        if not len(inputs.deltas):
            return inputs.base
        delta = inputs.deltas[0].astype(np.float64)
        share = np.clip(float(inputs.numbers.shared["t"]) / np.maximum(np.abs(delta), 1e-6), 0.0, 1.0)
        merged: NDArray[Any] = (inputs.base + share * delta).astype(inputs.base.dtype)
        return merged
