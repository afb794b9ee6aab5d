"""Fitting by least squares in plain Python: a few coefficients, none of them negative, by relative errors."""

from __future__ import annotations

import itertools
import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Point = TypeVar("Point")

#: A relative error beyond this counts linearly, not squared: some measurements on a shared machine are disturbed.
OUTLIER = 0.05
#: Rounds of reweighting at the most, and the change of a weight below which another round finds nothing else.
_ROUNDS, _SETTLED = 12, 1e-9


def least_relative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients, at least 0, with which the sums over each row are closest to the values, relative to these.

    Large relative errors count less (Huber's loss), so that a few disturbed values change little.

    Args:
        rows: what the coefficients are multiplied with, one row for each value.
        values: positive.

    Returns:
        a coefficient for each column; 0 for one that the values do not tell.

    Raises:
        ValueError: there are no values, or one is not positive.
    """
    if not values or min(values) <= 0:
        raise ValueError("a fit needs positive values")
    relative = [[x / value for x in row] for row, value in zip(rows, values, strict=True)]
    weights = [1.0] * len(values)
    found: list[float] = []
    for _ in range(_ROUNDS):
        found = _not_negative(relative, weights)
        errors = [abs(_dot(row, found) - 1) for row in relative]
        before, weights = weights, [1.0 if x <= OUTLIER else OUTLIER / x for x in errors]
        if all(abs(a - b) <= _SETTLED for a, b in zip(before, weights, strict=True)):
            break
    return found


def relative_errors(predict: Callable[[Point], float], points: Sequence[tuple[Point, float]]) -> list[float]:
    """Of each prediction against what was measured, as a share of the latter."""
    return [abs(predict(x) - seconds) / seconds for x, seconds in points]


def held_out_error(
    fit: Callable[[Sequence[tuple[Point, float]]], Callable[[Point], float]], points: Sequence[tuple[Point, float]]
) -> float | None:
    """The mean absolute relative error of predictions for every second point by a fit of the others.

    The first and the last point are never held out: what is asked for is how well a fit predicts what is between.

    Args:
        fit: makes from points what predicts.
        points: in rising order.

    Returns:
        None where there are fewer than four points.
    """
    if len(points) < 4:
        return None
    held = points[1:-1:2]
    predict = fit([x for i, x in enumerate(points) if i % 2 == 0 or i == len(points) - 1])
    return statistics.fmean(relative_errors(predict, held))


def rising(values: Sequence[float]) -> list[float]:
    """Each the least of itself and all that follow, so that none falls: what disturbs a measurement only adds to it."""
    return list(itertools.accumulate(reversed(values), min))[::-1]


def interpolate(knots: Sequence[tuple[float, float]], x: float) -> float:
    """What a curve through knots has at `x`: straight between neighbours, level before the first and after the last."""
    if x <= knots[0][0]:
        return knots[0][1]
    for (a, low), (b, high) in itertools.pairwise(knots):
        if x <= b:
            return low + (high - low) * (x - a) / (b - a)
    return knots[-1][1]


def _not_negative(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """The best coefficients for sums of 1, without the columns whose coefficient would be negative."""
    width = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(width)]
    used = [i for i in range(width) if any(row[i] for row in rows)]
    while used:
        columns = [[row[i] / scale[i] for i in used] for row in rows]
        found = _solve(columns, weights)
        least = min(range(len(used)), key=lambda i: found[i])
        if found[least] >= 0:
            result = [0.0] * width
            for i, value in zip(used, found, strict=True):
                result[i] = value / scale[i]
            return result
        del used[least]
    return [0.0] * width


def _solve(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Least squares by the normal equations, Gauss with pivots. What is not determined is made small."""
    n, columns = len(rows[0]), [list(x) for x in zip(*rows, strict=True)]
    weighted = [list(map(operator.mul, x, weights)) for x in columns]
    matrix = [[_dot(x, y) for y in columns] + [sum(x)] for x in weighted]
    ridge = 1e-12 * max(matrix[i][i] for i in range(n))
    for i in range(n):
        matrix[i][i] += ridge
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(i + 1, n):
            factor = matrix[k][i] / matrix[i][i]
            for j in range(i, n + 1):
                matrix[k][j] -= factor * matrix[i][j]
    found = [0.0] * n
    for i in reversed(range(n)):
        found[i] = (matrix[i][n] - _dot(matrix[i][i + 1 : n], found[i + 1 :])) / matrix[i][i]
    return found


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(map(operator.mul, a, b))


def line_of(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """An overhead, at least 0, and seconds per byte, from seconds and bytes: the least squares of relative errors. In a
    step, where `least_relative` takes too long."""
    ones = sizes = squares = products = sized = 0.0
    for seconds, nbytes in points:
        one, size = 1 / seconds, nbytes / seconds
        ones += one
        sizes += size
        squares += one * one
        products += one * size
        sized += size * size
    determinant = squares * sized - products * products
    overhead = (ones * sized - products * sizes) / determinant if determinant > 0 else 0.0
    if overhead <= 0:
        return 0.0, sizes / sized
    return overhead, (squares * sizes - products * ones) / determinant
