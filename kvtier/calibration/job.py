"""`Job`: one measurement to make, and how its value is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: What is stored.
Value = list[float] | list[int] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement to make.

    Attributes:
        name: of the value.
        measure: returns the value as it is stored, and the result in words.
        also: another name under which it is stored.
    """

    name: str
    measure: Callable[[], tuple[Value, str]]
    also: str | None = None
