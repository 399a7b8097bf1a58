"""How we prove who we are: the key file that the cluster names, or the keys of the SSH agent and the user's own files."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import paramiko
from paramiko import PKey

from holdfast.errors import UnusableFile
from holdfast.secret import is_elsewhere, secret
from holdfast.ssh.trouble import Unanswered, Unasked
from holdfast.ssh.watchdog import in_time

OWN_FILES: Final = ("id_ed25519", "id_ecdsa", "id_rsa")
"""The user's own keys, in the order in which they are tried."""
WHAT: Final = "the private key"
AGENT_SECONDS: Final = 5.0
"""How long the SSH agent may take to tell its keys."""


class Keys:
    """The private keys there are, each file read once."""

    def __init__(self) -> None:
        self._files: dict[str, PKey] = {}

    def load(self, file: str) -> None:
        """Read the key *file*, or the secret of that name; raise `UnusableFile` with what keeps it from being used."""
        if file not in self._files:
            self._files[file] = _elsewhere(file) if is_elsewhere(file) else _key(Path(file).expanduser())

    def of(self, file: str | None) -> Iterator[PKey]:
        """Yield the keys to try: that of *file*, or else what the SSH agent has, and the user's own."""
        if file is not None:
            yield self._files[file]
            return
        yield from _agents()
        for name in OWN_FILES:
            own = f"~/.ssh/{name}"
            try:
                self.load(own)
            except UnusableFile:
                continue
            yield self._files[own]


def log_in(transport: paramiko.Transport, user: str, keys: Iterator[PKey], where: str) -> None:
    """Prove to *where* that we are *user*; raise `Unasked` when it takes none of the *keys*."""
    tried = []
    for key in keys:
        try:
            if not transport.auth_publickey(user, key):
                return
            tried.append(f"{key.fingerprint} (it asks for more than a key)")
        except paramiko.BadAuthenticationType as error:
            raise Unasked(
                f"{where} takes no keys from '{user}', only {', '.join(error.allowed_types)}. Allow PubkeyAuthentication"
            ) from error
        except paramiko.AuthenticationException as error:
            if not transport.is_active():
                raise Unanswered(f"{where} ended the connection, or said nothing, while '{user}' logged in: {error}") from error
            if "timeout" in str(error).lower():
                raise Unanswered(f"{where} let '{user}' wait at the login for too long") from error
            tried.append(key.fingerprint)
    if not tried:
        cure = "Name a key file in `key`, or start an SSH agent (`ssh-add`)"
        raise Unasked(f"there is no key to log in to {where} with: no `key`, no SSH agent with keys, no file ~/.ssh/id_*. {cure}")
    cure = f"Add its public half to the authorized_keys of '{user}' there, or mend `user` or `key`"
    raise Unasked(f"{where} does not let '{user}' in with the key {' or '.join(tried)}. {cure}")


def own_name() -> str:
    """Return the name of who runs this."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # a container may run under a number that has no name
        raise Unasked("the account that Holdfast runs under has no name: set `user`") from error


def _agents() -> Iterator[PKey]:
    """Yield the keys of the SSH agent. Each login asks by itself: an agent's connection serves one question at a time."""
    if not os.environ.get("SSH_AUTH_SOCK"):
        return
    try:
        yield from in_time(AGENT_SECONDS, lambda: paramiko.Agent().get_keys())
    except (paramiko.SSHException, OSError):
        return  # one that does not answer has no keys


def _elsewhere(name: str) -> PKey:
    """Return the private key that is the secret called *name*. No disk ever sees it."""
    with os.fdopen(os.memfd_create("key", os.MFD_CLOEXEC), "w") as file:
        file.write(secret(name, WHAT).strip() + "\n")
        file.flush()
        return _key(Path(f"/proc/self/fd/{file.fileno()}"), name)


def _key(path: Path, name: str = "") -> PKey:
    """Return the private key in the file at *path*; foreign errors are named, by the *name* that its user knows."""
    name = name or str(path)
    try:
        return PKey.from_path(path)
    except FileNotFoundError:
        raise UnusableFile(WHAT, name, "there is no such file", "Mend `key`, or leave it out for the SSH agent's keys") from None
    except OSError as error:
        cure = "Mend its permissions (`chmod 600`, and its owner), or name a key that you may read"
        raise UnusableFile(WHAT, name, error.strerror or str(error), cure) from error
    except (paramiko.PasswordRequiredException, TypeError) as error:  # the second is what the library below paramiko says
        raise UnusableFile(WHAT, name, "it has a passphrase", "Leave `key` out, and `ssh-add` it to an SSH agent") from error
    except Exception as error:
        cure = "Name the private half of an Ed25519, ECDSA or RSA key, as `ssh-keygen` writes it"
        raise UnusableFile(WHAT, name, f"it is no private key that can be used here ({error})", cure) from error
