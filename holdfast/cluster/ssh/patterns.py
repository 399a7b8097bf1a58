"""Patterns of host names, as sshd's manual has them for known_hosts.

Those of paramiko's `SSHConfig` are no base for this: they are private, and take `[`, which begins names with a port, for a set of letters.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether one of *patterns* matches *name*, and none that begins with `!` does."""
    if any(_fits(name, pattern[1:]) for pattern in patterns if pattern.startswith("!")):
        return False
    return any(_fits(name, pattern) for pattern in patterns if not pattern.startswith("!"))


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))
