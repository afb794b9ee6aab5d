"""What was measured on a machine once, remembered on disk: tiles of kernels, sizes from which a copy pays.

A choice that is measured twice may come out in two ways, and results with it in their last bits. So a choice is made
once for a machine and versions, before it is first used, and every later process reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvtier.errors import ConfigError

#: "off": nothing is measured or read, and estimates serve; a folder, as an absolute path: where to keep what was
#: measured; unset: `kvtier` in the user's cache folder.
VARIABLE = "KVTIER_MEASURED"

Value = TypeVar("Value", bound="int | float | str | list[int] | list[float]")

#: What this process measured or read, by machine and name.
_known: dict[tuple[str, str], object] = {}


def remembered(machine: str, name: str, valid: Callable[[object], bool], measure: Callable[[], Value]) -> Value:
    """The value of `name` on `machine`: as this process knows it, as the disk has it, or measured now.

    A file that cannot be read or written, or holds something that is not `valid`, is as none: the value is measured.

    Args:
        machine: the device and the versions that the value depends on, as a text.
        name: what was measured, with the shapes that it depends on.
        valid: whether something read from disk is such a value.
        measure: takes the measurement. What it raises is the caller's, and nothing is remembered then.

    Raises:
        ConfigError: KVTIER_MEASURED is "off" (ask `wanted` first), or neither that nor an absolute path.
    """
    if not wanted():
        raise ConfigError(f"{VARIABLE}=off: nothing is measured.")
    if (machine, name) not in _known:
        value = _read(machine).get(name)
        if not valid(value):
            value = measure()
            _write(machine, name, value)
        _known[machine, name] = value
    return _known[machine, name]  # type: ignore[return-value]


def wanted() -> bool:
    """Whether choices are measured at all.

    Raises:
        ConfigError: KVTIER_MEASURED is neither "off" nor an absolute path.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen and chosen != "off" and not os.path.isabs(os.path.expanduser(chosen)):
        raise ConfigError(f"{VARIABLE}={chosen!r}: it is 'off', the absolute path of a folder, or not set.")
    return chosen != "off"


def forget() -> None:
    """Let this process read, or measure, everything anew. What lies on disk stays."""
    _known.clear()


def file_of(machine: str) -> Path:
    """Where the values of a machine are kept."""
    chosen = os.environ.get(VARIABLE, "")
    home = (
        Path(chosen).expanduser()
        if chosen
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
    )
    return home / f"measured-{hashlib.sha256(machine.encode(errors='backslashreplace')).hexdigest()[:16]}.json"


def _read(machine: str) -> dict[str, object]:
    try:
        with file_of(machine).open(encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home
        return {}
    if not isinstance(found, dict) or found.get("machine") != machine or not isinstance(found.get("values"), dict):
        return {}
    return dict(found["values"])


def _write(machine: str, name: str, value: object) -> None:
    """Beside the file, then renamed over it: a reader sees the old or the new one, whole.

    Of two processes that write at once one may lose what the other added: it is measured again. A folder that the user
    named and that cannot be written is told of, once; the usual one may be missing.
    """
    try:
        path = file_of(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": machine, "values": {**_read(machine), name: value}}, indent=1, sort_keys=True)
        file, beside = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(file, "w", encoding="utf-8") as out:
                out.write(text)
            os.replace(beside, path)
        except BaseException:
            os.unlink(beside)
            raise
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        if os.environ.get(VARIABLE):
            warnings.warn(
                f"{VARIABLE}={os.environ[VARIABLE]!r}: nothing can be kept there ({error}); each process measures.",
                RuntimeWarning,
                stacklevel=2,
            )
