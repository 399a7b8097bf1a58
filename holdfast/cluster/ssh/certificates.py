"""Host keys that an authority vouches for: certificates, as `ssh-keygen -s CA -h` signs them."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

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

from holdfast.cluster.ssh.patterns import matches

SUFFIX: Final = "-cert-v01@openssh.com"
"""What OpenSSH appends to the type of a key for that of its certificate."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What an authority says of a host's key."""

    said: SSHCertificate

    @classmethod
    def of(cls, key: PKey) -> Self | None:
        """Return the certificate that came with *key*; nothing where none did that can be read."""
        blob = key.public_blob
        if blob is None:
            return None
        try:
            found = load_ssh_public_identity(f"{blob.key_type} ".encode() + base64.b64encode(blob.key_blob))
        except (ValueError, UnsupportedAlgorithm):
            return None
        if not isinstance(found, SSHCertificate) or _wire(found.public_key()) != key.asbytes():
            return None
        return cls(found)

    @property
    def authority(self) -> bytes:
        """Return the key of who signed it, or says to have."""
        return _wire(self.said.signature_key())

    def why_not(self, host: str) -> str:
        """Say why it does not vouch for *host*, a name or an address without its port; nothing when it does. As OpenSSH judges it."""
        names = [name.decode("utf-8", "replace") for name in self.said.valid_principals]
        if self.said.type is not SSHCertificateType.HOST:
            return "it is a user's"
        if names and not any(matches(host, [name.lower()]) for name in names):
            return f"it is for {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"  # noqa: PLR2004 (enough to know it by)
        if not self.said.valid_after <= time.time() < self.said.valid_before:
            return f"it is good {_day(self.said.valid_after)} to {_day(self.said.valid_before)}"
        if self.said.critical_options:
            return "it has conditions that are not known here"
        try:
            self.said.verify_cert_signature()
        except (InvalidSignature, UnsupportedAlgorithm, ValueError):
            return "its signature is wrong"
        return ""


def _wire(key: SSHCertPublicKeyTypes) -> bytes:
    """Return a public key as it stands in known_hosts, without its type."""
    return base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])


def _day(moment: int) -> str:
    try:
        return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M}Z"
    except (OverflowError, ValueError, OSError):
        return "for ever"
