"""Which host keys are trusted: known_hosts files and certificates in OpenSSH's format. Files are read once, and a person adds lines.

paramiko's `HostKeys` reads such files too, but is not used. It knows no `@revoked` and no `@cert-authority`: one such line, one damaged
hash, or two blanks between fields make it fail on the complete file. Of two keys of one type that a host has it uses only the first. It has
no patterns, compares names case-sensitively, and silently skips keys of types that it does not know: a host that shows another key would be
unknown, not changed. Each lookup, and each line that is loaded, goes through all lines. `test_paramiko_reads_less_of_a_file` checks this.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import fnmatch
import hmac
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    SSHCertificateType,
    load_ssh_public_identity,
)
from cryptography.hazmat.primitives.serialization.ssh import SSHCertPublicKeyTypes
from paramiko import PKey

from holdfast.errors import UnusableFile
from holdfast.probe.remote.program import ProbeFailed

DEFAULT: Final = "~/.ssh/known_hosts"
SITE: Final = (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))
"""Files for the whole machine. As with OpenSSH they are read in addition to the user's own, where they exist."""
REVOKED: Final = "@revoked"
AUTHORITY: Final = "@cert-authority"
HASHED: Final = "|1|"
CERTIFICATE_SUFFIX: Final = "-cert-v01@openssh.com"
"""What OpenSSH appends to the type of a key for that of its certificate."""
WHAT: Final = "the known_hosts file"
PERMISSIONS: Final = "Fix its permissions, or name another in `known_hosts`"
TRUST: Final = "`holdfast node trust --cluster CLUSTER_FILE` shows keys and asks"


class HostKeyStatus(StrEnum):
    """What is known of a key that a machine shows."""

    TRUSTED = "trusted"
    UNKNOWN = "unknown"
    """No key of the machine is known."""
    CHANGED = "changed"
    """Another key is known."""
    REVOKED = "revoked"


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of *patterns*, as in sshd's manual, matches *name*, and none that begins with `!` does.

    `[` begins names with a port; paramiko's own function takes it for a set of letters.
    """

    def fits(pattern: str) -> bool:
        return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))

    negated = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    return not any(map(fits, negated)) and any(fits(pattern) for pattern in patterns if not pattern.startswith("!"))


@dataclass(frozen=True, slots=True)
class Certificate:
    """A host key signed by an authority, as `ssh-keygen -s CA -h` does it."""

    signed: SSHCertificate

    @classmethod
    def of(cls, key: PKey) -> Self | None:
        """Return the certificate that came with *key*; nothing where there is no readable one."""
        blob = key.public_blob
        if blob is None:
            return None
        try:
            found = load_ssh_public_identity(f"{blob.key_type} ".encode() + base64.b64encode(blob.key_blob))
        except (ValueError, UnsupportedAlgorithm):
            return None
        if not isinstance(found, SSHCertificate) or _key_bytes(found.public_key()) != key.asbytes():
            return None
        return cls(found)

    @property
    def authority(self) -> bytes:
        """Return the key of the authority that it claims."""
        return _key_bytes(self.signed.signature_key())

    def why_not(self, host: str) -> str:
        """Return why it is not valid for *host*, a name or an address without its port; nothing when it is. The rules are OpenSSH's."""
        names = [name.decode("utf-8", "replace") for name in self.signed.valid_principals]
        if self.signed.type is not SSHCertificateType.HOST:
            return "it is a user's"
        if names and not any(matches(host, [name.lower()]) for name in names):
            return f"it is for {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"  # noqa: PLR2004 (enough to know it by)
        if not self.signed.valid_after <= time.time() < self.signed.valid_before:
            return f"it is valid {_minute(self.signed.valid_after)} to {_minute(self.signed.valid_before)}"
        if self.signed.critical_options:
            return "it has options that are not known here"
        try:
            self.signed.verify_cert_signature()
        except (InvalidSignature, UnsupportedAlgorithm, ValueError):
            return "its signature is wrong"
        return ""


def _key_bytes(key: SSHCertPublicKeyTypes) -> bytes:
    """Return a public key as it is in known_hosts, without its type."""
    return base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])


def _minute(at: int) -> str:
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}Z"
    except (OverflowError, ValueError, OSError):
        return "forever"


class KnownKey(NamedTuple):
    """A key, and the file that has it."""

    kind: str
    key: bytes
    path: Path


@dataclass(slots=True)
class KnownHosts:
    """The content of known_hosts files. Lookups are cached: a hashed file must be searched line by line for each name."""

    path: Path
    """The user's own, to which keys are added."""
    _read: list[Path] = field(default_factory=list)
    _by_name: dict[str, list[KnownKey]] = field(default_factory=dict)
    _by_pattern: list[tuple[list[str], KnownKey]] = field(default_factory=list)
    _hashed: list[tuple[bytes, bytes, KnownKey]] = field(default_factory=list)
    """Salt, digest and key."""
    _authorities: list[tuple[list[str], KnownKey]] = field(default_factory=list)
    _revoked: dict[bytes, Path] = field(default_factory=dict)
    _found: dict[str, list[KnownKey]] = field(default_factory=dict)

    @classmethod
    def read(cls, named: str | None, *, create: bool = False) -> KnownHosts:
        """Return the content of the file *named* (default: the user's own, which need not exist); raise `UnusableFile`.

        With *create* a named file need not exist either.
        """
        known = cls(Path(named or DEFAULT).expanduser())
        try:
            known._read_file(known.path)
        except FileNotFoundError:
            if named is not None and not create:
                raise UnusableFile(WHAT, str(known.path), "there is no such file", f"Correct `known_hosts`, or make one: {TRUST}") from None
        except OSError as error:
            raise UnusableFile(WHAT, str(known.path), error.strerror or str(error), PERMISSIONS) from error
        for path in SITE:
            with suppress(OSError):
                known._read_file(path)
        return known

    def types_of(self, name: str) -> list[str]:
        """Return the types of the keys that are known of *name*: a server that has several is asked for one of these."""
        return list(dict.fromkeys(one.kind for one in self._keys(name)))

    def has_authority(self, name: str) -> bool:
        """Return whether an authority may vouch for *name*: a server that has a certificate is asked for it."""
        return bool(self._authorities_of(name))

    def status(self, name: str, key: PKey) -> HostKeyStatus:
        """Return what is known of the *key* that *name* shows."""
        if self._revoking(key) is not None:
            return HostKeyStatus.REVOKED
        known = self._keys(name)
        if any(key.asbytes() == one.key for one in known) or self._certificate_problem(name, key) == "":
            return HostKeyStatus.TRUSTED
        return HostKeyStatus.CHANGED if known else HostKeyStatus.UNKNOWN

    def check(self, name: str, key: PKey) -> None:
        """Raise `ProbeFailed` unless *key* is trusted as a key of *name*."""
        status = self.status(name, key)
        if status is not HostKeyStatus.TRUSTED:
            raise ProbeFailed(self.problem(status, name, key))

    def problem(self, status: HostKeyStatus, name: str, key: PKey) -> str:
        """Return why *key* is not trusted, and what to do."""
        shown = key.fingerprint
        if status is HostKeyStatus.REVOKED:
            return f"{name} showed the key {shown}, which {self._revoking(key)} says is revoked: find out which machine has it"
        if why := self._certificate_problem(name, key):
            shown += f", with a certificate that does not count: {why}"
        paths = list(dict.fromkeys(one.path for one in self._keys(name)))
        if status is HostKeyStatus.UNKNOWN:
            files = " and ".join(str(path) for path in self._read or [self.path])
            cure = f"Check that it is the machine's own, then add it: {TRUST}"
            return f"unknown host key: {files} has no key of {name}, which showed {shown}. {cure}"
        cures = [f"`ssh-keygen -R '{name}' -f {path}`" if path == self.path else f"have {path} corrected" for path in paths]
        trust = " and `holdfast node trust --cluster CLUSTER_FILE`" if paths == [self.path] else ""
        where = " and ".join(map(str, paths))
        return (
            f"changed host key: {name} showed {shown}, and {where} has another one. If the machine was reinstalled, "
            f"{' and '.join(cures)}{trust}; else another machine may intercept the connection"
        )

    def _certificate_problem(self, name: str, key: PKey) -> str | None:
        """Return why the certificate of *key* is not valid for *name*, nothing when it is; None where there is no certificate."""
        certificate, host = Certificate.of(key), _host(name)
        if certificate is None:
            return None
        if all(certificate.authority != one.key for one in self._authorities_of(name)):
            return f"no {AUTHORITY} of {host} has signed it"
        return certificate.why_not(host)

    def _revoking(self, key: PKey) -> Path | None:
        """Return the file that revokes *key*, or its authority."""
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
                unfinished = end > 0 and os.pread(fd, 1, end - 1) != b"\n"  # ours would be appended to a last line without an end
                file.write(("\n" * unfinished + lines).encode())
        except OSError as error:
            raise UnusableFile(WHAT, str(self.path), error.strerror or str(error), PERMISSIONS) from error
        for name, key in keys:
            self._add([name.lower()], KnownKey(key.get_name(), key.asbytes(), self.path))
            self._found.pop(name.lower(), None)

    def _keys(self, name: str) -> list[KnownKey]:
        name = name.lower()
        if name not in self._found:
            host = name.encode()
            found = list(self._by_name.get(name, ()))
            found += [one for patterns, one in self._by_pattern if matches(name, patterns)]
            found += [one for salt, digest, one in self._hashed if hmac.digest(salt, host, "sha1") == digest]
            self._found[name] = found
        return self._found[name]

    def _authorities_of(self, name: str) -> list[KnownKey]:
        """Return the authorities for a machine, whatever port its server has."""
        names = {name.lower(), _host(name)}
        return [one for patterns, one in self._authorities if any(matches(each, patterns) for each in names)]

    def _read_file(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8", errors="replace")
        self._read.append(path)
        for line in text.splitlines():
            with suppress(binascii.Error, ValueError):  # like OpenSSH, ignore a line that is none of its own
                self._read_line(line.split(), path)

    def _read_line(self, words: list[str], path: Path) -> None:
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or marker not in {"", REVOKED, AUTHORITY}:  # noqa: PLR2004 (names, type, key)
            return
        names, kind = words[0], words[1]
        known = KnownKey(kind, base64.b64decode(words[2], validate=True), path)
        if marker == REVOKED:
            self._revoked[known.key] = path
        elif names.startswith(HASHED):
            salt, digest = (base64.b64decode(part, validate=True) for part in names.removeprefix(HASHED).split("|"))
            self._hashed.append((salt, digest, known))
        elif marker == AUTHORITY:
            self._authorities.append((names.lower().split(","), known))
        else:
            self._add(names.lower().split(","), known)

    def _add(self, names: list[str], known: KnownKey) -> None:
        if any(letter in name for name in names for letter in "*?!"):
            self._by_pattern.append((names, known))
            return
        for name in names:
            self._by_name.setdefault(name, []).append(known)


def name_in_file(address: str, port: int) -> str:
    """Return how OpenSSH writes a machine into the file, in small letters."""
    return address.lower() if port == 22 else f"[{address.lower()}]:{port}"  # noqa: PLR2004 (SSH's own)


def _host(name: str) -> str:
    """Return the machine's name or address without the port."""
    name = name.lower()
    return name[1:].rpartition("]:")[0] if name.startswith("[") else name
