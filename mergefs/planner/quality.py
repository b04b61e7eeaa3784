"""How much error of the merged result is left at each depth of each block.

Not reading a block costs its Shapley value in the squared norm of the merged delta: the mean, over all orders of
adding blocks, of what it adds. For |sum c_i d_i|^2 that is exactly c_i <d_i, sum_j c_j d_j>: a block that the other
experts cancel is worth little. Coarse tiers leave a share s_i of |d_i|^2, and what is left of two experts goes together
as their deltas do: its inner product is s_i s_j <d_i, d_j> (the first term of the expansion of two Gaussian variables'
quantisers in Hermite polynomials). Which depths the others will have is not known while steps are ordered, so s_i^2
stands for s_i s_j there. Where a method trims, drops or elects, it turns what remains of the experts' deltas into more
or less error of its result: how much, a simulation on the sampled elements tells.
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

_TINY = 1e-300


@dataclass(frozen=True)
class Quality:
    """The error at every depth.

    Attributes:
        error: float64[n, 5]: squared error of the merged delta at depth 0 to 4 of each candidate; infinite where there
            is no such depth, 0 from the exact one on.
        worth: float64[n]: the share of each in the squared norm of the merged delta.
        own: float64[n]: the energy of its own weighted delta.
        left: float64[n, 5]: what of that is left at every depth, like `error` but for the other experts' part.
        factor: float64[n]: the importance of each, which is in all of the above.
        products: for each tensor float32[blocks, experts, experts] with the inner products of the experts' weighted
            deltas, 0 on the diagonal, without importance; None where there are no sketches.
        simulation: for methods that decide by elements; None for the others, or where too little is known.
    """

    error: NDArray[np.float64]
    worth: NDArray[np.float64]
    own: NDArray[np.float64]
    left: NDArray[np.float64]
    factor: NDArray[np.float64]
    products: list[NDArray[np.float32] | None]
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
            squared = min(1.0, float(self._squared(found, depth).sum()) / whole)
        return float(np.sqrt(squared))

    def _squared(self, found: Candidates, depth: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the part of each in the squared error of the sum of all deltas, each at its depth."""
        left = self.left[np.arange(len(depth)), depth]
        share = left / np.maximum(self.own, _TINY)
        squared = left.copy()
        for number, products in enumerate(self.products):
            mine = found.of_tensor(number)
            if products is not None:
                shares = found.grid(number, share)
                together = shares * np.einsum("bij,jb->ib", products, shares)
                squared[mine] += together[found.expert[mine], found.block[mine]] * self.factor[mine]
        return np.maximum(squared, _LEAST_WORTH * left)


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
    energy = found.rows["energy"]
    own = squares * energy
    left = np.full((len(found), DEPTHS), np.inf)
    left[:, 0] = own
    left[:, 1 : 1 + COARSE_TIERS] = squares[:, None] * found.rows["errors"].astype(np.float64)
    products = [_products(found, measured, number, coefficients) for number in range(len(found.tensors))]
    together = np.zeros(len(found))
    for number, each in enumerate(products):
        if each is not None:
            mine = found.of_tensor(number)
            together[mine] = each.sum(axis=2, dtype=np.float64)[found.block[mine], found.expert[mine]]
    first = np.cumsum([0, *found.block_counts])[:-1]
    factor = np.concatenate([np.empty(0), *weights])[first[found.tensor] + found.block]
    with np.errstate(invalid="ignore"):
        own, left, together = own * factor, left * factor[:, None], together * factor
    left[np.isnan(left)] = np.inf  # unknown, and infinite times nothing
    left[np.arange(DEPTHS)[None, :] >= found.tiers[:, None]] = 0.0
    worth = np.maximum(own + together, _LEAST_WORTH * own)
    if simulation is not None and simulation.tells:
        share = found.rows["errors"].astype(np.float64) / np.maximum(energy, _TINY)[:, None]
        error = np.full((len(found), DEPTHS), np.inf)
        error[:, 0] = worth
        error[:, 1 : 1 + COARSE_TIERS] = worth[:, None] * _curve(found, simulation)(share)
        error[np.isnan(error) | ~np.isfinite(left)] = np.inf
        error[np.arange(DEPTHS)[None, :] >= found.tiers[:, None]] = 0.0
    else:
        simulation = None
        share = left / np.maximum(own, _TINY)[:, None]
        with np.errstate(invalid="ignore"):
            error = np.maximum(left + share**2 * together[:, None], _LEAST_WORTH * left)
        error[np.isnan(error)] = np.inf
        # A block that others cancel is worth less than the noise of its first tiers: reading it is not worse.
        error[:, 0] = np.maximum(error[:, 0], np.where(np.isfinite(error[:, 1]), error[:, 1], 0.0))
    return Quality(error, worth, own, left, factor, products, simulation)


def _products(
    found: Candidates, measured: Measurer, number: int, coefficients: tuple[float, ...]
) -> NDArray[np.float32] | None:
    """Return the inner products of the experts' weighted deltas in a tensor, block by block; None without sketches."""
    mine = found.of_tensor(number)
    blocks, name = found.block_counts[number], found.tensors[number].name
    experts = np.unique(found.expert[mine])
    if len(experts) < 2:
        return None
    sketches = [measured.statistics(int(expert), name).sketches for expert in experts]
    if any(len(sketch) != blocks for sketch in sketches):
        return None
    stacked = np.stack([from_bfloat16(sketch) for sketch in sketches], axis=1)
    products = np.zeros((blocks, found.experts, found.experts), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        stacked *= np.array(coefficients, np.float32)[experts][:, None]
        products[:, experts[:, None], experts] = stacked @ stacked.transpose(0, 2, 1)
    products[~np.isfinite(products)] = 0.0
    products[:, range(found.experts), range(found.experts)] = 0.0
    return products


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
