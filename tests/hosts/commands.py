"""The programs that make and break networks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence


def run(words: Sequence[str], text: str = "") -> str:
    """Run a program; return what it says, and raise ``RuntimeError`` with what it complained of."""
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode} {text}")
    return done.stdout


def ip(lines: Iterable[str], within: str = "") -> None:
    """Have `ip` do all of *lines*, in a network namespace."""
    run(["ip", *(["-n", within] if within else []), "-batch", "-"], "\n".join(lines) + "\n")


def inside(namespace: str, *words: str) -> str:
    """Run a program in a network namespace, and in nothing else of it."""
    return run(["nsenter", f"--net=/run/netns/{namespace}", *words])


def missing() -> str:
    """Return why there can be no hosts here, or nothing."""
    needed = ["ip", "tc", "ss", "iptables", "nsenter", "unshare", "mount"]
    if lacking := [name for name in needed if shutil.which(name) is None]:
        return f"needs {', '.join(lacking)} (scripts/system_packages.sh)"
    tried = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--mount-proc", "ip", "link", "add", "type", "veth"]
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    return f"needs network namespaces (root): {done.stderr.strip()}" if done.returncode else ""
