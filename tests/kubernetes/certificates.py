"""An authority of a test's own, and the certificates that it signs."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALID: Final = dt.timedelta(days=1)


class Authority:
    """Signs certificates; its own is in `certificate`."""

    def __init__(self, folder: Path, name: str = "test-ca") -> None:
        self.folder, self.certificate = folder, folder / f"{name}.crt"
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), _named(name)
        signed = _builder(self._name, self._name, self._key).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificate.write_bytes(signed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def signs(self, name: str, *hosts: str, group: str = "") -> tuple[Path, Path]:
        """Return the files with a certificate for *name*, valid for *hosts* if it is a server's, and with its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name, group), self._name, key)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(one) for one in hosts]), critical=False)
        file = name.replace(":", "-")
        certificate, secret = self.folder / f"{file}.crt", self.folder / f"{file}.key"
        certificate.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        secret.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
        )
        return certificate, secret


def _named(name: str, group: str = "") -> x509.Name:
    groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID)
        .not_valid_after(now + VALID)
    )
