"""The keys of machines that we may trust, out of files in OpenSSH's format. They are read once; lines are added where a person says so.

paramiko's `HostKeys` reads such files too, and is no base for this. It knows no `@revoked` and no `@cert-authority`: one such line, one
damaged hash, or two blanks between fields make it fail on the whole file. Of two keys of one type that a host has it takes the first alone.
It has no patterns, takes capitals for other names, and skips keys of types that it does not know without a word: a host that shows another
key would be unknown, not changed. Each lookup, and each line that is loaded, goes through all lines.
`test_paramiko_reads_less_of_a_file` holds this.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hmac
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from paramiko import PKey

from holdfast.cluster.ssh.certificates import Certificate
from holdfast.cluster.ssh.patterns import matches
from holdfast.errors import UnusableFile
from holdfast.probe.remote.errors import ProbeFailed

DEFAULT: Final = "~/.ssh/known_hosts"
SITE: Final = (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))
"""Where a site keeps the keys of its machines. As with OpenSSH they are read beside the user's own, where they are there."""
REVOKED: Final = "@revoked"
AUTHORITY: Final = "@cert-authority"
HASHED: Final = "|1|"
WHAT: Final = "the known_hosts file"
SCAN: Final = "Name the right one in `known_hosts`, or have it made: `holdfast nodes trust CLUSTER_FILE` shows keys and asks"


class HostKeyStatus(StrEnum):
    """What is known of a key that a machine shows."""

    TRUSTED = "trusted"
    UNKNOWN = "unknown"
    """There is no key of the machine."""
    CHANGED = "changed"
    """There is another one."""
    REVOKED = "revoked"


class KnownHostsLine(NamedTuple):
    """A key, and where it stands."""

    kind: str
    key: bytes
    path: Path


@dataclass(slots=True)
class KnownHosts:
    """What known_hosts files say. Lookups are kept: a hashed file has to be gone through for each name."""

    path: Path
    """The user's own, to which keys are added."""
    _read: list[Path] = field(default_factory=list)
    _by_name: dict[str, list[KnownHostsLine]] = field(default_factory=dict)
    _by_pattern: list[tuple[list[str], KnownHostsLine]] = field(default_factory=list)
    _hashed: list[tuple[bytes, bytes, KnownHostsLine]] = field(default_factory=list)
    _authorities: list[tuple[list[str], KnownHostsLine]] = field(default_factory=list)
    _revoked: dict[bytes, Path] = field(default_factory=dict)
    _found: dict[str, list[KnownHostsLine]] = field(default_factory=dict)

    @classmethod
    def read(cls, named: str | None, *, create: bool = False) -> KnownHosts:
        """Return what the file *named* says (default: the user's own, which need not exist); raise `UnusableFile`.

        With *create* the file need not exist either where it is named.
        """
        known = cls(Path(named or DEFAULT).expanduser())
        try:
            known._take_all(known.path)
        except FileNotFoundError:
            if named is not None and not create:
                raise UnusableFile(WHAT, str(known.path), "there is no such file", SCAN) from None
        except OSError as error:
            raise UnusableFile(
                WHAT, str(known.path), error.strerror or str(error), "Mend its permissions, or name another in `known_hosts`"
            ) from error
        for path in SITE:
            with suppress(OSError):
                known._take_all(path)
        return known

    def types_of(self, name: str) -> list[str]:
        """Return the types of keys that are known of *name*: a server that has several is asked for one of these."""
        return list(dict.fromkeys(line.kind for line in self._keys(name)))

    def has_authority(self, name: str) -> bool:
        """Tell whether an authority may vouch for *name*: a server that has a certificate is asked for it."""
        return bool(self._authorities_of(name))

    def status(self, name: str, key: PKey) -> HostKeyStatus:
        """Return what is known of the *key* that *name* shows."""
        if self._revoking(key) is not None:
            return HostKeyStatus.REVOKED
        known = self._keys(name)
        if any(key.asbytes() == line.key for line in known) or self._vouched(name, key) == "":
            return HostKeyStatus.TRUSTED
        return HostKeyStatus.CHANGED if known else HostKeyStatus.UNKNOWN

    def check(self, name: str, key: PKey) -> None:
        """Raise `ProbeFailed` when *key* is not one that is known to be the key of *name*."""
        status = self.status(name, key)
        if status is not HostKeyStatus.TRUSTED:
            raise ProbeFailed(self.complaint(status, name, key))

    def complaint(self, status: HostKeyStatus, name: str, key: PKey) -> str:
        """Say why *key* is not trusted, and what is to be done."""
        shown = key.fingerprint
        if status is HostKeyStatus.REVOKED:
            return f"{name} showed the key {shown}, which {self._revoking(key)} says is revoked: find out who answers there"
        if why := self._vouched(name, key):
            shown += f", with a certificate that does not count: {why}"
        if status is HostKeyStatus.UNKNOWN:
            cure = "Check that it is the machine's own, then add it: `holdfast nodes trust CLUSTER_FILE` shows it and asks"
            files = " and ".join(str(path) for path in self._read or [self.path])
            return f"unknown host key: in {files} is no key of {name}, which showed {shown}. {cure}"
        return f"changed host key: {name} showed {shown}, and {self._other(name)}; else somebody is in between"

    def _other(self, name: str) -> str:
        """Say where the key that is expected of *name* stands, and the cure."""
        paths = list(dict.fromkeys(line.path for line in self._keys(name)))
        cures = [f"`ssh-keygen -R '{name}' -f {path}`" if path == self.path else f"have whoever keeps {path} mend it" for path in paths]
        trust = " and `holdfast nodes trust CLUSTER_FILE`" if paths == [self.path] else ""
        return f"another one stands in {' and '.join(map(str, paths))}. If the machine was installed anew, {' and '.join(cures)}{trust}"

    def _vouched(self, name: str, key: PKey) -> str | None:
        """Say why the certificate of *key* does not vouch for *name*, nothing when it does; None where there is nothing to say."""
        certificate = Certificate.of(key)
        if certificate is None:
            return None
        if all(certificate.authority != line.key for line in self._authorities_of(name)):
            return f"no {AUTHORITY} of {_host(name)} has signed it"
        return certificate.why_not(_host(name))

    def _revoking(self, key: PKey) -> Path | None:
        """Return the file that says that *key*, or who vouches for it, is revoked."""
        certificate = Certificate.of(key)
        given = [key.asbytes(), *([certificate.authority] if certificate is not None else [])]
        return next((self._revoked[one] for one in given if one in self._revoked), None)

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
            self._add([name.lower()], KnownHostsLine(key.get_name(), key.asbytes(), self.path))
            self._found.pop(name.lower(), None)

    def _keys(self, name: str) -> list[KnownHostsLine]:
        name = name.lower()
        if name not in self._found:
            host = name.encode()
            found = list(self._by_name.get(name, ()))
            found += [line for patterns, line in self._by_pattern if matches(name, patterns)]
            found += [line for salt, digest, line in self._hashed if hmac.digest(salt, host, "sha1") == digest]
            self._found[name] = found
        return self._found[name]

    def _authorities_of(self, name: str) -> list[KnownHostsLine]:
        """Return who may vouch for a machine, on whatever port its server listens."""
        names = {name.lower(), _host(name)}
        return [line for patterns, line in self._authorities if any(matches(one, patterns) for one in names)]

    def _take_all(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8", errors="replace")
        self._read.append(path)
        for line in text.splitlines():
            self._take(line.split(), path)

    def _take(self, words: list[str], path: Path) -> None:
        """Take in one line; what is none of OpenSSH's is left out, as it does itself."""
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or marker not in {"", REVOKED, AUTHORITY}:  # noqa: PLR2004 (names, type, key)
            return
        names, kind = words[0], words[1]
        try:
            line = KnownHostsLine(kind, base64.b64decode(words[2], validate=True), path)
            if marker == REVOKED:
                self._revoked[line.key] = path
            elif names.startswith(HASHED):
                salt, digest = (base64.b64decode(part, validate=True) for part in names.removeprefix(HASHED).split("|"))
                self._hashed.append((salt, digest, line))
            elif marker == AUTHORITY:
                self._authorities.append((names.lower().split(","), line))
            else:
                self._add(names.lower().split(","), line)
        except (binascii.Error, ValueError):
            return

    def _add(self, names: list[str], line: KnownHostsLine) -> None:
        if any(mark in name for name in names for mark in "*?!"):
            self._by_pattern.append((names, line))
            return
        for name in names:
            self._by_name.setdefault(name, []).append(line)


def name_in_file(address: str, port: int) -> str:
    """Return how OpenSSH writes a machine into the file, in small letters."""
    return address.lower() if port == 22 else f"[{address.lower()}]:{port}"  # noqa: PLR2004 (SSH's own)


def _host(name: str) -> str:
    """Return the machine's name or address alone, out of its name in the file."""
    name = name.lower()
    return name[1:].rpartition("]:")[0] if name.startswith("[") else name
