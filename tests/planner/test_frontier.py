"""What the order of steps promises: budgets kept and used, and the least error at every point of the hull."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergefs.planner.frontier import Frontier, by_blocks, by_tiers, hash_rank

DEPTHS = 5
Ints = NDArray[np.int64]

# Few values, so that ties are frequent; and any.
remaining = st.sampled_from([0.0, 0.25, 1.0, 1.0, 2.0, 4.0, np.inf]) | st.floats(0, 1e9)
worths = st.sampled_from([0.0, 1.0, 2.0, 8.0]) | st.floats(0, 1e9)


class Instance:
    """Blocks to choose from, as `Candidates` and `Quality` describe them."""

    def __init__(self, rows: list[tuple[list[int], list[float], int]]) -> None:
        """Each row: the price of each tier; the error before each; the depth that it begins at."""
        count = len(rows)
        self.cost = np.zeros((count, DEPTHS), np.int64)
        self.error = np.zeros((count, DEPTHS))
        self.tiers = np.array([len(prices) for prices, _, _ in rows], np.int64).reshape(count)
        self.floor = np.array([floor for _, _, floor in rows], np.int64).reshape(count)
        for row, (prices, errors, _) in enumerate(rows):
            self.cost[row, 1:] = np.cumsum([*prices, *[0] * (DEPTHS - 1 - len(prices))])
            self.error[row, : len(errors)] = errors

    def frontier(self, planner: str = "tiers") -> Frontier:
        if planner == "tiers":
            return by_tiers(self.cost, self.error, self.tiers, self.floor)
        rank = hash_rank(3, len(self.tiers)) if planner == "hash" else None
        return by_blocks(self.cost, self.error, self.tiers, self.floor, rank)

    def cost_of(self, depth: Ints) -> int:
        return int(self.cost[np.arange(len(depth)), depth].sum())

    def error_of(self, depth: Ints) -> float:
        return float(self.error[np.arange(len(depth)), depth].sum())

    def allocations(self, planner: str = "tiers") -> list[tuple[int, float]]:
        """Return the cost and the error of everything that could be read."""
        choices = [
            range(floor, last + 1) if planner == "tiers" else sorted({floor, last})
            for floor, last in zip(self.floor.tolist(), self.tiers.tolist(), strict=True)
        ]
        every = (np.array(depth, np.int64) for depth in product(*choices))
        return [(self.cost_of(depth), self.error_of(depth)) for depth in every]


@st.composite
def instances(draw: st.DrawFn, most: int = 12, cheapest: int = 1, floors: bool = True) -> Instance:
    rows = []
    for _ in range(draw(st.integers(0, most))):
        tiers = draw(st.integers(1, DEPTHS - 1))
        prices = draw(st.lists(st.integers(cheapest, 40), min_size=tiers, max_size=tiers))
        errors = [draw(worths), *draw(st.lists(remaining, min_size=tiers - 1, max_size=tiers - 1))]
        # What has been read is known: a block does not begin at a depth of which nothing is.
        begins = [depth for depth in range(tiers) if np.isfinite(errors[depth])] + [tiers]
        rows.append((prices, errors, draw(st.sampled_from(begins)) if floors else 0))
    return Instance(rows)


planners = st.sampled_from(["tiers", "blocks", "hash"])


@given(instances(cheapest=0), planners, st.integers(0, 2000))
@settings(max_examples=300, deadline=None)
def test_budgets_are_kept_and_used_to_within_one_step(instance: Instance, planner: str, more: int) -> None:
    frontier = instance.frontier(planner)
    budget = frontier.floor_cost + more
    depth = frontier.within(budget)
    assert (instance.floor <= depth).all()
    assert (depth <= instance.tiers).all()
    left = budget - instance.cost_of(depth)
    assert left >= 0
    # No step that removes error, and whose block is where it begins, would still fit.
    possible = (depth[frontier.row] == frontier.start) & (frontier.price <= left) & (frontier.gain > 0)
    assert not possible.any()


@given(instances(cheapest=0), planners)
@settings(max_examples=200, deadline=None)
def test_more_steps_are_never_worse_and_read_nothing_less_deep(instance: Instance, planner: str) -> None:
    frontier = instance.frontier(planner)
    depths = [frontier.after(steps) for steps in range(len(frontier) + 1)]
    assert np.array_equal(depths[0], instance.floor)
    assert np.array_equal(depths[-1], instance.tiers)
    costs = [instance.cost_of(depth) for depth in depths]
    errors = [instance.error_of(depth) for depth in depths]
    for step in range(len(frontier)):
        row = frontier.row[step]
        assert depths[step][row] == frontier.start[step] < frontier.end[step] == depths[step + 1][row]
        assert np.array_equal(np.delete(depths[step], row), np.delete(depths[step + 1], row))
        assert costs[step + 1] - costs[step] == frontier.price[step] >= 0
        assert errors[step + 1] <= errors[step] * (1 + 1e-12)
    assert costs[0] == frontier.floor_cost
    assert errors[-1] == 0.0


@given(instances(most=4), st.sampled_from(["tiers", "blocks"]))
@settings(max_examples=150, deadline=None)
def test_nothing_of_the_same_cost_leaves_less_error_than_a_point_of_the_hull(instance: Instance, planner: str) -> None:
    every = instance.allocations(planner)
    frontier = instance.frontier(planner)
    for steps in range(len(frontier) + 1):
        depth = frontier.after(steps)
        cost, error = instance.cost_of(depth), instance.error_of(depth)
        assert np.isfinite(error)
        assert error <= min(other for price, other in every if price <= cost) * (1 + 1e-9) + 1e-12
        # A budget of just that is spent that well.
        assert instance.error_of(frontier.within(cost)) <= error * (1 + 1e-9) + 1e-12


@given(instances(most=4), planners, st.integers(0, 400))
@settings(max_examples=100, deadline=None)
def test_a_budget_does_no_worse_than_the_last_point_of_the_hull_before_it(
    instance: Instance, planner: str, more: int
) -> None:
    frontier = instance.frontier(planner)
    budget = frontier.floor_cost + more
    prefixes = [frontier.after(steps) for steps in range(len(frontier) + 1)]
    affordable = [depth for depth in prefixes if instance.cost_of(depth) <= budget]
    depth = frontier.within(budget)
    assert (depth >= affordable[-1]).all()
    assert instance.error_of(depth) <= instance.error_of(affordable[-1]) * (1 + 1e-12)


@given(instances())
@settings(max_examples=100, deadline=None)
def test_a_plan_goes_on_from_where_it_stopped(instance: Instance) -> None:
    """Steps from the depths after some steps are the remaining steps."""
    frontier = instance.frontier()
    middle = len(frontier) // 2
    reached = frontier.after(middle)
    rest = by_tiers(instance.cost, instance.error, instance.tiers, reached)
    assert rest.floor_cost == instance.cost_of(reached)
    assert len(rest) == len(frontier) - middle
    assert int(rest.price.sum()) == int(frontier.price[middle:].sum())
    assert float(rest.gain.sum()) == pytest.approx(float(frontier.gain[middle:].sum()))


def test_depths_of_which_nothing_is_known_are_passed_over() -> None:
    blind = Instance([([10, 10, 10, 10], [8.0, np.inf, np.inf, np.inf], 0), ([10, 10], [4.0, np.inf], 0)])
    frontier = blind.frontier()
    assert {(0, 0, 4), (1, 0, 2)} == set(zip(frontier.row, frontier.start, frontier.end, strict=True))
    for budget in range(61):
        assert np.isfinite(blind.error_of(frontier.within(budget)))


def test_a_tier_that_makes_it_worse_is_read_only_on_the_way_to_a_better_one() -> None:
    worse = Instance([([10, 10, 10, 10], [4.0, 5.0, 1.0, 3.0], 0)])
    frontier = worse.frontier()
    assert frontier.end.tolist() == [2, 4]
    assert [worse.error_of(frontier.within(budget)) for budget in (0, 10, 20, 30, 40)] == [4, 4, 1, 1, 0]


def test_of_equally_steep_steps_those_in_one_block_are_taken_as_one() -> None:
    straight = Instance([([10, 10, 10, 10], [4.0, 3.0, 2.0, 1.0], 0)])
    frontier = straight.frontier()
    assert (frontier.start.tolist(), frontier.end.tolist()) == ([0], [4])


def test_what_costs_nothing_is_taken() -> None:
    free = Instance([([0, 10], [4.0, 1.0], 0), ([5, 0], [4.0, 1.0], 0), ([0], [1e-6], 0)])
    depth = free.frontier().within(0)
    assert depth.tolist() == [1, 0, 1]
    assert free.frontier().within(5).tolist() == [1, 2, 1]
    assert free.frontier("blocks").within(0).tolist() == [0, 0, 1]


def test_what_removes_no_error_is_not_read_for_what_a_budget_leaves_over() -> None:
    """A tensor of importance 0: its blocks come after all others, and not with the crumbs."""
    one = ([100], [5.0], 0)
    nothing = ([10], [0.0], 0)
    instance = Instance([nothing, one, nothing, one])
    for planner in ("tiers", "blocks"):
        assert instance.frontier(planner).within(150).tolist() == [0, 1, 0, 0]


def test_the_floor_is_kept_and_counted() -> None:
    rows = [([10, 10, 10, 10], [8.0, 4.0, 2.0, 1.0], floor) for floor in (0, 1, 3, 4)]
    instance = Instance(rows)
    for planner in ("tiers", "blocks", "hash"):
        frontier = instance.frontier(planner)
        assert frontier.floor_cost == 80
        assert frontier.within(80).tolist() == [0, 1, 3, 4]
        assert frontier.within(160).tolist() == [4, 4, 4, 4]
    assert instance.frontier("tiers").within(100).tolist() == [1, 2, 3, 4]
    assert instance.frontier("blocks").within(89).tolist() == [0, 1, 3, 4]
    assert instance.frontier("blocks").within(90).tolist() == [0, 1, 4, 4]


def test_nothing_to_choose_from() -> None:
    for planner in ("tiers", "blocks", "hash"):
        frontier = Instance([]).frontier(planner)
        assert len(frontier) == frontier.floor_cost == 0
        assert frontier.within(5).tolist() == []


def test_a_hash_depends_on_the_seed_and_draws_evenly() -> None:
    one, two = hash_rank(0, 4000), hash_rank(1, 4000)
    assert np.array_equal(one, hash_rank(0, 4000))
    assert np.array_equal(one[:100], hash_rank(0, 100))
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.06
    first = np.argsort(-one)[:1000]
    assert abs(np.mean(first) / 2000 - 1) < 0.06
