"""Drawing the curve of predicted error against the expert bytes read (matplotlib, the extra `plot`)."""

from __future__ import annotations

from pathlib import Path

from mergefs.errors import UserError
from mergefs.planner.explain import curve
from mergefs.planner.resolve import Planned

FORMATS = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Check that a plot can be drawn into that file.

    Raises:
        UserError: when not, and what to do.
    """
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path} is neither .png nor .svg: name the plot's file so")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is not a folder: the plot cannot be written there")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UserError("plots need matplotlib: pip install 'mergefs[plot]'") from None


def draw_curve(planned: Planned, path: Path) -> None:
    """Draw the plan's curve, and where the plan itself is.

    Raises:
        UserError: see `check_plot`; also when the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    raw = planned.expert_raw_bytes / 100
    points = curve(planned)
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([p["bytes"] / raw for p in points], [p["error"] for p in points], marker=".", color="#0072b2")
    axes.plot(
        [planned.expert_bytes / raw],
        [planned.predicted_error or 0.0],
        marker="o",
        linestyle="",
        color="#d55e00",
        label=f"this plan: {planned.expert_bytes / raw:.1f} %, {planned.predicted_error or 0.0:.3f}",
    )
    axes.set_xlabel("expert bytes read, per cent of their raw bytes")
    axes.set_ylabel("predicted error of the merged delta")
    axes.set_ylim(0.0, 1.05)
    axes.set_xlim(left=0.0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
