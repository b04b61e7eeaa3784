"""How much error of the merged result is left at each depth of each block.

The error of a sum of deltas, |sum_i c_i e_i|^2 with e_i what is left of d_i, has the terms c_i^2 |e_i|^2 and, for each
two experts, 2 c_i c_j <e_i, e_j>. A block that is read to a depth has the share s of |d|^2 left: 1 unread, 0 exactly.
For a quantiser whose levels are the means of what they stand for, <e_i, e_j> is about s_i s_j <d_i, d_j>: the noise
of two experts is independent, and what is left of the deltas themselves is not. So the error is

    sum_i s_i (c_i^2 |d_i|^2 + c_i <d_i, sum_(j != i) s_j c_j d_j>).

Where a method trims, drops or elects, it turns what is left of the deltas into more or less error of its result: how
much, a simulation on the sampled elements tells, and shares of its error take the place of shares of energy.
"""

from __future__ import annotations

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
    """What is known of the error; arrays of one row for each candidate, weighted by importance.

    Attributes:
        found: the candidates.
        shares: float64[n, 5]: how much of each is left at depth 0 to 4; infinite where there is no such depth.
        own: float64[n]: the energy of its own weighted delta.
        together: float64[n]: the inner product of its weighted delta with those of the other experts.
        simulation: for methods that decide by elements; None for the others, or where too little is known.
    """

    found: Candidates
    shares: NDArray[np.float64]
    own: NDArray[np.float64]
    together: NDArray[np.float64]
    simulation: Simulation | None

    def errors(self, others: float) -> NDArray[np.float64]:
        """Return float64[n, 5]: what each depth of a block leaves of the squared error.

        Args:
            others: the share that is left of the other experts' blocks, 0 to 1: with it grows what a block has in
                common with them.
        """
        worth = np.maximum(self.own + 2.0 * others * self.together, _LEAST_WORTH * self.own)
        with np.errstate(invalid="ignore"):
            found = worth[:, None] * self.shares
        found[np.isnan(found)] = np.inf  # no such depth of a block that is worth nothing
        return found

    def left(self, depth: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return which share is left of each at its depth."""
        return np.asarray(self.shares[np.arange(len(depth)), depth])

    def error_terms(self, depth: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return each block's part in the squared error."""
        share = self.left(depth)
        # What is left of the others in the same place: the mean over them, by the norms of their deltas.
        places, norms = self.found.places, np.sqrt(self.own)
        sums = np.bincount(places, norms, minlength=1)
        kept = np.bincount(places, norms * share, minlength=1)
        others = (kept[places] - norms * share) / np.maximum(sums[places] - norms, 1e-300)
        return np.asarray(share * (self.own + np.clip(others, 0.0, 1.0) * self.together))

    @property
    def norm_terms(self) -> NDArray[np.float64]:
        """Each block's part in the squared norm of the merged delta."""
        return self.own + self.together

    def only(self, rows: NDArray[np.int64]) -> Quality:
        """Return what is known of some candidates; whole places, for what experts have in common to be right."""
        found = self.found.only(rows)
        return Quality(found, self.shares[rows], self.own[rows], self.together[rows], None)

    def predict(self, depth: NDArray[np.int64]) -> float | None:
        """Return the error of the merged delta relative to its norm; None where nothing is known."""
        found = self.found
        if bool((depth == found.tiers).all()):
            return 0.0
        if self.simulation is not None:
            exact = np.where(depth == found.tiers, DEPTHS - 1, depth)
            squared = self.simulation.error({n: found.grid(n, exact) for n in range(len(found.tensors))})
            return float(np.sqrt(squared))
        return relative(float(self.error_terms(depth).sum()), float(self.norm_terms.sum()))


def relative(error: float, norm: float) -> float | None:
    """Return the root of a squared error over a squared norm, both of them estimates; None where there is no norm."""
    return float(np.sqrt(min(1.0, max(0.0, error) / norm))) if norm > 0.0 else None


def assess(
    found: Candidates,
    measured: Measurer,
    coefficients: NDArray[np.float64],
    weights: list[NDArray[np.float64]],
    simulation: Simulation | None,
) -> Quality:
    """Return what is known of the error.

    Args:
        found: all candidates, of which all statistics are known.
        measured: the experts' statistics.
        coefficients: float64[tensors, experts]: each expert's factor in the result.
        weights: for each tensor float64[blocks]: its blocks' importance.
        simulation: of the merge, for methods that decide by elements.
    """
    own = coefficients[found.tensor, found.expert] ** 2 * found.rows["energy"]
    together = np.zeros(len(found))
    for number in range(len(found.tensors)):
        mine = found.of_tensor(number)
        if mine.start < mine.stop:
            together[mine] = _together(found, measured, number, coefficients[number])
    shares = np.ones((len(found), DEPTHS))
    coarse = found.rows["errors"] / np.maximum(found.rows["energy"], 1e-300)[:, None]
    if simulation is not None and simulation.tells:
        coarse = np.interp(coarse, *_curve(found, simulation))
    else:
        simulation = None
    shares[:, 1 : 1 + COARSE_TIERS] = np.where(np.isnan(coarse), np.inf, coarse)
    shares[np.arange(DEPTHS)[None, :] >= found.tiers[:, None]] = 0.0
    factor = np.concatenate([np.empty(0), *weights])[found.places]
    return Quality(found, shares, own * factor, together * factor, simulation)


def _together(
    found: Candidates, measured: Measurer, number: int, coefficients: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the inner product of each candidate of a tensor with the other experts' blocks, by their sketches."""
    mine = found.of_tensor(number)
    blocks, name = found.block_counts[number], found.tensors[number].name
    experts = np.unique(found.expert[mine])
    sketches = [measured.statistics(int(expert), name).sketches for expert in experts]
    if any(len(sketch) != blocks for sketch in sketches):
        return np.zeros(mine.stop - mine.start)  # a small tensor
    stacked = np.stack([from_bfloat16(sketch) for sketch in sketches])
    stacked *= coefficients[experts].astype(np.float32)[:, None, None]
    with_all = np.einsum("ebs,bs->eb", stacked, stacked.sum(axis=0))
    products = with_all.astype(np.float64) - np.einsum("ebs,ebs->eb", stacked, stacked)
    place = np.searchsorted(experts, found.expert[mine])
    return np.asarray(products[place, found.block[mine]])


def _curve(found: Candidates, simulation: Simulation) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return points of the share of deltas' energy that is left, and of the merged delta's error then."""
    energy = float(found.rows["energy"].sum())
    shares, errors = [0.0], [0.0]
    for depth in range(COARSE_TIERS, 0, -1):
        left = float(np.nansum(found.rows["errors"][:, depth - 1].astype(np.float64)))
        shares.append(left / energy)
        errors.append(simulation.uniform(depth))
    return np.maximum.accumulate([*shares, 1.0]), np.maximum.accumulate([*errors, 1.0])
