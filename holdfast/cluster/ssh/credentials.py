"""How we prove who we are: the key that the cluster names, or the keys of the SSH agent and the user's own files."""

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

from holdfast.cluster.ssh.watchdog import in_time
from holdfast.errors import UnusableFile
from holdfast.probe.remote.errors import NodeUnreachable, ProbeFailed
from holdfast.secrets import is_secret_reference, secret

OWN_FILES: Final = ("id_ed25519", "id_ecdsa", "id_rsa")
"""The user's own keys, in the order in which they are tried."""
WHAT: Final = "the private key"
AGENT_SECONDS: Final = 5.0
"""How long the SSH agent may take to tell its keys."""
PHRASE: Final = "the passphrase"
PUBLIC: Final = ".pub"
SAY: Final = "Say in `passphrase` where that is (`env:VARIABLE`, `block:NAME` or a file)"
ADD: Final = "`ssh-add` it to the SSH agent of whoever runs Holdfast"
TOO_MANY: Final = (
    ": too many in the SSH agent for its MaxAuthTries. Name the one that it takes in `key`; "
    "the `.pub` file of a key that the SSH agent has is enough"
)


NAME_ONE: Final = (
    "Name the private half of an Ed25519, ECDSA or RSA key, as `ssh-keygen` writes it, or the `.pub` file of one that the SSH agent has"
)


class NoCredentials(Exception):
    """A private key has a passphrase."""


@dataclass(frozen=True, slots=True)
class HostKeyGate:
    """A passphrase, and where it is from."""

    name: str
    phrase: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A key whose private half nobody shows us: the SSH agent signs with it."""

    name: str
    public: bytes

    def there(self) -> bool:
        """Tell whether the SSH agent has it."""
        with closing(_agents()) as keys:
            return any(key.asbytes() == self.public for key in keys)

    def key(self) -> Generator[PKey]:
        """Yield the key, for as long as it is to sign; raise `ProbeFailed` when the SSH agent has it no more."""
        with closing(_agents()) as keys:
            for key in keys:
                if key.asbytes() == self.public:
                    yield key
                    return
        raise ProbeFailed(f"the SSH agent has the key {self.name} no more. {ADD}")


class Keys:
    """The private keys there are, each file and each passphrase read once."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str | None], PKey | HeldKey] = {}
        self._phrases: dict[str, bytes] = {}

    def load(self, file: str | None, passphrase: str | None = None) -> None:
        """Read the key *file*, or the secret of that name, and its *passphrase*; raise `UnusableFile` where it cannot be used."""
        if passphrase is not None and passphrase not in self._phrases:
            self._phrases[passphrase] = _phrase(passphrase)
        if file is not None and (file, passphrase) not in self._files:
            lock = None if passphrase is None else HostKeyGate(passphrase, self._phrases[passphrase])
            self._files[file, passphrase] = _elsewhere(file, lock) if is_secret_reference(file) else _file(Path(file).expanduser(), lock)

    def of(self, file: str | None, passphrase: str | None = None) -> Generator[PKey]:
        """Yield the keys to try: that of *file*, or else what the SSH agent has, and the user's own."""
        if file is not None:
            named = self._files[file, passphrase]
            yield from (named,) if isinstance(named, PKey) else named.key()
            return
        yield from _agents()
        for name in OWN_FILES:
            own = f"~/.ssh/{name}"
            try:
                self.load(own, passphrase)
            except UnusableFile:
                continue
            if isinstance(key := self._files[own, passphrase], PKey):  # else it was among the agent's
                yield key


def log_in(transport: paramiko.Transport, user: str, keys: Iterator[PKey], where: str) -> None:
    """Prove to *where* that we are *user*; raise `ProbeFailed` when it takes none of the *keys*."""
    tried = []
    for key in keys:
        try:
            if not transport.auth_publickey(user, key):
                return
            tried.append(f"{key.fingerprint} (it asks for more than a key)")
        except paramiko.BadAuthenticationType as error:
            raise ProbeFailed(
                f"{where} takes no keys from '{user}', only {', '.join(error.allowed_types)}. Allow PubkeyAuthentication"
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            trouble = _worse(error, transport, len(tried), where, user)
            if trouble is not None:
                raise trouble from error
            tried.append(key.fingerprint)
    if not tried:
        cure = "Name a key file in `key`, or start an SSH agent (`ssh-add`)"
        raise ProbeFailed(f"there is no key to log in to {where} with: no `key`, no SSH agent with keys, no file ~/.ssh/id_*. {cure}")
    cure = f"Add its public half to the authorized_keys of '{user}' there, or mend `user` or `key`"
    raise ProbeFailed(f"{where} does not let '{user}' in with the key {' or '.join(tried)}. {cure}")


def _worse(error: Exception, transport: paramiko.Transport, refused: int, where: str, user: str) -> Exception | None:
    """Return what came instead of an answer to a key, after so many were *refused*; nothing where it was refused too."""
    if refused and not transport.is_active():  # a node that dies in this moment takes no connection when it is asked again
        return ProbeFailed(f"{where} ended the login of '{user}' after {refused + 1} keys{TOO_MANY}")
    if not isinstance(error, paramiko.AuthenticationException):
        return error
    if not transport.is_active():
        return NodeUnreachable(f"{where} ended the connection, or said nothing, while '{user}' logged in: {error}")
    if "timeout" in str(error).lower():
        return NodeUnreachable(f"{where} let '{user}' wait at the login for too long")
    return None


def own_name() -> str:
    """Return the name of who runs this."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # a container may run under a number that has no name
        raise ProbeFailed("the account that Holdfast runs under has no name: set `user`") from error


def _agents() -> Generator[PKey]:
    """Yield the keys of the SSH agent. Each login asks by itself: an agent's connection serves one question at a time."""
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


def _phrase(name: str) -> bytes:
    """Return the passphrase that is the secret called *name*, or that a file of that name holds; its line end is none of it."""
    if is_secret_reference(name):
        return secret(name, PHRASE).rstrip("\r\n").encode()
    try:
        held = Path(name).expanduser().read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise UnusableFile(PHRASE, name, error.strerror or str(error), "Mend `passphrase`, or the file's permissions") from error
    if not held:
        raise UnusableFile(PHRASE, name, "the file is empty", "Write the passphrase of the key into it")
    return held


def _elsewhere(name: str, lock: HostKeyGate | None) -> PKey:
    """Return the private key that is the secret called *name*. No disk ever sees it."""
    with os.fdopen(os.memfd_create("key", os.MFD_CLOEXEC), "w") as file:
        file.write(secret(name, WHAT).strip() + "\n")
        file.flush()
        try:
            return _key(Path(f"/proc/self/fd/{file.fileno()}"), name, lock)
        except NoCredentials:
            raise UnusableFile(WHAT, name, "it has a passphrase", SAY) from None


def _file(path: Path, lock: HostKeyGate | None) -> PKey | HeldKey:
    """Return the key in a file; what of it is not for us to read, the SSH agent may have."""
    if path.suffix == PUBLIC:
        return _held(path, str(path))
    try:
        return _key(path, str(path), lock)
    except NoCredentials:
        beside = path.with_name(path.name + PUBLIC)
        if not beside.exists():
            raise UnusableFile(WHAT, str(path), f"it has a passphrase, and no {beside.name} lies beside it", f"{SAY}, or {ADD}") from None
    try:
        return _held(beside, str(path))
    except UnusableFile as error:
        raise UnusableFile(WHAT, str(path), f"it has a passphrase, and {error.reason}", f"{SAY}, or {error.cure}") from error


def _held(path: Path, name: str) -> HeldKey:
    """Return the key whose public half a file has, when the SSH agent holds it."""
    with _named(name):
        words = path.read_text(encoding="utf-8", errors="replace").split()
    try:
        held = HeldKey(name, PublicBlob.from_string(" ".join(words[:2])).key_blob)
    except (ValueError, paramiko.SSHException) as error:
        raise UnusableFile(WHAT, name, f"{path.name} is no public key", NAME_ONE) from error
    if not held.there():
        away = "there is no SSH agent for its private half"
        raise UnusableFile(WHAT, name, "the SSH agent does not have it" if os.environ.get("SSH_AUTH_SOCK") else away, ADD)
    return held


def _key(path: Path, name: str, lock: HostKeyGate | None) -> PKey:
    """Return the private key in the file at *path*; raise `NoCredentials` for one with a passphrase where there is no *lock*."""
    with _named(name):
        try:
            return PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError) as error:  # the second is what the library below paramiko says
            if lock is None:
                raise NoCredentials from error
        try:
            return PKey.from_path(path, lock.phrase)  # type: ignore[arg-type]  # what is below it takes bytes alone
        except (ValueError, paramiko.SSHException):
            raise UnusableFile(PHRASE, lock.name, f"it does not open the private key {name}", "Mend `passphrase` or `key`") from None


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Name foreign errors, by the *name* of the key that its user knows."""
    try:
        yield
    except (NoCredentials, UnusableFile):
        raise
    except FileNotFoundError:
        raise UnusableFile(WHAT, name, "there is no such file", "Mend `key`, or leave it out for the SSH agent's keys") from None
    except OSError as error:
        cure = "Mend its permissions (`chmod 600`, and its owner), or name a key that you may read"
        raise UnusableFile(WHAT, name, error.strerror or str(error), cure) from error
    except Exception as error:
        raise UnusableFile(WHAT, name, f"it is no private key that can be used here ({error})", NAME_ONE) from error
