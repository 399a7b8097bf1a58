"""The keys to log in with: the one that the cluster file names, or those of the SSH agent and the user's own files."""

from __future__ import annotations

import getpass
import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import paramiko
from paramiko import PKey
from paramiko.pkey import PublicBlob

from holdfast.cluster.ssh.deadlines import in_time
from holdfast.errors import UnusableFile
from holdfast.probe.remote.program import NodeUnreachable, ProbeFailed
from holdfast.security.secrets import is_secret_reference, secret

OWN_FILES: Final = ("id_ed25519", "id_ecdsa", "id_rsa")
"""The user's own keys in ~/.ssh, in the order in which they are tried."""
AGENT_SECONDS: Final = 5.0
"""Time for the SSH agent to list its keys."""
KEY: Final = "the private key"
PASSPHRASE: Final = "the passphrase"  # noqa: S105 (what it is called in messages)
PUBLIC: Final = ".pub"
CONFIGURE: Final = "Name it in `passphrase` (`env:VARIABLE`, `block:NAME` or a file)"
SSH_ADD: Final = "`ssh-add` it to the SSH agent of the user who runs Holdfast"
NAME_KEY: Final = (
    "Name the private half of an Ed25519, ECDSA or RSA key, as `ssh-keygen` writes it, or the `.pub` file of one that the SSH agent has"
)


class NoCredentials(Exception):
    """A private key has a passphrase, and none is configured."""


@dataclass(frozen=True, slots=True)
class Passphrase:
    """A passphrase, and where it was read from."""

    name: str
    phrase: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AgentKey:
    """A key whose private half only the SSH agent has."""

    name: str
    public: bytes

    def is_present(self) -> bool:
        """Return whether the SSH agent has it."""
        with closing(_agent_keys()) as keys:
            return any(key.asbytes() == self.public for key in keys)

    def key(self) -> Generator[PKey]:
        """Yield the key, for as long as it is to sign; raise `ProbeFailed` when the SSH agent has lost it."""
        with closing(_agent_keys()) as keys:
            for key in keys:
                if key.asbytes() == self.public:
                    yield key
                    return
        raise ProbeFailed(f"the SSH agent no longer has the key {self.name}. {SSH_ADD}")


class Keys:
    """The user's private keys; each file and each passphrase is read once."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str | None], PKey | AgentKey] = {}
        self._passphrases: dict[str, bytes] = {}

    def load(self, file: str | None, passphrase: str | None = None) -> None:
        """Read the key in *file*, or in the secret of that name, and its *passphrase*; raise `UnusableFile` when it cannot be used."""
        if passphrase is not None and passphrase not in self._passphrases:
            self._passphrases[passphrase] = _read_passphrase(passphrase)
        if file is not None and (file, passphrase) not in self._files:
            phrase = None if passphrase is None else Passphrase(passphrase, self._passphrases[passphrase])
            read = _read_secret(file, phrase) if is_secret_reference(file) else _read_file(Path(file).expanduser(), phrase)
            self._files[file, passphrase] = read

    def of(self, file: str | None, passphrase: str | None = None) -> Generator[PKey]:
        """Yield the keys to try: that of *file*, or else those of the SSH agent and the user's own."""
        if file is not None:
            named = self._files[file, passphrase]
            yield from (named,) if isinstance(named, PKey) else named.key()
            return
        yield from _agent_keys()
        for name in OWN_FILES:
            own = f"~/.ssh/{name}"
            try:
                self.load(own, passphrase)
            except UnusableFile:
                continue
            if isinstance(key := self._files[own, passphrase], PKey):  # else it was among the agent's
                yield key


def log_in(transport: paramiko.Transport, user: str, keys: Iterator[PKey], where: str) -> None:
    """Log in to *where* as *user*; raise `ProbeFailed` when it accepts none of the *keys*, `NodeUnreachable` when it stops answering."""
    tried: list[str] = []
    for key in keys:
        try:
            if not transport.auth_publickey(user, key):
                return
            tried.append(f"{key.fingerprint} (it requires more than a key)")
        except paramiko.BadAuthenticationType as error:
            allowed = ", ".join(error.allowed_types)
            raise ProbeFailed(f"{where} accepts no keys from '{user}', only {allowed}. Allow PubkeyAuthentication") from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            if (problem := _login_problem(error, transport, len(tried), where, user)) is not None:
                raise problem from error
            tried.append(key.fingerprint)
    if not tried:
        cure = "Name a key file in `key`, or start an SSH agent (`ssh-add`)"
        raise ProbeFailed(f"there is no key to log in to {where} with: no `key`, no SSH agent with keys, no file ~/.ssh/id_*. {cure}")
    cure = f"Add its public half to the authorized_keys of '{user}' there, or correct `user` or `key`"
    raise ProbeFailed(f"{where} does not let '{user}' in with the key {' or '.join(tried)}. {cure}")


def _login_problem(error: Exception, transport: paramiko.Transport, refused: int, where: str, user: str) -> Exception | None:
    """Return what *error* means after *refused* keys; nothing where this key was refused too."""
    if refused and not transport.is_active():  # a node that has just died accepts no connection at the next try
        return ProbeFailed(
            f"{where} ended the login of '{user}' after {refused + 1} keys: too many in the SSH agent for its MaxAuthTries. "
            "Name the one that it takes in `key`; the `.pub` file of a key that the SSH agent has is enough"
        )
    if not isinstance(error, paramiko.AuthenticationException):
        return error
    if not transport.is_active():
        return NodeUnreachable(f"{where} ended the connection, or did not answer, while '{user}' logged in: {error}")
    if "timeout" in str(error).lower():
        return NodeUnreachable(f"{where} took too long to log in '{user}'")
    return None


def own_name() -> str:
    """Return the name of the user who runs this."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # a container may run under a user id without a name
        raise ProbeFailed("the account that Holdfast runs under has no name: set `user`") from error


def _agent_keys() -> Generator[PKey]:
    """Yield the keys of the SSH agent. Each login opens its own connection: one serves a single request at a time."""
    if not Path(os.environ.get("SSH_AUTH_SOCK") or os.devnull).is_socket():
        return
    try:
        agent = in_time(AGENT_SECONDS, paramiko.Agent)
    except (paramiko.SSHException, OSError):
        return  # one that does not answer has no keys
    try:
        yield from agent.get_keys()
    finally:
        agent.close()


def _read_passphrase(name: str) -> bytes:
    """Return the passphrase in the secret or the file *name*, without its line end."""
    if is_secret_reference(name):
        return secret(name, PASSPHRASE).rstrip("\r\n").encode()
    try:
        found = Path(name).expanduser().read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise UnusableFile(PASSPHRASE, name, error.strerror or str(error), "Correct `passphrase`, or the file's permissions") from error
    if not found:
        raise UnusableFile(PASSPHRASE, name, "the file is empty", "Write the passphrase of the key into it")
    return found


def _read_secret(name: str, phrase: Passphrase | None) -> PKey:
    """Return the private key in the secret *name*, without writing it to a disk."""
    with os.fdopen(os.memfd_create("key", os.MFD_CLOEXEC), "w") as file:
        file.write(secret(name, KEY).strip() + "\n")
        file.flush()
        try:
            return _private_key(Path(f"/proc/self/fd/{file.fileno()}"), name, phrase)
        except NoCredentials:
            raise UnusableFile(KEY, name, "it has a passphrase", CONFIGURE) from None


def _read_file(path: Path, phrase: Passphrase | None) -> PKey | AgentKey:
    """Return the key in a file; the SSH agent may have one that has a passphrase."""
    if path.suffix == PUBLIC:
        return _agent_key(path, str(path))
    try:
        return _private_key(path, str(path), phrase)
    except NoCredentials:
        public, cure = path.with_name(path.name + PUBLIC), f"{CONFIGURE}, or {SSH_ADD}"
        if not public.exists():
            raise UnusableFile(KEY, str(path), f"it has a passphrase, and there is no {public.name} next to it", cure) from None
    try:
        return _agent_key(public, str(path))
    except UnusableFile as error:
        cure = f"{CONFIGURE}, or {error.cure}"
        raise UnusableFile(KEY, str(path), f"it has a passphrase, and {error.reason}", cure) from error


def _agent_key(path: Path, name: str) -> AgentKey:
    """Return the key whose public half is in a file, when the SSH agent has it."""
    with _errors_of(name):
        words = path.read_text(encoding="utf-8", errors="replace").split()
    try:
        key = AgentKey(name, PublicBlob.from_string(" ".join(words[:2])).key_blob)
    except (ValueError, paramiko.SSHException) as error:
        raise UnusableFile(KEY, name, f"{path.name} is no public key", NAME_KEY) from error
    if not key.is_present():
        no_agent = "there is no SSH agent for its private half"
        raise UnusableFile(KEY, name, "the SSH agent does not have it" if os.environ.get("SSH_AUTH_SOCK") else no_agent, SSH_ADD)
    return key


def _private_key(path: Path, name: str, phrase: Passphrase | None) -> PKey:
    """Return the private key in the file at *path*; raise `NoCredentials` when it has a passphrase and *phrase* is empty."""
    with _errors_of(name):
        try:
            return PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError) as error:  # cryptography raises the second
            if phrase is None:
                raise NoCredentials from error
        try:
            return PKey.from_path(path, phrase.phrase)  # type: ignore[arg-type]  # cryptography takes bytes only
        except (ValueError, paramiko.SSHException):
            cure = "Correct `passphrase` or `key`"
            raise UnusableFile(PASSPHRASE, phrase.name, f"it does not open the private key {name}", cure) from None


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Turn errors of reading the key *name* into `UnusableFile`."""
    try:
        yield
    except (NoCredentials, UnusableFile):
        raise
    except FileNotFoundError:
        raise UnusableFile(KEY, name, "there is no such file", "Correct `key`, or leave it out to use the SSH agent's keys") from None
    except OSError as error:
        cure = "Fix its permissions (`chmod 600`, and its owner), or name a key that you may read"
        raise UnusableFile(KEY, name, error.strerror or str(error), cure) from error
    except Exception as error:
        raise UnusableFile(KEY, name, f"it is no private key that can be used here ({error})", NAME_KEY) from error
