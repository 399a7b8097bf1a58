"""Go to every host of a cluster, ask what it has, and have hosts try each other."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Self

from holdfast.bootstrap.hosts import AWAY, OLDEST, source
from holdfast.bootstrap.wheel import node_wheel
from holdfast.cluster.remote import RemoteNodes
from holdfast.cluster.ssh.connection import Connection
from holdfast.cluster.ssh.connector import Connector
from holdfast.cluster.ssh.endpoints import Target
from holdfast.cluster.ssh.interpreter import SshInterpreter
from holdfast.cluster.ssh.transport import SshTransport
from holdfast.errors import NodeError
from holdfast.probe.readers.bundle import sources
from holdfast.probe.readiness.finding import Facts, blind
from holdfast.probe.remote import bundle
from holdfast.probe.remote.bundle import source_of
from holdfast.probe.remote.errors import NoAnswer, NodeUnreachable
from holdfast.probe.remote.program import RemoteProgram
from holdfast.spec import SshCluster, TrainingJob

HANDS: Final = 32
"""Hosts that are looked at at once."""
LOGIN: Final = 20.0
LOOK: Final = 20.0
TORCH: Final = 100.0
"""Seconds that a host may take to let us in, for one look, and to import torch."""
PATIENCE: Final = 3.0
"""Seconds after which one node must see what another has written: network file systems remember folders for a while."""
GRACE: Final = 5.0
"""Seconds beyond those of a look for its answer."""
LINK_SECONDS: Final = 0.1
PINGS: Final = 7
PROBE: Final = "holdfast.probe.readiness.probe"

Tell = Callable[[str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionScope:
    """What a job needs of each node beside what all need."""

    python: str | None = None
    checkpoints: str | None = None
    """Folder that all nodes must see."""
    paths: tuple[str, ...] = ()
    """What must be there."""
    snapshots: bool = False

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        """Return what *job* needs."""
        script = (str(job.inside(job.script)),) if job.script is not None else ()
        paths = (str(job.inside(".")), *script)
        return cls(python=job.python, checkpoints=str(job.checkpoints), paths=paths, snapshots=job.checkpoint.memory.every > 0)


class Inspection:
    """A look at the hosts of one cluster."""

    def __init__(self, cluster: SshCluster, wanted: InspectionScope, tell: Tell = lambda _node, _stage: None) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self._wanted, self._tell = wanted, tell
        self._ways, self._nodes = Connector(cluster), RemoteNodes(cluster, SshTransport(cluster))
        self._programs: dict[str, RemoteProgram] = {}
        """Of each host that let us in."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs.values():
            program.close()
        self._nodes.close()
        self._ways.close()

    def look(self, nodes: Sequence[str]) -> list[Facts]:
        """Return what is found of each of *nodes*, in the cluster's order."""
        targets = [target for target in self._ways.targets if target.node in set(nodes)]
        with ThreadPoolExecutor(max(1, min(HANDS, len(targets))), thread_name_prefix="look") as hands:
            found = list(hands.map(self._one, targets))
            inside = [facts for facts in found if facts.node_proxy is not None and not blind(facts.node_proxy)]
            list(hands.map(self._try_link, inside, [*inside[1:], *inside[:1]]))
            self._try_sharing([facts for facts in found if facts.node in self._programs], hands)
        for facts in found:
            self._tell(facts.node, "looked at")
        return found

    # -- one host -----------------------------------------------------------------------------------------------------

    def _one(self, target: Target) -> Facts:
        facts = Facts(node=target.node)
        self._tell(target.node, "logging in")
        try:
            connection = self._ways.open(target, time.monotonic() + LOGIN)
            with self._ways.watchdog.over(time.monotonic() + LOGIN + 3 * LOOK + TORCH, connection.cut):
                self._ask(facts, target, connection)
        except NoAnswer as error:
            if isinstance(error, NodeUnreachable):
                self._ways.jumps.doubt(target.jump_hosts)
            facts.away, facts.cure = str(error), AWAY if isinstance(error, NodeUnreachable) else ""
        return facts

    def _ask(self, facts: Facts, target: Target, connection: Connection) -> None:
        until = time.monotonic() + LOOK
        program = RemoteProgram(SshInterpreter(connection, target.python, until), probe(), until)
        facts.probe = program.ask(time.monotonic() + LOOK + GRACE, do="facts", seconds=LOOK, directory=target.directory)
        self._programs[facts.node] = program
        with suppress(NoAnswer):
            facts.clock = program.clock_offset(PINGS, LOOK)
        facts.gpus = _asked(program, "gpus")
        facts.paths = _asked(program, "paths", {"paths": list(self._wanted.paths)}) if self._wanted.paths else {}
        self._tell(facts.node, "looking at its environment")
        facts.environment = self._environment(target, connection)
        python = self._wanted.python or _interpreter(facts, target)
        self._tell(facts.node, "importing torch")
        facts.torch = _asked(program, "torch", {"python": python}, seconds=TORCH)
        if facts.environment.get("in_use"):
            facts.node_proxy = self._gate(facts.node)

    def _environment(self, target: Target, connection: Connection) -> dict[str, Any]:
        wheel, until = node_wheel(), time.monotonic() + LOOK
        try:
            program = RemoteProgram(SshInterpreter(connection, target.python, until), source(), until)
            asked = {"digest": wheel.digest, "version": wheel.version, "directory": target.directory, "oldest": OLDEST}
            return program.ask(until, do="look", **asked)
        except NoAnswer as error:
            return {"blind": str(error)}

    def _gate(self, node: str) -> dict[str, Any]:
        try:
            facts = self._nodes.facts(node)
            return {**facts, "interface": self._nodes.interface(node), "address": self._nodes.address(node)}
        except (NodeError, OSError) as error:
            return {"blind": str(error)}

    # -- hosts among themselves ---------------------------------------------------------------------------------------

    def _try_link(self, one: Facts, to: Facts) -> None:
        if one is to:
            return
        self._tell(one.node, f"connecting to {to.node}")
        try:
            one.link = {"to": to.node, "rate": self._nodes.bandwidth(one.node, to.node, LINK_SECONDS)}
        except (NodeError, OSError) as error:
            one.link = {"to": to.node, "address": str((to.node_proxy or {}).get("address")), "why": str(error)}

    def _try_sharing(self, inside: Sequence[Facts], hands: ThreadPoolExecutor) -> None:
        """Have each node make a folder among the checkpoints, then look for that of the first and write there: so do ranks that save."""
        if self._wanted.checkpoints is None or not inside:
            return
        token = secrets.token_hex(8)

        def leave(facts: Facts) -> None:
            asked = {"folder": self._wanted.checkpoints, "name": facts.node, "token": f"{token}-{facts.node}"}
            facts.shared = _asked(self._programs[facts.node], "leave", asked)

        list(hands.map(leave, inside))
        able = [facts for facts in inside if facts.shared is not None and not blind(facts.shared)]
        if not able:
            return
        places = {facts.node: dict(facts.shared or {}) for facts in able}
        first = able[0].node

        def join(facts: Facts) -> None:
            self._tell(facts.node, "writing where the checkpoints are")
            asked = {"by": first, "name": f"{facts.node}.own", "token": f"{token}-{first}", "patience": PATIENCE, **places[first]}
            told = _asked(self._programs[facts.node], "join", asked)
            facts.shared = told if blind(told) else {"by": first, "alone": len(able) == 1, **places[first], **told}

        list(hands.map(join, able))
        list(hands.map(lambda facts: _asked(self._programs[facts.node], "remove", places[facts.node]), able))


def _interpreter(facts: Facts, target: Target) -> str:
    assert facts.probe is not None
    if facts.environment is not None and facts.environment.get("in_use"):
        return f"{facts.environment['path']}/bin/python"
    return str(facts.probe.get("executable", target.python))


def _asked(program: RemoteProgram, verb: str, question: Mapping[str, object] | None = None, *, seconds: float = LOOK) -> dict[str, Any]:
    """Return what a node answers, or why it does not."""
    try:
        return program.ask(time.monotonic() + seconds + GRACE, do=verb, seconds=seconds, **(question or {}))
    except NoAnswer as error:
        return {"blind": str(error)}


@cache
def probe() -> str:
    """Return the source of the program that looks at the node that it runs on."""
    return bundle.program({**sources(), PROBE: source_of(PROBE)}, PROBE)
