"""What the benchmark of quality tells: means with their standard errors, the table, sentences and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.experts import METHODS
from benchmarks.retrieval import HELD_OUT, Right

BUDGETS = ("1%", "2%", "5%", "10%", "15%", "25%")
PLANNERS = ("tiers", "blocks", "hash")

# Okabe and Ito's colours, which colour-blind people can tell apart.
STYLES = {"tiers": ("#0072B2", "o"), "blocks": ("#D55E00", "s"), "hash": ("#009E73", "^")}


class Key(NamedTuple):
    """What is measured: a merge, or (planner and budget empty) a model or an exact merge."""

    method: str
    planner: str = ""
    budget: str = ""


@dataclass(frozen=True)
class Trial:
    """One measurement of a merge or a model.

    Attributes:
        right: tasks by held-out pairs: which of them are found among all that are held out.
        pool: the same for the seed's pool.
        read: expert bytes read, as a share of the experts' raw bytes.
        error: of the merged delta, relative to the norm of the exact one.
        predicted: the error that the planner predicted.
    """

    right: Right
    pool: Right
    read: float | None = None
    error: float | None = None
    predicted: float | None = None


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks and seeds.

    Attributes:
        mean: with all held-out pairs.
        se_seeds: its standard error over the seeds; None for one seed.
        se_pairs: its standard error over the pairs.
        pools: the mean over tasks for each seed's pool.
    """

    mean: float
    se_seeds: float | None
    se_pairs: float
    pools: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """What is known of a merge or a model over all seeds.

    Attributes:
        key: what it is.
        read, error, predicted: means over the seeds.
        accuracy: of the mean over tasks.
        tasks: accuracy of each task.
        difference: of the accuracy from the exact merge's, pair by pair.
        kept: the share of the exact merge's gain over the base, with its standard error over the pairs.
        lost, won: pairs that the exact merge finds and this one does not, and the other way round; over all seeds.
    """

    key: Key
    read: float | None
    error: float | None
    predicted: float | None
    accuracy: Estimate
    tasks: dict[str, float]
    difference: Estimate | None = None
    kept: tuple[float, float] | None = None
    lost: int = 0
    won: int = 0


Trials = dict[Key, list[Trial]]


# --- statistics --------------------------------------------------------------------------------------------


def over_pairs(values: NDArray[np.float64]) -> float:
    """Return the standard error of the mean over tasks of values of tasks by pairs.

    The tasks are fixed and their pairs a sample. For a single model's right and wrong answers it is the binomial one.
    """
    tasks, pairs = values.shape
    return float(np.sqrt(values.var(axis=1, ddof=1).sum() / pairs) / tasks)


def estimate(right: Sequence[NDArray[np.float64]], pools: Sequence[NDArray[np.float64]], trained: bool) -> Estimate:
    """Return the mean over tasks and seeds, and its standard errors.

    Sets of experts that were trained independently: the error of their mean. Halves of the same pairs: their standard
    deviation, as that of random halves is the standard error of the whole, however many halves are drawn.
    """
    values = np.mean(right, axis=0)
    of_pools = tuple(float(pool.mean()) for pool in pools)
    count = len(of_pools)
    spread = float(np.std(of_pools, ddof=1)) / (math.sqrt(count) if trained else 1.0) if count > 1 else None
    return Estimate(float(values.mean()), spread, over_pairs(values), of_pools)


def difference(these: list[Trial], those: list[Trial], trained: bool) -> Estimate:
    """Return how much more accurate these trials are than those, pair by pair."""
    both = list(zip(these, those, strict=True))
    right = [a.right.astype(float) - b.right for a, b in both]
    return estimate(right, [a.pool.astype(float) - b.pool for a, b in both], trained)


def kept(these: list[Trial], exact: list[Trial], base: list[Trial]) -> tuple[float, float] | None:
    """Return the share of the exact merge's gain over the base that is kept, and its standard error over the pairs.

    None when the exact merge gains nothing. The error is that of a ratio of means of the same pairs, to first order.
    """
    mine, its, start = (np.mean([t.right for t in trials], axis=0) for trials in (these, exact, base))
    gain = float((its - start).mean())
    if gain <= 0:
        return None
    share = float((mine - start).mean()) / gain
    return share, over_pairs(mine - start - share * (its - start)) / gain


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean, or None when there is a value that is not known."""
    known = list(values)
    return None if None in known else float(np.mean([v for v in known if v is not None]))


def summarise(trials: Trials, tasks: Sequence[str], trained: bool) -> dict[Key, Row]:
    """Return a row for everything that was measured."""
    rows = {}
    for key, these in trials.items():
        of_tasks = np.mean([t.right.mean(axis=1) for t in these], axis=0)
        row = Row(
            key,
            mean_of(t.read for t in these),
            mean_of(t.error for t in these),
            mean_of(t.predicted for t in these),
            estimate([t.right.astype(float) for t in these], [t.pool.astype(float) for t in these], trained),
            dict(zip(tasks, map(float, of_tasks), strict=True)),
        )
        rows[key] = against_exact(row, trials, trained) if key.method in METHODS else row
    return rows


def against_exact(row: Row, trials: Trials, trained: bool) -> Row:
    """Return a merge's row with how it compares to the exact one."""
    these, exact = trials[row.key], trials[Key(row.key.method)]
    both = list(zip(these, exact, strict=True))
    return replace(
        row,
        difference=difference(these, exact, trained),
        kept=kept(these, exact, trials[Key("base")]),
        lost=sum(int((b.right & ~a.right).sum()) for a, b in both),
        won=sum(int((a.right & ~b.right).sum()) for a, b in both),
    )


# --- output ------------------------------------------------------------------------------------------------


def number(value: float | None, form: str = ".4f") -> str:
    """Return a cell."""
    return "" if value is None else format(value, form)


def estimate_cells(value: Estimate | None, form: str = ".4f") -> list[str]:
    """Return a mean and its two standard errors."""
    return [number(value.mean, form), number(value.se_seeds), number(value.se_pairs)] if value else [""] * 3


def row_cells(row: Row) -> list[str]:
    """Return a line of the table."""
    is_exact = row.key.method in METHODS and not row.key.planner
    return [
        *(row.key.method, row.key.planner, "exact" if is_exact else row.key.budget),
        *(number(row.read, ".2%"), number(row.error, ".3f"), number(row.predicted, ".3f")),
        *estimate_cells(row.accuracy),
        *estimate_cells(None if is_exact else row.difference, "+.4f"),
    ]


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table with aligned columns, three of text and the others of numbers."""
    titles = ["method", "planner", "budget", "read", "error", "predicted"]
    errors = ["± seeds", "± pairs"]
    cells = [[*titles, "accuracy", *errors, "to exact", *errors], *map(row_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width if i < 3 else "-" * (width - 1) + ":" for i, width in enumerate(widths)])
    forms = [f"{{:{'<' if i < 3 else '>'}{width}}}" for i, width in enumerate(widths)]
    line = f"| {' | '.join(forms)} |"
    return "\n".join(line.format(*of_row) for of_row in cells)


def gains(rows: dict[Key, Row], trials: Trials, planners: Sequence[str], trained: bool) -> list[str]:
    """Return sentences on what the budgets keep, from where on nothing is lost, and how the planners differ."""
    lines = []
    for method in METHODS:
        gain = difference(trials[Key(method)], trials[Key("base")], trained)
        lines.append(f"{method}: the exact merge gains {gain.mean:+.4f} ± {gain.se_pairs:.4f} (pairs) over the base.")
        lines += [kept_line(method, planner, rows) for planner in planners]
        lines += [apart_line(method, planners[0], planner, trials, trained) for planner in planners[1:]]
    return lines


def kept_line(method: str, planner: str, rows: dict[Key, Row]) -> str:
    """Return what a planner keeps of a method's gain."""
    of_budgets = {budget: rows[Key(method, planner, budget)] for budget in BUDGETS}
    shares = [f"{row.kept[0]:.0%} ± {row.kept[1]:.0%} at {b}" for b, row in of_budgets.items() if row.kept]
    lossless = [not loses(row) for row in of_budgets.values()]
    first = next((b for i, b in enumerate(BUDGETS) if all(lossless[i:])), None)
    loss = "a loss beyond" if first is None else f"from {first} on no loss beyond"
    return (
        f"  {planner} (± pairs): of that gain it keeps {', '.join(shares) or 'nothing that could be told'};"
        f" {loss} one standard error of the difference to the exact merge."
    )


def apart_line(method: str, one: str, other: str, trials: Trials, trained: bool) -> str:
    """Return how much more accurate one planner is than another at the same budgets."""
    apart = {b: difference(trials[Key(method, one, b)], trials[Key(method, other, b)], trained) for b in BUDGETS}
    told = ", ".join(f"{d.mean:+.4f} ± {d.se_pairs:.4f} at {b}" for b, d in apart.items())
    return f"  {one} less {other} (± pairs): {told}."


def loses(row: Row) -> bool:
    """Whether a merge is less accurate than the exact one by more than the standard error of the difference."""
    apart = row.difference
    return apart is not None and apart.mean < -apart.se_pairs - 1e-9


def notes(trained: bool, seeds: int, tasks: Sequence[str]) -> str:
    """Return what the columns mean."""
    pairs = f"{HELD_OUT} held-out pairs of each of {', '.join(tasks)}"
    of_seeds = (
        f"the standard error over {seeds} independently trained sets of experts"
        if trained
        else f"the standard deviation over {seeds} seeds, each a random half of the pairs as the pool (and, for hash,"
        " a sample of its own), which estimates the standard error of the accuracy on all of them"
    )
    return (
        f"Accuracy@1 over {pairs}, mean of the tasks. ± seeds: {of_seeds}.\n"
        "± pairs: the standard error over the pairs, binomial for one model; that of 'to exact' is of the differences"
        " pair by pair.\nRead: of the experts' raw bytes. Error: of the merged delta, relative to the exact one's norm."
    )


def as_json(row: Row) -> dict[str, Any]:
    """Return a row with its key's parts beside its values."""
    return row.key._asdict() | {name: value for name, value in asdict(row).items() if name != "key"}


def draw(rows: dict[Key, Row], planners: Sequence[str], file: Path) -> None:
    """Draw accuracy and error against the bytes read."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MultipleLocator

    figure, axes = plt.subplots(2, len(METHODS), figsize=(9, 6.5), sharex=True, sharey="row", layout="constrained")
    base = rows[Key("base")]
    for column, method in enumerate(METHODS):
        upper, lower = axes[:, column]
        exact = rows[Key(method)]
        for level, label, shift in ((exact.accuracy.mean, "exact merge", -13), (base.accuracy.mean, "base", 4)):
            upper.axhline(level, color="0.6", linewidth=1, linestyle="--", zorder=0)
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
            upper.annotate(label, (1, level), xytext=(0, shift), color="0.4", **place)
        for planner in planners:
            color, marker = STYLES[planner]
            points = [base, *(rows[Key(method, planner, budget)] for budget in BUDGETS)]
            read = [100 * (row.read or 0) for row in points]
            bars = [row.difference.se_pairs if row.difference else 0 for row in points]
            style = {"color": color, "marker": marker, "markersize": 5, "linewidth": 1.5, "label": planner}
            upper.errorbar(read, [row.accuracy.mean for row in points], yerr=bars, capsize=2, elinewidth=1, **style)
            lower.plot(read, [row.error for row in points], **style)
        upper.set_title(method)
        lower.xaxis.set_major_locator(MultipleLocator(5))
        lower.set_xlabel("expert bytes read, % of raw")
    axes[0, 0].set_ylabel("accuracy@1, mean of tasks")
    axes[1, 0].set_ylabel("relative error of the merged delta")
    axes[1, 0].set_ylim(bottom=0)
    axes[1, -1].legend(frameon=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("bars: standard error (over pairs) of the difference to the exact merge", fontsize=8, color="0.4")
    figure.savefig(file, dpi=150)
