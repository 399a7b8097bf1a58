"""Recognize secrets, by name and in addresses. The only list of such names: for messages, support bundles and what Slurm gets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import unquote

HIDDEN: Final = "***"

CURRENT: Final = "PWD"
"""The variable with a shell's current folder, although others call a password so."""

WORD: Final = (
    r"(?:token(?!i[sz])|secret|passw(?:or)?d|passphrase|credential|webhook|cookie|dsn"
    r"|api[_-]?key|access[_-]?key|private[_-]?key|auth[_-]?key|auth[_-]?string)"
)
"""Is somewhere in the name of a secret. A tokenizer is none."""
LAST: Final = r"(?:(?<!public[_-])(?<!primary[_-])(?<!foreign[_-])(?<!sort[_-])key|pass|pwd|pw|pat|auth)"
"""The last word of the name of one."""
NAME: Final = rf"(?:(?=[\w.-]*?{WORD})[\w.-]++|(?=(?:[\w.-]*[_.-])?{LAST}(?![\w.-]))[\w.-]++)"
"""The name of a secret in a text, after a character that cannot be part of a name. The match is possessive: a text that repeats such a word
without a value would otherwise take quadratic time."""
_NAMED: Final = re.compile(rf"{WORD}|(?:^|[_.-]){LAST}$", re.IGNORECASE)

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:/+", re.IGNORECASE)
_FILE: Final = re.compile(r"sqlite(?:\+\w+)?:///", re.IGNORECASE)
"""The address of a file: an ``@`` in it belongs to its path."""
_WEB: Final = re.compile(r"(?:https?|wss?|s?ftps?)://", re.IGNORECASE)
"""Addresses whose user and password end at the first slash; a database's password may have one in it."""
_USER: Final = re.compile(r"[\w.%+-]*")
_HOST: Final = re.compile(r"(?:\[[^\]]*\]|[^:]*)(?::(?P<port>.+))?")
_GIVEN: Final = re.compile(r"([?&])([^=&?]+)=([^&]*)")
_WORDS: Final = re.compile(r"(^|\s)(\w+)\s*=\s*('(?:[^'\\]|\\.)*'?|\S*)")
"""PostgreSQL's other way to write an address: ``host=db user=me password=...``."""


def is_secret(name: str) -> bool:
    """Return whether a variable or field of this *name* is a secret."""
    return name != CURRENT and bool(_NAMED.search(name))


def shown(address: str) -> str:
    """Return the *address* of a database for messages: without a password, wherever it is, also when the address is malformed.

    A password may have an ``@`` in it, so everything before the last one is hidden.
    """
    scheme, user, password, rest = _parts(address)
    if password is not None:
        user = f"{user}:{HIDDEN}@" if user is not None and _USER.fullmatch(user) else f"{HIDDEN}@"
    elif user is not None:
        user = f"{user}@" if _USER.fullmatch(user) and not _WEB.match(scheme) else f"{HIDDEN}@"  # a token, where there is no user
    elif scheme and not _FILE.match(address):
        host = re.split(r"[/?]", rest, maxsplit=1)[0]
        if (found := _HOST.fullmatch(host)) is not None and (port := found["port"]) and not port.isdecimal():
            rest = host.removesuffix(port) + HIDDEN + rest[len(host) :]  # a user and a password, without the host
    return scheme + (user or "") + (_GIVEN if scheme else _WORDS).sub(_without, rest)


def _without(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}={HIDDEN if is_secret(unquote(found[2])) else found[3]}"


def without(text: str, address: str) -> str:
    """Return *text*, such as an error message about *address*, without what is secret in that."""
    for one in passwords(address):
        text = text.replace(one, HIDDEN) if one else text
    return text


def passwords(address: str) -> Iterator[str]:
    """Yield what is secret in *address*, as it is written there; nothing where it is no address."""
    scheme, user, password, rest = _parts(address)
    if not scheme:
        return
    if password is not None:
        yield from (password, password.partition("@")[0])  # parsers do not agree where the password ends
    elif user is not None and _WEB.match(scheme):
        yield user
    yield from (value for _, name, value in _GIVEN.findall(rest) if is_secret(unquote(name)))


def _parts(address: str) -> tuple[str, str | None, str | None, str]:
    """Return scheme, user, password and the rest."""
    found = _SCHEME.match(address)
    scheme = found[0] if found else ""
    rest = address[len(scheme) :]
    reach = re.split(r"[/?#]", rest, maxsplit=1)[0] if _WEB.match(address) else rest
    before, colon, _ = reach.partition("?")
    if colon and ":" not in before and "@" not in before:  # the ``@`` is one of the query
        reach = before
    if _FILE.match(address) or "@" not in reach:
        return scheme, None, None, rest
    head = reach.rpartition("@")[0]
    user, colon, password = head.partition(":")
    return scheme, user, password if colon else None, rest[len(head) + 1 :]
