"""Who sits at the keyboard."""

from __future__ import annotations

import getpass
import platform


def signature() -> str:
    """Return who acts: the user's name and the host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = "someone"
    return f"{user}@{platform.node()}"
