"""The picture of a plan. matplotlib draws it, which is not needed otherwise: `pip install "kvtier[plot]"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError


def check(path: str) -> None:
    """Raise `ConfigError` where a picture cannot be drawn into a file: matplotlib is not installed or does not know the
    kind of picture, or the folder is not there."""
    where = Path(path)
    if not where.suffix:  # matplotlib would append one, and write another file than is said
        raise ConfigError(f"--plot {path!r}: the ending of the name says what kind of picture, such as plan.png.")
    if not where.parent.is_dir():
        raise ConfigError(f"--plot {path!r}: there is no folder {str(where.parent)!r}.")
    if where.is_dir():
        raise ConfigError(f"--plot {path!r} is a folder: name a file in it, such as plan.png.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f'--plot {path!r} needs matplotlib: pip install "kvtier[plot]".') from error
    kinds = Figure().canvas.get_supported_filetypes()
    if where.suffix[1:].lower() not in kinds:
        raise ConfigError(
            f"--plot {path!r}: there is no kind of picture {where.suffix!r}, but {', '.join(sorted(kinds))}."
        )


def draw(path: str, title: str, curves: Mapping[str, Sequence[tuple[int, float]]], full: int) -> None:
    """Draw tokens per second by context into a file.

    Args:
        path: of the file; its ending says which kind of picture.
        title: above it.
        curves: (tokens of context, tokens per second) by policy.
        full: tokens of context with which the device is full.

    Raises:
        ConfigError: as of `check`; or the file cannot be written.
    """
    check(path)
    from matplotlib.figure import Figure

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
    save(figure, path)


def save(figure: Any, path: str) -> None:
    """Write a picture of matplotlib's into a file. Raises `ConfigError`: it cannot be written."""
    try:
        figure.savefig(path, dpi=144)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--plot {path!r} cannot be written: {getattr(error, 'strerror', None) or error}.") from error
