"""The picture of a plan. matplotlib draws it, which is not needed otherwise: `pip install "kvtier[plot]"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier.errors import ConfigError


def draw(path: str, title: str, curves: Mapping[str, Sequence[tuple[int, float]]], full: int) -> None:
    """Draw tokens per second by context into a file.

    Args:
        path: of the file; its ending says which kind of picture.
        title: above it.
        curves: (tokens of context, tokens per second) by policy.
        full: tokens of context with which the device is full.

    Raises:
        ConfigError: matplotlib is not installed, or cannot draw such a file.
    """
    if not Path(path).suffix:  # matplotlib would append one, and write another file than is said
        raise ConfigError(f"--plot {path!r}: the ending of the name says what kind of picture, such as plan.png.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f'--plot {path!r} needs matplotlib: pip install "kvtier[plot]".') from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot([x / 1024 for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name)
    if 0 < full < max(x for points in curves.values() for x, _ in points):
        axes.axvline(full / 1024, color="0.5", linestyle=":", label="the device is full")
    axes.set(title=title, xlabel="context of each sequence (Ki tokens)", ylabel="tokens per second, all sequences")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=144)
    except ValueError as error:
        raise ConfigError(f"--plot {path!r}: {error}") from error
