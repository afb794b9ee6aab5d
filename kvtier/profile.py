"""The profile of a machine: values that `kvtier.calibrate` measured, in a JSON file that every process reads.

Nothing is measured here. A kernel's tile and the sizes from which a launch pays are looked up; without a value, the
stated estimate serves. Tiles decide the order of sums and so the last bits of results: a value changes only when the
machine is calibrated again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvtier.errors import ConfigError

#: "off": no profile is read, and estimates serve. An absolute path: the folder of the profiles. Unset: `kvtier` in the
#: user's cache folder.
VARIABLE = "KVTIER_PROFILE"


def enabled() -> bool:
    """Whether profiles are read.

    Raises:
        ConfigError: KVTIER_PROFILE is neither "off" nor an absolute path.
    """
    setting = os.environ.get(VARIABLE, "")
    if setting and setting != "off" and not os.path.isabs(os.path.expanduser(setting)):
        raise ConfigError(f"{VARIABLE}={setting!r}: it is 'off', the absolute path of a folder, or not set.")
    return setting != "off"


def lookup(machine: str, name: str, valid: Callable[[object], bool]) -> object | None:
    """A stored value, or None: nothing is stored, it is not valid, the file cannot be read, or KVTIER_PROFILE is "off".
    A file that is damaged or cannot be read is warned of.

    The file is read at each call: a caller that needs the value again keeps it.

    Args:
        machine: names the device and the versions that the value depends on.
        name: what was measured, with the shapes that it depends on.
        valid: whether something read from the file is such a value.

    Raises:
        ConfigError: KVTIER_PROFILE is neither "off" nor an absolute path.
    """
    if not enabled():
        return None
    value = _read(machine).get(name)
    return value if valid(value) else None


def store(machine: str, name: str, value: float | str | list[int] | list[float] | Mapping[str, object]) -> Path:
    """Keep a value for this and later processes. Only calibration calls this.

    The file is written under another name and renamed: a reader sees the old or the new one, whole. Whoever stores at
    the same time waits, and loses nothing, where the file system has locks.

    Returns:
        the file.

    Raises:
        ConfigError: KVTIER_PROFILE is "off", or the folder cannot be written; the file is as before.
    """
    path = folder() / _file_name(machine)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            values = {key: x for key, x in _read(machine, tell=False).items() if key != name}
            content = json.dumps({"machine": machine, "values": values | {name: value}}, indent=1)  # the newest last
            # Made as any file is, so that whoever may read the folder may read it: a machine's users share it.
            temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
            try:
                temporary.write_text(content, encoding="utf-8")
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(
            f"The profile {path} cannot be written ({error}): set {VARIABLE} to a folder that can."
        ) from error
    return path


@contextlib.contextmanager
def _alone(where: Path) -> Iterator[None]:
    """Nobody else on this machine is in such a block for this folder, which is the lock itself, so that no file is left
    over. Without locks of folders, as on Windows and over NFS, somebody may be."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # a system or a file system without locks
            import fcntl

            handle = os.open(where, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
            stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)  # a process forked meanwhile has it open, too
        yield


def folder() -> Path:
    """The folder of the profiles.

    Raises:
        ConfigError: KVTIER_PROFILE is "off" or not an absolute path, or there is no home folder and it is not set.
    """
    if not enabled():
        raise ConfigError(f"{VARIABLE}=off: there is no profile. Unset it, or give a folder.")
    setting = os.environ.get(VARIABLE, "")
    try:
        if setting:
            return Path(setting).expanduser()
        cache = os.environ.get("XDG_CACHE_HOME", "")
        # One that is not absolute is not valid (XDG Base Directory Specification), and each folder would have its own.
        return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "kvtier"
    except RuntimeError as error:
        raise ConfigError(f"There is no home folder for the profile: set {VARIABLE} to a folder.") from error


def checked_folder() -> Path:
    """The folder of the profiles, made if it is missing, once something was written to it.

    Raises:
        ConfigError: as `folder` does, or it cannot be written.
    """
    path = folder()
    trial = path / f".{os.getpid()}.{threading.get_ident()}.part"
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            trial.write_bytes(b"0")
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The folder of profiles {path} cannot be written ({error}): set {VARIABLE} to a folder that can."
        ) from error
    return path


def names(machine: str) -> list[str]:
    """The names of what is stored of a machine; whether the values are valid, who looks them up finds out."""
    return sorted(_read(machine)) if enabled() else []


def file_of(machine: str) -> Path:
    """The file of a machine's values. Raises ConfigError as `folder` does."""
    return folder() / _file_name(machine)


def _file_name(machine: str) -> str:
    return f"profile-{hashlib.sha256(machine.encode(errors='backslashreplace')).hexdigest()[:16]}.json"


def _read(machine: str, tell: bool = True) -> dict[str, object]:
    try:
        path = file_of(machine)
        with path.open(encoding="utf-8") as file:
            found = json.load(file)
        if found["machine"] != machine:
            raise ValueError("it is another machine's")
        return dict(found["values"])
    except (ConfigError, FileNotFoundError, NotADirectoryError):  # without a home folder there is no profile either
        return {}
    except (OSError, ValueError, RecursionError, TypeError, LookupError) as error:
        if tell:
            warnings.warn(
                f"The profile {path} is not used, and estimates serve: it is damaged or cannot be read "
                f"({type(error).__name__}: {error}). `kvtier calibrate` makes it again; {VARIABLE}=off reads none.",
                RuntimeWarning,
                stacklevel=3,
            )
        return {}
