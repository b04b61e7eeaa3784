"""Model breadcrumbs: deltas without their largest and their smallest elements (arXiv 2312.06795)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from numpy.typing import NDArray

from mergefs.merge.linear import combine, delta_scale
from mergefs.merge.method import BlockInputs
from mergefs.merge.parameters import DENSITY, OF_DELTAS, OFF, ParameterSpec, Scalar
from mergefs.merge.ties import elect
from mergefs.merge.trimming import TrimmingMethod, trim

PARAMETERS = {
    **OF_DELTAS,
    "density": DENSITY,
    "gamma": ParameterSpec(0.01, lowest=0.0, highest=1.0, per_model=True),
    "normalize": OFF,
    "rescale": OFF,
}


class Breadcrumbs(TrimmingMethod):
    """The trimmed deltas are added up. `gamma` is the share of the largest magnitudes that go, `density` that of the
    next ones that stay; fewer of the largest go where not enough would stay. Elements equal to the magnitudes at either
    end stay, all of them."""

    name = "breadcrumbs"
    parameters: ClassVar = PARAMETERS
    placed = False
    by_parts = True

    def kept(self, own: Mapping[str, Scalar], elements: int) -> tuple[int, int] | None:
        """See `Method.kept`."""
        if float(own["density"]) >= 1.0:
            return None
        count = int(float(own["density"]) * elements)
        smallest = max(0, elements - count - int(float(own["gamma"]) * elements))
        return elements - smallest - count, count

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        trim(inputs)
        scale = delta_scale(inputs.numbers)
        return combine(inputs, 1.0, tuple(w * scale for w in inputs.numbers.weights))


class BreadcrumbsTies(Breadcrumbs):
    """The trimmed deltas are merged after electing signs, as in TIES."""

    name = "breadcrumbs_ties"

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        trim(inputs)
        return elect(inputs, inputs.numbers.weights, ())
