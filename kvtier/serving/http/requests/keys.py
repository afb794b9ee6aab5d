"""Who is asking: API keys, each with a name and a salt that the server derives."""

from __future__ import annotations

import contextvars
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.conversation.disk.files.folder import SECRET, keep_owner, sync_names
from kvtier.errors import ConfigError
from kvtier.serving.http.requests.refusals import Refusal

_SECRET_BYTES = 32
#: That of bytes in a file of text.
_MARK = "\ufeff"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request is from.

    Attributes:
        tenant: the name of its key; "" where the server has no keys.
        session: that its headers name; None: none.
    """

    tenant: str = ""
    session: str | None = None


@dataclass(slots=True)
class Visit:
    """A request of a client, while it is answered.

    Attributes:
        caller: who is asking.
        size: bytes of the body.
        opened: what has to end when the client leaves: `cancel` is called.
        left: whether nobody reads an answer any more.
    """

    caller: Caller = field(default_factory=Caller)
    size: int = 0
    opened: list[Any] = field(default_factory=list)
    left: bool = False

    def leave(self) -> None:
        """The request has been answered, or its client has left."""
        self.left = True
        for each in self.opened:
            each.cancel()


#: Of the request that is being answered in this context.
VISIT: contextvars.ContextVar[Visit] = contextvars.ContextVar("kvtier_visit")


def read_keys(path: str | Path) -> dict[str, str]:
    """The name of each API key in a file of lines `NAME KEY`; those that begin with # say nothing.

    Raises:
        ConfigError: no text, a line that is none, a byte order mark behind the beginning, or a name or a key that
            comes twice; OSError.
    """
    names: dict[str, str] = {}
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # editors may put a byte order mark first
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error}. Write it in UTF-8, with lines `NAME KEY`.") from error
    for number, line in enumerate(text.split("\n"), 1):
        if _MARK in line:  # it is not seen, and what begins with it is no comment
            raise ConfigError(f"{path}:{number}: a byte order mark is within the file. Remove it there.")
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ConfigError(f"{path}:{number}: give a name and a key, with a space between.")
        name, key = words
        if not key.isascii():
            raise ConfigError(f"{path}:{number}: a key is sent in a header, which takes ASCII characters only.")
        if key in names or name in names.values():
            raise ConfigError(f"{path}:{number}: the name {name!r} or its key is there already.")
        names[key] = name
    if not names:
        raise ConfigError(f"{path}: there is no key in it.")
    return names


class Keys:
    """The API keys of a server.

    Args:
        names: the name of each key; none: everybody may ask, as one tenant.
        secret: of the server; salts are derived from it.
    """

    def __init__(self, names: Mapping[str, str], secret: bytes) -> None:
        # Keys are looked up by their digest: how long that takes says nothing of a key.
        self._names = {hashlib.sha256(key.encode()).digest(): name for key, name in names.items()}
        self._secret = secret

    def __len__(self) -> int:
        return len(self._names)

    def caller(self, key: str | None, session: str | None = None) -> Caller:
        """Who has this key.

        Raises:
            Refusal: nobody has it.
        """
        if not self._names:
            return Caller("", session)
        name = None if key is None else self._names.get(hashlib.sha256(key.encode()).digest())
        if name is None:
            raise Refusal(401, "Give an API key of this server: Authorization: Bearer KEY.", code="invalid_api_key")
        return Caller(name, session)

    def salt(self, caller: Caller, own: str | None = None) -> str | None:
        """What a caller's requests are found under. Nobody without the secret can make another's.

        Args:
            own: by which a caller divides its own requests.
        """
        if not self._names and own is None:
            return None
        word = repr((caller.tenant, own)).encode()
        return hmac.new(self._secret, word, hashlib.sha256).hexdigest()


def secret_of(directory: str | Path | None) -> bytes:
    """The secret of a server: that of its store's folder, made where there is none; without a folder, a new one."""
    if directory is None:
        return secrets.token_bytes(_SECRET_BYTES)
    path = Path(directory) / SECRET
    try:
        found = _read_secret(path)
    except FileNotFoundError:
        found = secrets.token_bytes(_SECRET_BYTES)
        _write_secret(path, found)
    if len(found) != _SECRET_BYTES:
        raise ConfigError(f"{path} is damaged. Remove it: what was saved under its keys is then not found any more.")
    return found


def _read_secret(path: Path) -> bytes:
    """At most one byte too many. No link is followed, and nobody is waited for where something else has the name."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise ConfigError(f"{path} is a link. Give the file itself, which says who finds what is saved.") from error
        raise
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ConfigError(
                f"{path} is no file. Remove it: what was saved under its keys is then not found any more."
            )
        return file.read(_SECRET_BYTES + 1)


def _write_secret(path: Path, secret: bytes) -> None:
    """The file has its name once it is whole and on the disk: what is saved later is found by it after a crash."""
    made = path.with_name(f"{SECRET}.new")
    made.unlink(missing_ok=True)  # a start was cut short
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # which follows no link
        keep_owner(file.fileno(), path.parent)
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    made.replace(path)
    sync_names(path.parent)
