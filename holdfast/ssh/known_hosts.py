"""The keys of machines that we may trust, out of a file in OpenSSH's format. It is read once; lines are added where a person says so."""

from __future__ import annotations

import base64
import binascii
import fcntl
import fnmatch
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from paramiko import PKey

from holdfast.errors import UnusableFile
from holdfast.ssh.trouble import Unasked

DEFAULT: Final = "~/.ssh/known_hosts"
REVOKED: Final = "@revoked"
AUTHORITY: Final = "@cert-authority"
HASHED: Final = "|1|"
WHAT: Final = "the known_hosts file"
SCAN: Final = "Name the right one in `known_hosts`, or have it made: `holdfast nodes trust CLUSTER_FILE` shows keys and asks"


class Standing(StrEnum):
    """What is known of a key that a machine shows."""

    TRUSTED = "trusted"
    UNKNOWN = "unknown"
    """There is no key of the machine."""
    CHANGED = "changed"
    """There is another one."""
    REVOKED = "revoked"


@dataclass(slots=True)
class KnownHosts:
    """What a known_hosts file says. Lookups are kept: a hashed file has to be gone through for each name."""

    path: Path
    _by_name: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)
    _by_pattern: list[tuple[list[str], tuple[str, bytes]]] = field(default_factory=list)
    _hashed: list[tuple[bytes, bytes, tuple[str, bytes]]] = field(default_factory=list)
    _revoked: set[bytes] = field(default_factory=set)
    _found: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)

    @classmethod
    def read(cls, named: str | None, *, create: bool = False) -> KnownHosts:
        """Return what the file *named* says (default: the user's own, which need not exist); raise `UnusableFile`.

        With *create* the file need not exist either where it is named.
        """
        known = cls(Path(named or DEFAULT).expanduser())
        try:
            text = known.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            if named is not None and not create:
                raise UnusableFile(WHAT, str(known.path), "there is no such file", SCAN) from None
            return known
        except OSError as error:
            raise UnusableFile(
                WHAT, str(known.path), error.strerror or str(error), "Mend its permissions, or name another in `known_hosts`"
            ) from error
        for line in text.splitlines():
            known._take(line.split())
        return known

    def types_of(self, name: str) -> list[str]:
        """Return the types of keys that are known of *name*: a server that has several is asked for one of these."""
        return list(dict.fromkeys(kind for kind, _key in self._keys(name)))

    def standing(self, name: str, key: PKey) -> Standing:
        """Return what is known of the *key* that *name* shows."""
        given = key.asbytes()
        if given in self._revoked:
            return Standing.REVOKED
        known = self._keys(name)
        if any(given == one for _kind, one in known):
            return Standing.TRUSTED
        return Standing.CHANGED if known else Standing.UNKNOWN

    def check(self, name: str, key: PKey) -> None:
        """Raise `Unasked` when *key* is not one that is known to be the key of *name*."""
        standing = self.standing(name, key)
        if standing is not Standing.TRUSTED:
            raise Unasked(self.complaint(standing, name, key))

    def complaint(self, standing: Standing, name: str, key: PKey) -> str:
        """Say why *key* is not trusted, and what is to be done."""
        shown = key.fingerprint
        if standing is Standing.REVOKED:
            return f"{name} showed the key {shown}, which {self.path} says is revoked: find out who answers there"
        if standing is Standing.UNKNOWN:
            cure = "Check that it is the machine's own, then add it: `holdfast nodes trust CLUSTER_FILE` shows it and asks"
            return f"unknown host key: {self.path} has no key of {name}, which showed {shown}. {cure}"
        cure = f"If the machine was installed anew, `ssh-keygen -R '{name}' -f {self.path}` and `holdfast nodes trust CLUSTER_FILE`"
        return f"changed host key: {name} showed {shown}, and {self.path} has another one. {cure}; else somebody is in between"

    def add(self, keys: Iterable[tuple[str, PKey]]) -> None:
        """Trust these keys of these names from now on, and write them into the file; raise `UnusableFile`."""
        keys = list(keys)
        lines = "".join(f"{name} {key.get_name()} {key.get_base64()}\n" for name, key in keys)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(fd, "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                end = file.seek(0, os.SEEK_END)
                torn = end > 0 and os.pread(fd, 1, end - 1) != b"\n"  # a last line without an end would swallow ours
                file.write(("\n" * torn + lines).encode())
        except OSError as error:
            cure = "Mend its permissions, or name another in `known_hosts`"
            raise UnusableFile(WHAT, str(self.path), error.strerror or str(error), cure) from error
        for name, key in keys:
            self._add([name], (key.get_name(), key.asbytes()))
            self._found.pop(name, None)

    def _keys(self, name: str) -> list[tuple[str, bytes]]:
        if name not in self._found:
            host = name.encode()
            found = list(self._by_name.get(name, ()))
            found += [key for patterns, key in self._by_pattern if _matches(name, patterns)]
            found += [key for salt, digest, key in self._hashed if hmac.digest(salt, host, "sha1") == digest]
            self._found[name] = found
        return self._found[name]

    def _take(self, words: list[str]) -> None:
        """Take in one line; what is none of OpenSSH's is left out, as it does itself."""
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or marker == AUTHORITY:  # noqa: PLR2004 (names, type, key)
            return
        names, kind = words[0], words[1]
        try:
            key = (kind, base64.b64decode(words[2], validate=True))
            if marker == REVOKED:
                self._revoked.add(key[1])
            elif names.startswith(HASHED):
                salt, digest = (base64.b64decode(part, validate=True) for part in names.removeprefix(HASHED).split("|"))
                self._hashed.append((salt, digest, key))
            else:
                self._add(names.split(","), key)
        except (binascii.Error, ValueError):
            return

    def _add(self, names: list[str], key: tuple[str, bytes]) -> None:
        if any(mark in name for name in names for mark in "*?!"):
            self._by_pattern.append((names, key))
            return
        for name in names:
            self._by_name.setdefault(name, []).append(key)


def name_in_file(address: str, port: int) -> str:
    """Return how OpenSSH writes a machine into the file."""
    return address if port == 22 else f"[{address}]:{port}"  # noqa: PLR2004 (SSH's own)


def _matches(name: str, patterns: list[str]) -> bool:
    if any(fnmatch.fnmatchcase(name, pattern[1:]) for pattern in patterns if pattern.startswith("!")):
        return False
    return any(fnmatch.fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in patterns if not pattern.startswith("!"))
