"""Measurements that something else disturbed: how they are known, and what of an earlier calibration stays in place.

A part of a profile comes with the error of its predictions for sizes that were left out of the fit. On a machine that
is left alone that is some percent; where others take its cores and its memory meanwhile, times jump, and it is many
times as large.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.calibration.job import Value
from kvtier.planning.hardware.profile import HardwareProfile

#: A mean relative error from which on a part is taken to be disturbed.
ERROR = 0.25
#: A stored part stays where its error is at most such a share of a disturbed one's.
BETTER = 0.5
#: Parts for a reader.
_WORDS = {
    "up": "copies up",
    "down": "copies down",
    "host": "attention on the host",
    "device": "attention on the device",
    "linear": "a layer by its tokens",
    "prefill": "prefill",
}


def errors_of(value: object) -> dict[str, float]:
    """The errors of the parts of a value, where it has parts, and each its error."""
    parts = value.items() if isinstance(value, Mapping) else ()
    found = {name: part.get("error") for name, part in parts if isinstance(part, Mapping)}
    return {name: error for name, error in found.items() if isinstance(error, float | int)}


def disturbed(value: object) -> dict[str, float]:
    """Of these, the errors that are too large."""
    return {name: error for name, error in errors_of(value).items() if error > ERROR}


def kept(value: Value, stored: object) -> tuple[Value, dict[str, float]]:
    """A value with those parts of the stored one that are clearly better than disturbed ones.

    A part without an error, such as the share of its rate that each direction keeps while both are busy, was measured
    in the same moments as the others of its value: it stays if any of them does.

    Args:
        value: as measured.
        stored: under the same name, by an earlier calibration; anything, where there is none.

    Returns:
        what to store, and the errors of the parts that stay.
    """
    if not isinstance(value, dict) or not isinstance(stored, Mapping):
        return value, {}
    sound = HardwareProfile.estimate("cpu").with_stored(stored).measured
    before = {name: error for name, error in errors_of(stored).items() if name in sound}
    stay = {name: before[name] for name, error in disturbed(value).items() if before.get(name, error) <= BETTER * error}
    if not stay:
        return value, {}
    unknown = [name for name in value if name not in errors_of(value) and name in sound]
    return value | {name: stored[name] for name in [*stay, *unknown]}, stay


def told(name: str, wrong: Mapping[str, float], stay: Mapping[str, float]) -> str:
    """What a user is told of a measurement that was disturbed.

    Args:
        name: of the measurement.
        wrong: errors of its parts that are too large.
        stay: errors of the stored parts that stay.
    """
    text = (
        f"{name} was disturbed: predictions miss what was measured by {_list(wrong)}, and {ERROR:.0%} is too much. "
        "Something else used the machine meanwhile: leave it alone, and calibrate again."
    )
    if not stay:
        return f"{text} The values are stored, for there are no better ones."
    return f"{text} What an earlier calibration measured stays in place for {_list(stay)}."


def _list(errors: Mapping[str, float]) -> str:
    return ", ".join(f"{error:.0%} ({_WORDS.get(name, name)})" for name, error in errors.items())
