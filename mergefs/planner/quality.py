"""How much error of the merged result is left at each depth of each block.

Not reading a block costs its Shapley value in the squared norm of the merged delta: the mean, over all orders of
adding blocks, of what it adds. For |sum c_i d_i|^2 that is exactly c_i <d_i, sum_j c_j d_j>: a block that the other
experts cancel is worth little. Of what remains after coarse tiers, a share r_i of |d_i|^2, most is noise of the
quantiser, independent from expert to expert, and counts with c_i^2 alone; what it still has in common with the
other experts' is about r_i r_j <d_i, d_j>, as for any quantiser whose levels are the means of what they stand for.
Where a method trims, drops or elects, it turns what remains of the experts' deltas into more or less error of its
result: how much, a simulation on the sampled elements tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.tiers.layout import COARSE_TIERS
from mergefs.planner.candidates import DEPTHS, Candidates
from mergefs.planner.measured import Measurer
from mergefs.planner.simulation import Simulation
from mergefs.statistics.sample import from_bfloat16

_LEAST_WORTH = 0.05
"""A block's worth is at least this share of its own energy, however much the others seem to cancel it: the
inner products are estimates."""


@dataclass(frozen=True)
class Quality:
    """The error at every depth.

    Attributes:
        error: float64[n, 5]: squared error of the merged delta at depth 0 to 4 of each candidate; infinite where there
            is no such depth, 0 from the exact one on.
        worth: float64[n]: the share of each in the squared norm of the merged delta.
        own: float64[n]: the energy of its own weighted delta.
        simulation: for methods that decide by elements; None for the others, or where too little is known.
    """

    error: NDArray[np.float64]
    worth: NDArray[np.float64]
    own: NDArray[np.float64]
    simulation: Simulation | None

    def remaining(self, depth: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return what is left of each at its depth."""
        return np.asarray(self.error[np.arange(len(depth)), depth])

    def predict(self, found: Candidates, depth: NDArray[np.int64]) -> float | None:
        """Return the error of the merged delta relative to its norm; None where nothing is known."""
        if bool((depth == found.tiers).all()):
            return 0.0
        if self.simulation is not None:
            exact = np.where(depth == found.tiers, DEPTHS - 1, depth)
            squared = self.simulation.error({n: found.grid(n, exact) for n in range(len(found.tensors))})
        else:
            whole = float(self.worth.sum())
            if whole <= 0.0:
                return None
            squared = min(1.0, float(self.remaining(depth).sum()) / whole)
        return float(np.sqrt(squared))


def assess(
    found: Candidates,
    measured: Measurer,
    coefficients: tuple[float, ...],
    weights: list[NDArray[np.float64]],
    simulation: Simulation | None,
) -> Quality:
    """Return the error at every depth.

    Args:
        found: all candidates, of which all statistics are known.
        measured: the experts' statistics.
        coefficients: each expert's factor in the result.
        weights: for each tensor float64[blocks]: its blocks' importance.
        simulation: of the merge, for methods that decide by elements.
    """
    squares = np.array(coefficients)[found.expert] ** 2
    own = squares * found.rows["energy"]
    worth = own.copy()
    for number in range(len(found.tensors)):
        mine = found.of_tensor(number)
        if mine.start < mine.stop:
            together = _together(found, measured, number, coefficients)
            if together is not None:
                worth[mine] = np.maximum(own[mine] + together, _LEAST_WORTH * own[mine])
    error = np.full((len(found), DEPTHS), np.inf)
    error[:, 0] = worth
    coarse = found.rows["errors"].astype(np.float64)
    share = coarse / np.maximum(found.rows["energy"], 1e-300)[:, None]
    if simulation is not None and simulation.tells:
        error[:, 1 : 1 + COARSE_TIERS] = worth[:, None] * _curve(found, simulation)(share)
    else:
        simulation = None
        error[:, 1 : 1 + COARSE_TIERS] = squares[:, None] * coarse + (worth - own)[:, None] * share**2
        # A block that others cancel is worth less than the noise of its first tiers: reading it is not worse.
        error[:, 0] = np.maximum(error[:, 0], np.nan_to_num(error[:, 1], nan=0.0))
    error[np.isnan(error)] = np.inf
    error[np.arange(DEPTHS)[None, :] >= found.tiers[:, None]] = 0.0
    first = np.cumsum([0, *found.block_counts])[:-1]
    factor = np.concatenate([np.empty(0), *weights])[first[found.tensor] + found.block]
    with np.errstate(invalid="ignore"):
        error *= factor[:, None]
    error[np.isnan(error)] = np.inf  # infinite times nothing
    return Quality(error, worth * factor, own * factor, simulation)


def _together(
    found: Candidates, measured: Measurer, number: int, coefficients: tuple[float, ...]
) -> NDArray[np.float64] | None:
    """Return the inner product of each candidate of a tensor with the other experts' blocks; None without sketches."""
    mine = found.of_tensor(number)
    blocks, name = found.block_counts[number], found.tensors[number].name
    experts = np.unique(found.expert[mine])
    sketches = [measured.statistics(int(expert), name).sketches for expert in experts]
    if any(len(sketch) != blocks for sketch in sketches):
        return None
    stacked = np.stack([from_bfloat16(sketch) for sketch in sketches])
    stacked *= np.array(coefficients, np.float32)[experts][:, None, None]
    with_all = np.einsum("ebs,bs->eb", stacked, stacked.sum(axis=0))
    products = with_all.astype(np.float64) - np.einsum("ebs,ebs->eb", stacked, stacked)
    place = np.searchsorted(experts, found.expert[mine])
    return np.asarray(products[place, found.block[mine]])


def _curve(found: Candidates, simulation: Simulation) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Return the function from the share of a delta's energy that remains to that of the merged delta's error."""
    energy = float(found.rows["energy"].sum())
    shares, errors = [0.0], [0.0]
    for depth in range(COARSE_TIERS, 0, -1):
        left = float(np.nansum(found.rows["errors"][:, depth - 1].astype(np.float64)))
        shares.append(left / energy)
        errors.append(simulation.uniform(depth))
    x = np.maximum.accumulate([*shares, 1.0])
    y = np.maximum.accumulate([*errors, 1.0])
    return lambda share: np.interp(share, x, y)
