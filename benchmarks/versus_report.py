"""What the comparison with mergekit tells: tables, limits that have to hold, and a plot."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import aligned, told
from benchmarks.recipes import METHODS, Case, case

BUDGET = "10%"
FIXED_BUDGET = "2GiB"
FIXED_BYTES = 2 << 30
FIXED_METHOD = "task_arithmetic"
MOST_MEMORY = 1.2 * 2**30
LABELS = {
    "exact": "mergefs, everything",
    "weight": "  again, a weight changed",
    "layer": "  again, changed in a layer",
    "budget": f"mergefs, {BUDGET}",
    "lazy": "mergefs, lazy commit",
}
MERGEKIT = "mergekit"

_KEY = re.compile(r"(mergefs|mergekit) (\w+?)(?: K=(\d+))?(?: (exact|weight|layer|budget|lazy))? #\d+")

Values = dict[str, Any]


@dataclass(frozen=True)
class Session:
    """All measurements that there are.

    Attributes:
        machine: see `Machine.describe`.
        of_mergefs, of_mergekit: what the measurements have in common.
        mergekit_file: the file that mergekit's figures are kept in from earlier runs; empty when they are made along.
        mergefs, mergekit: the measurements by their keys.
    """

    machine: Values
    of_mergefs: Values
    of_mergekit: Values
    mergekit_file: str
    mergefs: dict[str, Values]
    mergekit: dict[str, Values]

    def runs(self) -> dict[Case, dict[str, Values]]:
        """Return for every merge its variants (and MERGEKIT) with their figures, medians over the repetitions."""
        found: dict[Case, dict[str, list[Values]]] = defaultdict(lambda: defaultdict(list))
        for key, value in (*self.mergefs.items(), *self.mergekit.items()):
            if match := _KEY.fullmatch(key):
                tool, method, k, variant = match.groups()
                found[case(method, int(k or 1))][variant or tool].append(value)
        order = sorted(found, key=lambda c: (METHODS.index(c.method), c.k))
        return {c: {name: _middle(values) for name, values in found[c].items()} for c in order}

    def distance(self, of: Case, variant: str) -> Values:
        """Return how far a result is from the definition."""
        key = f"{of.name} distance"
        found = (
            self.mergekit.get(f"mergekit {key}")
            if variant == MERGEKIT
            else self.mergefs.get(f"mergefs {key} {variant}")
        )
        return {name: value for name, value in (found or {}).items() if name not in ("time", "load")}

    def ingests(self, k: int) -> list[Values]:
        """Return the ingests of the base and k experts."""
        names = ["base", *(f"expert-{i}" for i in range(k))]
        return [self.mergefs[f"ingest {name}"] for name in names if f"ingest {name}" in self.mergefs]

    def fixed(self) -> dict[int, Values]:
        """Return the merges under one budget in bytes by K."""
        key = "fixed budget K="
        found = {int(k.removeprefix(key)): v for k, v in self.mergefs.items() if k.startswith(key)}
        return dict(sorted(found.items()))

    def as_json(self, found: list[Check]) -> Values:
        """Return everything for scripts."""
        return {
            "machine": self.machine,
            "of_mergefs": self.of_mergefs,
            "of_mergekit": self.of_mergekit,
            "mergekit_figures": self.mergekit_file or None,
            "ingest": {k: v for k, v in self.mergefs.items() if k.startswith("ingest")},
            "first_use": self.mergefs.get("first use"),
            "pairs": [
                {
                    "method": of.method,
                    "k": of.k,
                    "runs": {name: value | self.distance(of, name) for name, value in variants.items()},
                    "speedup": {name: _faster(variants, name) for name in variants if name != MERGEKIT},
                    "ingest_seconds": sum(v["seconds"] for v in self.ingests(of.k)),
                    "ingest_paid_after": paid_after(self, of, variants),
                }
                for of, variants in self.runs().items()
            ],
            "fixed_budget": {str(k): v for k, v in self.fixed().items()},
            "checks": [asdict(check) | {"holds": check.holds} for check in found],
        }


def _middle(values: list[Values]) -> Values:
    done = [value for value in values if "failed" not in value]
    if not done:
        return values[0]
    numbers = {
        key: median(value[key] for value in done)
        for key, example in done[0].items()
        if isinstance(example, (int, float)) and key != "load"
    }
    return done[0] | numbers | {"runs": len(done)}


def _faster(variants: dict[str, Values], name: str) -> float | None:
    """Return how many times faster a variant is than mergekit."""
    theirs, ours = variants.get(MERGEKIT, {}).get("seconds"), variants.get(name, {}).get("seconds")
    return theirs / ours if theirs and ours else None


def io_bytes(value: Values) -> int:
    """Return what was read from and written to the disk."""
    return int(value["disk_read_bytes"] + value["disk_written_bytes"])


def paid_after(session: Session, of: Case, variants: dict[str, Values]) -> int | None:
    """Return after how many exact merges mergefs has taken less time than mergekit, the ingests included."""
    theirs, ours = variants.get(MERGEKIT, {}).get("seconds"), variants.get("exact", {}).get("seconds")
    if not theirs or not ours or theirs <= ours:
        return None
    return int(sum(v["seconds"] for v in session.ingests(of.k)) / (theirs - ours)) + 1


# --- tables ------------------------------------------------------------------------------------------------


def tables(session: Session) -> Iterator[str]:
    """Return everything for people, part by part."""
    yield "\n".join(_head(session))
    runs = session.runs()
    if runs:
        yield "\n".join(_pairs(session, runs))
        yield "\n".join(_distances(session, runs))
        yield "\n".join(_ingest(session, runs))
    if session.fixed():
        yield "\n".join(_fixed(session))


def _head(session: Session) -> Iterator[str]:
    yield told(session.machine)
    common = session.of_mergefs
    versions = " and ".join(f"{name} {session.of_mergekit[name]}" for name in ("mergekit", "torch"))
    yield f"models of {common['shape']}; mergefs {common['mergefs']}, --exact {common.get('exact', 'fast')}; {versions}"
    loads = [value["load"] for value in (*session.mergefs.values(), *session.mergekit.values()) if "load" in value]
    if loads:
        yield f"load when the steps began: {min(loads)} to {max(loads)}, median {median(loads)}"
    if session.mergekit_file:
        times = [value["time"] for value in session.mergekit.values()]
        when = f", measured {min(times)} to {max(times)}" if times else ""
        yield f"NOT measured along with mergefs's: mergekit's figures are those of {session.mergekit_file}{when}"


def _pairs(session: Session, runs: dict[Case, dict[str, Values]]) -> Iterator[str]:
    head = ("merge", "tool", "s", "x", "peak MiB", "anon. MiB", "read MB", "written MB", "I/O, share", "reused")
    rows = [head]
    for of, variants in runs.items():
        theirs = variants.get(MERGEKIT, {})
        for name in (MERGEKIT, *LABELS):
            if name not in variants:
                continue
            value = variants[name]
            label = MERGEKIT if name == MERGEKIT else LABELS[name]
            if "failed" in value:
                rows.append((of.name, label, "failed", *[""] * (len(head) - 3)))
                continue
            faster = None if name == MERGEKIT else _faster(variants, name)
            share = io_bytes(value) / io_bytes(theirs) if "seconds" in theirs and name != MERGEKIT else None
            rows.append(
                (
                    of.name,
                    label,
                    f"{value['seconds']:.2f}",
                    _told(faster, ".1f"),
                    f"{value['peak_bytes'] / 2**20:.0f}",
                    f"{value['anonymous_bytes'] / 2**20:.0f}",
                    f"{value['disk_read_bytes'] / 1e6:.0f}",
                    f"{value['disk_written_bytes'] / 1e6:.0f}",
                    _told(share, ".3f"),
                    _told(value.get("reused"), ".0f"),
                )
            )
    yield from aligned(rows, left=2)
    yield "x: times as fast as mergekit. peak: largest resident set, with pages of mapped files; anon.: without."
    yield "read, written: at the operating system. reused: blocks that mergefs remembered from the merge before."
    yield "mergekit's seconds end before its result is on the disk; mergefs's are with that."


def _distances(session: Session, runs: dict[Case, dict[str, Values]]) -> Iterator[str]:
    rows = [("merge", "tool", "error", "of delta", "rounded", "equal", "compared", "slope", "variance")]
    for of, variants in runs.items():
        for name in (MERGEKIT, "exact", "budget"):
            found = session.distance(of, name)
            if not found or name not in variants:
                continue
            rows.append(
                (
                    of.name,
                    LABELS.get(name, name),
                    _told(found.get("error"), ".2e"),
                    _told(found.get("delta_error"), ".4f"),
                    _told(found.get("rounded_delta_error"), ".4f"),
                    _told(found.get("equal"), ".4%"),
                    _told(found.get("compared"), ".1%"),
                    _told(found.get("slope"), ".3f"),
                    _told(found.get("variance"), ".3f"),
                )
            )
    yield from aligned(rows, left=2)
    yield "error: of the merged tensors against the definition in float64, relative to their norm; of delta: relative"
    yield "to that of the merged delta; rounded: what the definition rounded to bf16 has. equal: elements that are the"
    yield "rounded definition's; compared: those that no trim threshold's tie leaves open. slope and variance: those of"
    yield "results of random masks against the mean over masks, 1 is right."


def _ingest(session: Session, runs: dict[Case, dict[str, Values]]) -> Iterator[str]:
    most = max(of.k for of in runs)
    base, *experts = session.ingests(most)
    stored = sum(v.get("stored_bytes", 0) for v in experts)
    each = ", ".join(f"{v['seconds']:.1f}" for v in experts)
    yield f"ingest: base {base['seconds']:.1f} s, experts {each} s; experts stored in {stored / 1e6:.0f} MB"
    if first := session.mergefs.get("first use"):
        compiling = first["seconds"] - first["warm_seconds"]
        yield f"the first ties merge after installation compiles for {compiling:.0f} s more"
    for of, variants in runs.items():
        if "seconds" not in variants.get(MERGEKIT, {}) or "exact" not in variants:
            continue
        after = paid_after(session, of, variants)
        seconds = sum(v["seconds"] for v in session.ingests(of.k))
        yield f"{of.name}: ingest of the base and its experts took {seconds:.0f} s, and " + (
            "does not pay by time" if after is None else f"has paid with merge number {after}"
        )
    at_once = [of for of, variants in runs.items() if paid_after(session, of, variants) == 1]
    for method in dict.fromkeys(of.method for of in at_once):
        smallest = min(of.k for of in at_once if of.method == method)
        yield f"{method}: from K = {smallest} on, ingesting and merging once is already faster than mergekit"


def _fixed(session: Session) -> Iterator[str]:
    yield f"{FIXED_METHOD} with --budget {FIXED_BUDGET} ({FIXED_BYTES / 1e6:.0f} MB):"
    rows = [("K", "expert MB", "of raw", "predicted error", "s", "read MB", "written MB")]
    for k, value in session.fixed().items():
        read = value["read"]["expert"]
        rows.append(
            (
                str(k),
                f"{read / 1e6:.1f}",
                f"{read / value['expert_raw_bytes']:.2%}",
                _told(value.get("predicted_error"), ".3f"),
                f"{value['seconds']:.2f}",
                f"{value['disk_read_bytes'] / 1e6:.0f}",
                f"{value['disk_written_bytes'] / 1e6:.0f}",
            )
        )
    yield from aligned(rows)


def _told(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# --- limits ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A limit.

    Attributes:
        name: of what is limited.
        value: what was measured; None where it was not.
        limit: the least or the most that it may be.
        least: which of the two.
    """

    name: str
    value: float | None
    limit: float
    least: bool

    @property
    def holds(self) -> bool:
        """Whether it was measured and is within the limit."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.least else self.value <= self.limit


def checks(session: Session) -> list[Check]:
    """Return all limits with what was measured."""
    runs = session.runs()

    def faster(method: str, k: int, variant: str, limit: float) -> Check:
        value = _faster(runs.get(case(method, k), {}), variant)
        return Check(f"{case(method, k).name}, {LABELS[variant]}: times as fast as mergekit", value, limit, True)

    def again(variant: str) -> Check:
        found = runs.get(case("ties", 10), {})
        have = "exact" in found and variant in found
        value = found["exact"]["seconds"] / found[variant]["seconds"] if have else None
        return Check(f"ties K=10, {LABELS[variant].strip()}: times as fast as the first", value, 2, True)

    lazy = [v["lazy"]["seconds"] for of, v in runs.items() if of.k == 20 and "lazy" in v]
    memory = [x["peak_bytes"] for v in runs.values() for name, x in v.items() if name != MERGEKIT]
    memory += [value["peak_bytes"] for value in session.fixed().values()]
    shares = [
        io_bytes(v["budget"]) / io_bytes(v[MERGEKIT])
        for of, v in runs.items()
        if of.k == 20 and "budget" in v and "seconds" in v.get(MERGEKIT, {})
    ]
    fixed = session.fixed()
    over = max((v["read"]["expert"] for v in fixed.values()), default=None)
    return [
        faster("ties", 10, "exact", 25),
        faster("ties", 10, "budget", 60),
        faster("dare_ties", 5, "exact", 10),
        faster("linear", 10, "exact", 2),
        faster("linear", 10, "budget", 5),
        faster("slerp", 1, "exact", 3),
        again("weight"),
        again("layer"),
        Check("lazy commit at K = 20: seconds, the slowest", max(lazy, default=None), 1, False),
        Check("peak memory of mergefs, the most: bytes", max(memory, default=None), MOST_MEMORY, False),
        Check(f"I/O at K = 20 and {BUDGET}: share of mergekit's, the most", max(shares, default=None), 0.1, False),
        Check(f"expert bytes at --budget {FIXED_BUDGET}, the most for any K", over, FIXED_BYTES, False),
        Check(f"expert bytes at --budget {FIXED_BUDGET}, spread where it binds", _spread(fixed), 0.02, False),
    ]


def _spread(fixed: dict[int, Values]) -> float | None:
    """Return by how much the expert bytes differ, relatively, among the K at which not everything fits the budget."""
    read = [v["read"]["expert"] for v in fixed.values() if v.get("predicted_error")]
    return None if not read else (max(read) - min(read)) / max(read)


def told_checks(found: list[Check]) -> str:
    """Return the limits for people."""
    rows = [("limit", "measured", "", "")]
    for check in found:
        measured = "not measured" if check.value is None else f"{check.value:.4g}"
        sign = ">=" if check.least else "<="
        rows.append((check.name, measured, f"{sign} {check.limit:.4g}", "holds" if check.holds else "FAILS"))
    return "\n".join(aligned(rows))


# --- the plot ----------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which colour-blind people can tell apart.
STYLES = {
    MERGEKIT: ("mergekit 0.1.5", "#D55E00", "s"),
    "exact": ("mergefs, everything", "#0072B2", "o"),
    "budget": (f"mergefs, {BUDGET} of expert bytes", "#009E73", "^"),
    "lazy": ("mergefs, lazy commit", "#CC79A7", "D"),
}


def draw(session: Session, file: Path) -> None:
    """Draw seconds and bytes against K."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    runs = session.runs()
    methods = [m for m in METHODS if len({of.k for of in runs if of.method == m}) > 1]
    if not methods:
        raise SystemExit("--plot needs a method with at least two K")
    width = 1.2 + 2.5 * len(methods)
    figure, axes = plt.subplots(
        2, len(methods), figsize=(width, 6), sharex=True, sharey="row", layout="constrained", squeeze=False
    )
    for column, method in enumerate(methods):
        upper, lower = axes[:, column]
        of_method = {of.k: variants for of, variants in runs.items() if of.method == method}
        for name, (label, color, marker) in STYLES.items():
            points = {k: v[name] for k, v in of_method.items() if "seconds" in v.get(name, {})}
            style = {"color": color, "marker": marker, "markersize": 5, "linewidth": 1.5, "label": label}
            upper.plot(list(points), [v["seconds"] for v in points.values()], **style)
            if name != "lazy":  # its reading is still to come
                lower.plot(list(points), [io_bytes(v) / 1e9 for v in points.values()], **style)
        upper.set_title(method)
        upper.set_yscale("log")
        lower.set_yscale("log")
        lower.xaxis.set_major_locator(FixedLocator(sorted(of_method)))
        lower.xaxis.set_minor_locator(NullLocator())
        lower.set_xlabel("K, number of experts")
    axes[0, 0].set_ylabel("wall time, s")
    axes[1, 0].set_ylabel("read from and written to disk, GB")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside upper center", ncols=len(labels))
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="0.9", linewidth=0.8)
    note = f"{session.of_mergefs['shape']} shape, bf16; {session.machine['cores']} cores; page cache " + (
        "dropped before each run" if session.machine["page_cache_dropped"] else "not dropped"
    )
    figure.supxlabel(note, fontsize=8, color="0.4")
    figure.savefig(file, dpi=150)
