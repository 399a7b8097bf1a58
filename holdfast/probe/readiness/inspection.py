"""Inspect every host of a cluster over SSH, and have hosts test the connections and the shared folder between them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Self

from holdfast.bootstrap.hosts import CHECK_SSH, look_question, source
from holdfast.bootstrap.wheel import node_wheel
from holdfast.cluster.remote import RemoteNodes
from holdfast.cluster.ssh.connection import Connection
from holdfast.cluster.ssh.connector import Connector, Target
from holdfast.cluster.ssh.deadlines import cut_at
from holdfast.cluster.ssh.interpreter import SshInterpreter
from holdfast.cluster.ssh.transport import SshTransport
from holdfast.errors import NodeError
from holdfast.probe.readers.local import sources
from holdfast.probe.readiness.findings import Facts, blind
from holdfast.probe.remote import bundle
from holdfast.probe.remote.program import NoAnswer, NodeUnreachable, RemoteProgram
from holdfast.spec import SshCluster, TrainingJob

MAX_THREADS: Final = 32
"""Hosts that are inspected at once."""
LOGIN_SECONDS: Final = 20.0
LOOK_SECONDS: Final = 20.0
TORCH_SECONDS: Final = 100.0
"""Time for a login, for one question, and for importing torch."""
VISIBLE_SECONDS: Final = 3.0
"""Time in which one node must see what another has written: network file systems cache folders for a while."""
GRACE_SECONDS: Final = 5.0
"""Time for an answer beyond that of its question."""
LINK_SECONDS: Final = 0.1
PINGS: Final = 7
PROBE: Final = "holdfast.probe.readiness.probe"

OnStage = Callable[[str, str], None]
"""Called with a node and what is being done there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionScope:
    """What a job needs on each node in addition to what all jobs need."""

    python: str | None = None
    checkpoints: str | None = None
    """Folder that all nodes must share."""
    paths: tuple[str, ...] = ()
    """Files and folders that must exist."""
    snapshots: bool = False

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        """Return what *job* needs."""
        script = (str(job.inside(job.script)),) if job.script is not None else ()
        paths = (str(job.inside(".")), *script)
        return cls(python=job.python, checkpoints=str(job.checkpoints), paths=paths, snapshots=job.checkpoint.memory.interval > 0)


class Inspection:
    """An inspection of the hosts of one cluster."""

    def __init__(self, cluster: SshCluster, wanted: InspectionScope, on_stage: OnStage = lambda _node, _stage: None) -> None:
        """Raise `OperatorError` when a key or the known_hosts file that the user names cannot be used."""
        self._wanted, self._on_stage = wanted, on_stage
        self._connector, self._nodes = Connector(cluster), RemoteNodes(cluster, SshTransport(cluster))
        self._programs: dict[str, RemoteProgram] = {}
        """Of each host that let us log in."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs.values():
            program.close()
        self._nodes.close()
        self._connector.close()

    def look(self, nodes: Sequence[str]) -> list[Facts]:
        """Return the facts about each of *nodes*, in the cluster's order."""
        targets = [target for target in self._connector.targets if target.node in set(nodes)]
        with ThreadPoolExecutor(max(1, min(MAX_THREADS, len(targets))), thread_name_prefix="look") as pool:
            found = list(pool.map(self._inspect, targets))
            reached = [facts for facts in found if facts.node_proxy is not None and not blind(facts.node_proxy)]
            list(pool.map(self._test_link, reached, [*reached[1:], *reached[:1]]))
            self._test_shared_folder([facts for facts in found if facts.node in self._programs], pool)
        for facts in found:
            self._on_stage(facts.node, "inspected")
        return found

    # -- one host -----------------------------------------------------------------------------------------------------

    def _inspect(self, target: Target) -> Facts:
        facts = Facts(node=target.node)
        self._on_stage(target.node, "logging in")
        try:
            connection = self._connector.open(target, time.monotonic() + LOGIN_SECONDS)
            until = time.monotonic() + LOGIN_SECONDS + 3 * LOOK_SECONDS + TORCH_SECONDS
            with cut_at(until, connection.cut):
                self._collect(facts, target, connection)
        except NoAnswer as error:
            if isinstance(error, NodeUnreachable):
                self._connector.jumps.suspect(target.jump_hosts)
            facts.unreachable, facts.cure = str(error), CHECK_SSH if isinstance(error, NodeUnreachable) else ""
        return facts

    def _collect(self, facts: Facts, target: Target, connection: Connection) -> None:
        until = time.monotonic() + LOOK_SECONDS
        program = RemoteProgram(SshInterpreter(connection, target.python, until), probe(), until)
        late = time.monotonic() + LOOK_SECONDS + GRACE_SECONDS
        facts.probe = program.ask(late, do="facts", seconds=LOOK_SECONDS, directory=target.directory)
        self._programs[facts.node] = program
        with suppress(NoAnswer):
            facts.clock = program.clock_offset(PINGS, LOOK_SECONDS)
        facts.gpus = _ask(program, "gpus")
        facts.paths = _ask(program, "paths", {"paths": list(self._wanted.paths)}) if self._wanted.paths else {}
        self._on_stage(facts.node, "reading its environment")
        until = time.monotonic() + LOOK_SECONDS
        try:
            installer = RemoteProgram(SshInterpreter(connection, target.python, until), source(), until)
            facts.environment = installer.ask(until, **look_question(node_wheel(), target.directory))
        except NoAnswer as error:
            facts.environment = {"blind": str(error)}
        has_environment = facts.environment.get("in_use")
        own = f"{facts.environment['path']}/bin/python" if has_environment else str(facts.probe.get("executable", target.python))
        self._on_stage(facts.node, "importing torch")
        facts.torch = _ask(program, "torch", {"python": self._wanted.python or own}, seconds=TORCH_SECONDS)
        if has_environment:
            try:
                node, nodes = facts.node, self._nodes
                facts.node_proxy = {**nodes.facts(node), "interface": nodes.interface(node), "address": nodes.address(node)}
            except (NodeError, OSError) as error:
                facts.node_proxy = {"blind": str(error)}

    # -- between hosts ------------------------------------------------------------------------------------------------

    def _test_link(self, one: Facts, to: Facts) -> None:
        if one is to:
            return
        self._on_stage(one.node, f"connecting to {to.node}")
        try:
            one.link = {"to": to.node, "rate": self._nodes.bandwidth(one.node, to.node, LINK_SECONDS)}
        except (NodeError, OSError) as error:
            one.link = {"to": to.node, "address": str((to.node_proxy or {}).get("address")), "why": str(error)}

    def _test_shared_folder(self, facts: Sequence[Facts], pool: ThreadPoolExecutor) -> None:
        """Have each node make a folder among the checkpoints, then find that of the first and write there, as ranks do in a save."""
        if self._wanted.checkpoints is None or not facts:
            return
        token = secrets.token_hex(8)

        def leave(one: Facts) -> None:
            question = {"folder": self._wanted.checkpoints, "name": one.node, "token": f"{token}-{one.node}"}
            one.shared = _ask(self._programs[one.node], "leave", question)

        list(pool.map(leave, facts))
        able = [one for one in facts if one.shared is not None and not blind(one.shared)]
        if not able:
            return
        places = {one.node: dict(one.shared or {}) for one in able}
        first = able[0].node

        def join(one: Facts) -> None:
            self._on_stage(one.node, "writing to the checkpoint folder")
            question = {"by": first, "name": f"{one.node}.own", "token": f"{token}-{first}", "patience": VISIBLE_SECONDS, **places[first]}
            answer = _ask(self._programs[one.node], "join", question)
            one.shared = answer if blind(answer) else {"by": first, "alone": len(able) == 1, **places[first], **answer}

        list(pool.map(join, able))
        list(pool.map(lambda one: _ask(self._programs[one.node], "remove", places[one.node]), able))


def _ask(
    program: RemoteProgram, name: str, question: Mapping[str, object] | None = None, *, seconds: float = LOOK_SECONDS
) -> dict[str, Any]:
    """Return a node's answer, or why there is none."""
    try:
        return program.ask(time.monotonic() + seconds + GRACE_SECONDS, do=name, seconds=seconds, **(question or {}))
    except NoAnswer as error:
        return {"blind": str(error)}


@cache
def probe() -> str:
    """Return the source of the program that examines its node."""
    return bundle.program({**sources(), PROBE: bundle.source_of(PROBE)}, PROBE)
