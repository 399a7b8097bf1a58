"""A hot spare whose script runs again from the top: for another role, or, in its successor, as the rank that it was given.

Standard library only, so that the fork server can use it without torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from holdfast.protocol import Message

_lock = threading.Lock()
_commands: list[Message] = []
_receiver: list[Callable[[Message], None]] = []


class RestartScript(BaseException):
    """Leave the script, whatever it is doing, and run it again with *environment*."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__("this hot spare runs its script again, as the rank it was given")
        self.environment = dict(environment)


def begin() -> None:
    """Store commands from now on, until the script has come far enough again to receive them."""
    with _lock:
        _receiver.clear()


def store(command: Message) -> None:
    """Store a command that arrives while the script runs again, or forward it if there is a receiver."""
    with _lock:
        if not _receiver:
            _commands.append(command)
            return
        (receiver,) = _receiver
    receiver(command)


def take_stored() -> list[Message]:
    """Return the stored commands and forget them."""
    with _lock:
        found = list(_commands)
        _commands.clear()
    return found


def forward_to(receiver: Callable[[Message], None]) -> None:
    """Send *receiver* the stored commands, and later ones."""
    with _lock:
        found = list(_commands)
        _commands.clear()
        _receiver[:] = [receiver]
    for command in found:
        receiver(command)
