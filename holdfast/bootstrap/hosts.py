"""Install Holdfast on many hosts at once: log in, look what is installed, and send what is missing."""

from __future__ import annotations

import base64
import errno
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Self

from holdfast.bootstrap.wheel import NodeWheel
from holdfast.cluster.ssh.connector import Connector, Target
from holdfast.cluster.ssh.deadlines import cut_at
from holdfast.cluster.ssh.interpreter import SshInterpreter
from holdfast.probe.remote import bundle
from holdfast.probe.remote.program import NoAnswer, NodeUnreachable, RemoteProgram
from holdfast.spec import SshCluster

MAX_THREADS: Final = 32
"""Hosts that are set up at once. Each is sent half a megabyte."""
LOGIN_SECONDS: Final = 20.0
"""Time for a login and a first look."""
INSTALL_SECONDS: Final = 180.0
"""Time for a host to make an environment, on a disk that others share."""
OLDEST: Final = (3, 11)
"""The Python that agents need."""
IMPORT: Final = "holdfast.agent.node.proxy"
"""The module that a new environment must be able to import."""
_PERMISSIONS: Final = "Fix its permissions, or name another folder in `directory`"
_SPACE: Final = "Free some there, or name another folder in `directory`"
_MOVE: Final = "Move it away, or name another folder in `directory`"
CURES: Final = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.EROFS: "Mount it for writing, or name another folder in `directory`",
    errno.ENOTDIR: "Move the file away, or name another folder in `directory`",
    errno.EEXIST: _MOVE,
    errno.EISDIR: _MOVE,
    errno.EBUSY: "Run this again when they are done",
    errno.ENOLCK: "Mount its file system with locks, or name a folder on a disk of the node's own in `directory`",
}
OTHER_CURE: Final = "Fix that there, or name another folder in `directory`"
CHECK_SSH: Final = "Check that it is on, and that its SSH server can be reached from here"
INSTALLER: Final = "holdfast.bootstrap.installer"
OLDEST_FOR_INSTALLER: Final = (3, 7)
"""The Python in which the installer can report that the interpreter is too old."""
REFUSAL: Final = "its interpreter is Python %d.%d, jobs need 3.11 or newer"
NEWER_PYTHON: Final = "Name a newer one in `python` of the cluster file"

OnStage = Callable[[str, str], None]
"""Called with a node and what is being done there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOutcome:
    """The result for one host."""

    node: str
    done: str
    """`kept`, `installed`, `repaired` or `failed`."""
    python: str = ""
    path: str = ""
    why: str = ""
    cure: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Return whether Holdfast is not usable there."""
        return self.done == "failed"


class Hosts:
    """The hosts of a cluster, on which one wheel is to be installed."""

    def __init__(self, cluster: SshCluster, wheel: NodeWheel) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self._wheel, self._connector = wheel, Connector(cluster)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connector.close()

    def set_up(self, nodes: Collection[str], on_stage: OnStage = lambda _node, _stage: None) -> list[HostOutcome]:
        """Install on *nodes*, many at once; return the result of each, in the cluster's order."""
        targets = [target for target in self._connector.targets if target.node in nodes]
        with ThreadPoolExecutor(max(1, min(MAX_THREADS, len(targets))), thread_name_prefix="bootstrap") as pool:
            return list(pool.map(lambda target: self._set_up(target, on_stage), targets))

    def _set_up(self, target: Target, on_stage: OnStage) -> HostOutcome:
        begun, node = time.monotonic(), target.node
        try:
            on_stage(node, "logging in")
            found = self._install(target, on_stage)
        except NoAnswer as error:
            if isinstance(error, NodeUnreachable):
                self._connector.jumps.suspect(target.jump_hosts)
            found = {"failed": str(error), "cure": CHECK_SSH if isinstance(error, NodeUnreachable) else ""}
        cure = CURES.get(found["errno"], OTHER_CURE) if found.get("errno") else str(found.get("cure", ""))
        outcome = HostOutcome(
            node=node,
            done="failed" if "failed" in found else str(found.get("done")),
            python=str(found.get("python", "")),
            path="" if "failed" in found else str(found.get("path", "")),
            why=str(found.get("failed", "")),
            cure=cure if "failed" in found else "",
            seconds=time.monotonic() - begun,
        )
        on_stage(node, outcome.done)
        return outcome

    def _install(self, target: Target, on_stage: OnStage) -> dict[str, Any]:
        connection = self._connector.open(target, time.monotonic() + LOGIN_SECONDS)
        try:
            with cut_at(time.monotonic() + LOGIN_SECONDS + INSTALL_SECONDS, connection.cut):
                until = time.monotonic() + LOGIN_SECONDS
                program = RemoteProgram(SshInterpreter(connection, target.python, until), source(), until)
                question = look_question(self._wheel, target.directory)
                on_stage(target.node, "looking")
                found = program.ask(until, **question)
                if found.get("complete"):
                    return {**found, "done": "kept"}
                if "failed" in found:
                    return {"cure": NEWER_PYTHON, **found}
                on_stage(target.node, "installing")
                wheel = base64.b64encode(self._wheel.data).decode()
                more = {"do": "install", "seconds": INSTALL_SECONDS / 2, "import": IMPORT, "wheel": wheel}
                return program.ask(time.monotonic() + INSTALL_SECONDS, **{**question, **more})
        finally:
            connection.cut()


def look_question(wheel: NodeWheel, directory: str) -> dict[str, Any]:
    """Return the question whether *wheel* is installed in *directory*."""
    return {"do": "look", "digest": wheel.digest, "version": wheel.version, "directory": directory, "oldest": OLDEST}


@cache
def source() -> str:
    """Return the source of the program that installs Holdfast on its node."""
    return bundle.program({INSTALLER: bundle.source_of(INSTALLER)}, INSTALLER, oldest=OLDEST_FOR_INSTALLER, refusal=REFUSAL)
