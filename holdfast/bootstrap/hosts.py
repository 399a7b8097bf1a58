"""Set up many hosts at once: log in, look what is there, and bring what is missing."""

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
from holdfast.cluster.ssh.connector import Connector
from holdfast.cluster.ssh.endpoints import Target
from holdfast.cluster.ssh.interpreter import SshInterpreter
from holdfast.probe.remote import bundle
from holdfast.probe.remote.bundle import source_of
from holdfast.probe.remote.errors import NoAnswer, NodeUnreachable
from holdfast.probe.remote.program import RemoteProgram
from holdfast.spec import SshCluster

HANDS: Final = 32
"""Hosts that are set up at once. Each is sent half a megabyte."""
LOGIN: Final = 20.0
"""Seconds that a login and a first look may take."""
WORK: Final = 180.0
"""Seconds that a host may take to make an environment, on a disk that others share."""
OLDEST: Final = (3, 11)
"""What agents need."""
PROOF: Final = "holdfast.agent.node.proxy"
CURES: Final = {
    errno.ENOSPC: "Free some there, or name another folder in `directory`",
    errno.EDQUOT: "Free some there, or name another folder in `directory`",
    errno.EACCES: "Mend its permissions, or name another folder in `directory`",
    errno.EPERM: "Mend its permissions, or name another folder in `directory`",
    errno.EROFS: "Mount it for writing, or name another folder in `directory`",
    errno.ENOTDIR: "Move the file away, or name another folder in `directory`",
    errno.EEXIST: "Move it away, or name another folder in `directory`",
    errno.EISDIR: "Move it away, or name another folder in `directory`",
    errno.EBUSY: "Run this again when they are done",
    errno.ENOLCK: "Mount its file system with locks, or name a folder on a disk of the node's own in `directory`",
}
ELSE: Final = "Mend that there, or name another folder in `directory`"
AWAY: Final = "See that it is on, and that its SSH server can be reached from here"
INSTALLER: Final = "holdfast.bootstrap.installer"
GRAMMAR: Final = (3, 7)
"""What the installer needs to say itself that the interpreter is too old."""
REFUSAL: Final = "its interpreter is Python %d.%d, jobs need 3.11 or newer"
PYTHON: Final = "Name a newer one in `python` of the cluster file"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOutcome:
    """What came of one host."""

    node: str
    done: str
    """`kept`, `installed`, `mended` or `failed`."""
    python: str = ""
    path: str = ""
    why: str = ""
    cure: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Tell whether the host is not as it should be."""
        return self.done == "failed"


class Hosts:
    """The hosts of a cluster, to be set up."""

    def __init__(self, cluster: SshCluster, wheel: NodeWheel) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self._wheel, self._ways = wheel, Connector(cluster)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ways.close()

    def set_up(self, nodes: Collection[str], tell: Callable[[str, str], None] = lambda _node, _stage: None) -> list[HostOutcome]:
        """Set up *nodes*, many at once, and return what came of each, in the cluster's order; *tell* is told of each stage of each."""
        targets = [target for target in self._ways.targets if target.node in nodes]
        with ThreadPoolExecutor(max(1, min(HANDS, len(targets))), thread_name_prefix="bootstrap") as hands:
            return list(hands.map(lambda target: self._one(target, tell), targets))

    def _one(self, target: Target, tell: Callable[[str, str], None]) -> HostOutcome:
        begun = time.monotonic()
        try:
            tell(target.node, "logging in")
            found = self._attempt(target, tell)
        except NoAnswer as error:
            if isinstance(error, NodeUnreachable):
                self._ways.jumps.doubt(target.jump_hosts)
            found = {"failed": str(error), "cure": AWAY if isinstance(error, NodeUnreachable) else ""}
        outcome = _outcome(target.node, found, time.monotonic() - begun)
        tell(target.node, outcome.done)
        return outcome

    def _attempt(self, target: Target, tell: Callable[[str, str], None]) -> dict[str, Any]:
        connection = self._ways.open(target, time.monotonic() + LOGIN)
        try:
            with self._ways.watchdog.over(time.monotonic() + LOGIN + WORK, connection.cut):
                until = time.monotonic() + LOGIN
                program = RemoteProgram(SshInterpreter(connection, target.python, until), source(), until)
                asked = {
                    "digest": self._wheel.digest,
                    "version": self._wheel.version,
                    "directory": target.directory,
                    "oldest": OLDEST,
                }
                tell(target.node, "looking")
                found = program.ask(until, do="look", **asked)
                if found.get("whole"):
                    return {**found, "done": "kept"}
                if "failed" in found:
                    return {"cure": PYTHON, **found}
                tell(target.node, "installing")
                wheel = base64.b64encode(self._wheel.data).decode()
                return program.ask(time.monotonic() + WORK, do="install", seconds=WORK / 2, proof=PROOF, wheel=wheel, **asked)
        finally:
            connection.cut()


@cache
def source() -> str:
    """Return the source of the program that sets up the node that it runs on."""
    return bundle.program({INSTALLER: source_of(INSTALLER)}, INSTALLER, oldest=GRAMMAR, refusal=REFUSAL)


def _outcome(node: str, found: dict[str, Any], seconds: float) -> HostOutcome:
    python, path = str(found.get("python", "")), str(found.get("path", ""))
    if "failed" not in found:
        return HostOutcome(node=node, done=str(found.get("done")), python=python, path=path, seconds=seconds)
    cure = CURES.get(found["errno"], ELSE) if found.get("errno") else str(found.get("cure", ""))
    return HostOutcome(node=node, done="failed", python=python, why=str(found["failed"]), cure=cure, seconds=seconds)
