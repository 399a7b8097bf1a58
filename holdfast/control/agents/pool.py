"""The agents of one job's nodes: start and reattach them, send commands in parallel, watch their connections, fence nodes."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from holdfast.agent.node.epochs import FencingToken
from holdfast.cluster import NodeBackend
from holdfast.control.agents.client import AgentClient, Broadcast
from holdfast.control.agents.connectivity import ReconnectAttempts
from holdfast.control.agents.reactor import REACTOR, EventQueue
from holdfast.errors import (
    AgentDisconnected,
    CommandRejected,
    LeaseLost,
    LeaseUnconfirmed,
    NodeError,
    NodeLost,
    ProtocolMismatch,
    Superseded,
    WorldError,
)
from holdfast.host.process import boot_time
from holdfast.log import note
from holdfast.protocol import HEARTBEAT_INTERVAL, Message

log = logging.getLogger("holdfast.control")

REPLAYED: Final = 500
"""Events before the current generation that a reattaching controller receives again: the last one may not have written their rows."""
THREADS: Final = 32
"""Threads that talk to nodes at once: more only compete for the interpreter lock."""
LATE_ANSWER: Final = 3.0
"""Seconds without any answer after which reattaching no longer waits for the remaining agents: a dead host is silent for ten, and it may
be the one that the last controller ran on."""
STALE: Final = 4
"""Heartbeats of silence after which the node is tried by a new connection: on a cut network the old one may never report its end."""
REPLY_SECONDS: Final = 1.0
"""How long an agent may take to send anything over a new connection."""
QUIET: Final = 0.5
"""Seconds after which a silent agent is pinged."""
RENEWALS: Final = 10
"""Pings to each agent within the time of its lease, at least."""
MAX_PING_INTERVAL: Final = 60.0
"""Seconds between two pings to an agent, at most."""
SUSPENDED: Final = 1.0
"""Seconds between two checks for silence, usually 0.1 s apart, after which this process itself was suspended."""
WITNESSES: Final = 3
"""Agents that are asked which controller is the newest before an action that no agent could refuse."""
WITNESS_SECONDS: Final = 2.5
"""How long the answer of one of them holds: as long as a controller trusts a lease that it has renewed."""
CONFIRM_SECONDS: Final = 5.0
"""How long to wait for the lease to be renewed, or an agent to answer, before such an action is given up."""
MAX_LEASE: Final = 3600.0
"""Seconds, where no other controller could hold the lease."""
MAX_EPOCH: Final = 2**30
"""No job changes controllers so often: an honest agent reports no greater epoch."""
OTHERS: Final = ""
"""Stands for every part of the cluster that has nothing to do with the job."""

T = TypeVar("T")


def _result_or_error(act: Callable[[str], T], node: str) -> T | WorldError:
    try:
        return act(node)
    except LeaseLost:  # not an error of the node: it ends this controller
        raise
    except WorldError as error:
        return error


class AgentPool:
    """The agents of a job's nodes."""

    def __init__(self, source: NodeBackend, plan: dict[str, Any], *, epoch: int) -> None:
        self.source, self.plan, self.epoch = source, plan, epoch
        self._job = str(plan.get("name", plan["job"]))
        self.event_queue = EventQueue()
        self.clients: dict[str, AgentClient] = {}
        self.without_agent: dict[str, str] = {}
        """Nodes that should have an agent of this job and had none when last checked, and why."""
        self.unseen: dict[str, float] = {}
        """Nodes that should have an agent of this job and have not answered yet, and since when they are waited for (monotonic)."""
        self._late: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
        self.memory: dict[str, tuple[str, int]] = {}
        """Node to host and port of its memory store."""
        self.leaving: set[str] = set()
        """Nodes with a preemption notice: they will be lost soon."""
        self.lease_until: Callable[[], float] = lambda: boot_time() + MAX_LEASE
        """Returns until when no other controller can take the job, by the history (seconds since boot)."""
        self.raise_epoch: Callable[[int], int] = self._lease_lost
        """Raises this controller's epoch in the history above that which agents remember; raises `LeaseLost` if another one has the job."""
        self.check_node: Callable[[str], None] = lambda _node: None
        """Raises a `NodeError` for a node with which the job can do nothing, before it is prepared."""
        self._newer = 0
        self._witnessed = -WITNESS_SECONDS
        """When an agent last confirmed this controller as the newest (seconds since boot)."""
        self._epoch_lock = threading.Lock()
        self._ours: set[str] = set()
        """Ids of the agents that have accepted commands of this controller."""
        self._silence_checked = self._awake_since = 0.0
        """When silence was last checked, and since when it has been checked without a gap (monotonic)."""
        self._starting: set[str] = set()
        """Nodes on which an agent may have been started that has no client here (yet)."""
        self._coming: set[str] = set()
        """Nodes that are being brought up now."""
        self.uncleaned: set[str] = set()
        """Nodes that the job has dropped without being able to end what it had started there."""
        self.unusable_nodes: dict[str, str] = {}
        """Nodes that the job could not use when free ones were last looked for, and why."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="agents")
        self._attempts = ReconnectAttempts(self._threads, source.is_reachable)
        self._closed = False

    def each(self, nodes: Iterable[str], act: Callable[[str], T]) -> dict[str, T | WorldError]:
        """Run *act* on all *nodes* in parallel; a `WorldError` is returned in place of the result."""
        nodes = list(nodes)
        if len(nodes) == 1:
            return {nodes[0]: _result_or_error(act, nodes[0])}
        return dict(zip(nodes, self._threads.map(partial(_result_or_error, act), nodes), strict=True))

    @property
    def beat(self) -> float:
        """Return the seconds between two heartbeats of an agent with workers."""
        return float(self.plan.get("beat", HEARTBEAT_INTERVAL))

    # -- start and reattach -------------------------------------------------------------------------------------------

    def bring_up(self, node: str) -> AgentClient:
        """Return a client of an agent on *node* that is attached and prepared for this job; raise a `WorldError` when that fails."""
        self._coming.add(node)
        try:
            return self._bring_up(node)
        finally:
            self._coming.discard(node)

    def _bring_up(self, node: str) -> AgentClient:
        client = self._connect(node)
        if client is None:
            self._check_open(node)
            self._with_epoch(node, lambda: self.source.start_agent(node, lambda: self._start_token(node)))
            client = self._new_client(node)
        try:
            client.attach()
            self._check_open(node)
            self.check_node(node)
            answer = client.send_command("prepare", **self._prepare_fields(node))
        except WorldError:
            client.close()
            raise
        self.clients[node] = client
        self._ours.add(str(client.agent))
        self._starting.discard(node)
        self._attempts.forget(node)
        self.without_agent.pop(node, None)
        self._note_memory(node, answer)
        return client

    def _new_client(self, node: str) -> AgentClient:
        client = AgentClient(node, lambda: self.source.connect(node), self.event_queue, epoch=self.epoch, job=self.plan["job"])
        client.gap = STALE * self.beat
        return client

    def _connect(self, node: str) -> AgentClient | None:
        try:
            return self._new_client(node)
        except AgentDisconnected:
            return None

    def _start_token(self, node: str) -> FencingToken:
        """Return the token for starting an agent on *node*; from now on there may be one."""
        token = self.confirm(node)
        self._starting.add(node)
        return token

    def _check_open(self, node: str) -> None:
        """Raise `AgentDisconnected` once the pool is closed: a thread that is still at work must not disturb the next controller."""
        if self._closed:
            raise AgentDisconnected(node, "this controller has closed its connections")

    def _prepare_fields(self, node: str) -> dict[str, Any]:
        memory, own = self.plan.get("memory"), self.source.node_settings(node, self._job)
        plan = {**self.plan, **own, "environment": {**own.get("environment", {}), **self.plan["environment"]}}
        if self.plan["python"]:  # the job names one
            plan["python"] = self.plan["python"]
        return {**plan, "memory": None if memory is None else {**memory, "address": self.source.address(node)}}

    def _note_memory(self, node: str, answer: Message) -> None:
        """Remember where other nodes reach the memory store of *node*."""
        port = (answer.get("memory") or {}).get("port")
        self.memory.pop(node, None)
        if port is not None:
            self.memory[node] = (self.source.address(node), int(port))

    def reattach(self, node: str) -> Message:
        """Attach to an agent that runs already, and have it replay the events of its generation; return its answer to ``about``."""
        client = self._connect(node)
        if client is None:
            raise AgentDisconnected(node, "no agent listens")
        try:
            answer = client.about()
            if answer["job"] != self.plan["job"]:
                raise CommandRejected(node, "its agent does not run this job", "attach")
            if answer["epoch"] >= self.epoch and answer["agent"] not in self._ours:  # an equal one may be another controller's
                self._rise_above(node, answer["epoch"])
            client.epoch = self.epoch
            client.attach(since=max(0, answer["since"] - REPLAYED))
        except WorldError:
            client.close()
            raise
        with self._epoch_lock:
            client.epoch = self.epoch
            self.clients[node] = client
            self._ours.add(answer["agent"])
        self.unseen.pop(node, None)
        self._note_memory(node, answer)
        return answer

    def reattach_all(self, nodes: Iterable[str]) -> dict[str, Message | WorldError]:
        """Reattach to the agents of all *nodes* at once; return their answers to ``about``, or why there is none.

        Once some have answered and no other has for `LATE_ANSWER` seconds, the rest is not waited for: the job needs its controller.
        `newly_reachable` reports those that answer later.
        """
        start = time.monotonic()
        pending = {self._threads.submit(_result_or_error, self.reattach, node): node for node in nodes}
        answers: dict[str, Message | WorldError] = {}
        while pending:
            done, _ = wait(pending, timeout=LATE_ANSWER if answers else None, return_when=FIRST_COMPLETED)
            for one in done:
                answers[pending.pop(one)] = one.result()
            if not done:
                break
        for one, node in pending.items():
            answers[node] = NodeLost(node, f"no answer within {time.monotonic() - start:.0f} s")
            self._attempts.note_pending(node, one, start)
            one.add_done_callback(partial(self._answered_late, node))
        return answers

    def _answered_late(self, node: str, future: Future[Message | WorldError]) -> None:
        if not future.cancelled() and future.exception() is None and not isinstance(answer := future.result(), WorldError):
            self._late.put((node, answer))

    def wait_for(self, node: str) -> None:
        """Reattach to the agent of *node* as soon as it can be reached: that this host cannot says nothing about its ranks."""
        if node not in self.clients:
            self.unseen.setdefault(node, time.monotonic())

    def newly_reachable(self) -> Iterator[tuple[str, Message]]:
        """Yield the nodes whose agents were reached since the last call, with their answers to ``about``."""
        with suppress(queue.Empty):
            while True:
                yield self._late.get_nowait()

    def _reattach_late(self, node: str) -> None:
        start = time.monotonic()
        try:
            self._late.put((node, self.reattach(node)))
        except (NodeLost, ProtocolMismatch):
            self._attempts.note_result(node, start, answered=False)
        except NodeError as error:
            self.without_agent[node] = str(error)
            self.unseen.pop(node, None)

    # -- drop and fence -----------------------------------------------------------------------------------------------

    def drop(self, node: str) -> None:
        """Drop a node: end its agent, and kill what it had started."""
        self._remove(node)()

    def drop_async(self, node: str) -> None:
        """Drop a node in another thread."""
        self._threads.submit(self._remove(node))

    def _remove(self, node: str) -> Callable[[], None]:
        """Remove a node from the pool; return what ends everything of the job on it."""
        client = self.clients.pop(node, None)
        self.without_agent.pop(node, None)
        self.unseen.pop(node, None)
        self.memory.pop(node, None)
        return lambda: self._end_agent(node, client)

    def _end_agent(self, node: str, client: AgentClient | None) -> None:
        complete = False
        if client is not None:
            try:
                with suppress(NodeError):
                    asked = boot_time()
                    client.send_command("end", seconds=2.0)
                    complete, self._witnessed = True, asked
            finally:
                self._newer = max(self._newer, client.superseded)
                client.close()
        self.clear(node, replay=not complete)

    def clear(self, node: str, *, replay: bool = True) -> None:
        """Kill what the job runs on *node* and wipe what it keeps in memory there: now, or as soon as the node can be reached.

        With *replay*, the events that its agent may not have delivered are put into the event queue.
        """
        if self._attempts.failed(node):  # a moment ago: do not wait for that again
            self.uncleaned.add(node)
        else:
            self._clean(node, replay=replay)

    def _clean(self, node: str, *, replay: bool = True) -> None:
        try:
            self.fence(node)
            if replay:
                self._replay(node)
            self.wipe(node)
        except NodeError as error:
            if node not in self.uncleaned:
                note(log, "node.not-fenced", node=node, why=error)
            self.uncleaned.add(node)
        else:
            self.uncleaned.discard(node)
            self._attempts.forget(node)

    def _replay(self, node: str) -> None:
        try:
            events = self.source.recent_events(node, self.plan["job"])
        except OSError as error:
            note(log, "replay.failed", node=node, why=error)
            return
        if events:
            self.event_queue.put((node, {"event": "replay", "events": events}))

    def fence(self, node: str) -> None:
        """Make sure that nothing of the job runs on *node*; raise a `NodeError` when it cannot be reached."""
        killed = self._with_epoch(node, lambda: self.source.fence(node, self.plan["job"], lambda: self.confirm(node)))
        if killed:
            note(log, "node.fenced", node=node, killed=len(killed))

    def wipe(self, node: str) -> None:
        """Remove what the job keeps in the memory of *node*; raise a `NodeError` when it cannot be reached."""
        self._with_epoch(node, lambda: self.source.wipe_memory(node, self.plan["job"], lambda: self.confirm(node)))

    # -- epochs -------------------------------------------------------------------------------------------------------

    def _with_epoch(self, node: str, act: Callable[[], T]) -> T:
        """Run *act*; if *node* refuses it for an epoch that the history does not know, raise the epoch and run it again."""
        try:
            return act()
        except Superseded as error:
            self._rise_above(node, error.epoch)
            return act()

    def _rise_above(self, node: str, epoch: int) -> None:
        """Raise this controller's epoch above that which *node* remembers: a restored backup of the history may be older.

        Raise `LeaseLost` where the history says that another controller has the job.
        """
        if epoch > MAX_EPOCH:
            raise CommandRejected(node, f"it reports epoch {epoch}, more than any job reaches", "attach")
        note(log, "node.superseded", level=logging.WARNING, node=node, epoch=epoch, ours=self.epoch)
        with self._epoch_lock:
            if epoch >= self.epoch:
                try:
                    self.epoch = self.raise_epoch(epoch)
                except LeaseLost as error:
                    self._newer = max(self._newer, epoch)
                    raise LeaseLost(self._job, error.holder) from error
                for client in self.clients.copy().values():
                    client.epoch = self.epoch

    def _lease_lost(self, epoch: int) -> int:
        raise LeaseLost(self._job, f"a newer controller (epoch {epoch})")

    @property
    def superseded_by(self) -> int:
        """Return the epoch of a newer controller that an agent has reported; 0 while there is none."""
        self._newer = max([self._newer, *(client.superseded for client in self.clients.copy().values())])
        return self._newer

    def check_superseded(self) -> None:
        """Raise `LeaseLost` if an agent has reported a newer controller."""
        if newer := self.superseded_by:
            self._lease_lost(newer)

    def confirm(self, node: str) -> FencingToken:
        """Return the token for an action on *node* that its agent could not refuse, with the time by which it has to begin.

        A controller that cannot renew its lease does not know whether another one has the job by now. Then some agents are asked, as a
        newer controller begins with them. Raise `LeaseLost` if there is one, `LeaseUnconfirmed` when nobody could say for
        `CONFIRM_SECONDS`.
        """
        start = boot_time()
        while (until := max(self.lease_until(), self._witnessed + WITNESS_SECONDS)) <= boot_time():
            alive = [client for client in self.clients.copy().values() if not (client.lost_reason or client.is_unreachable)]
            for client in alive[:WITNESSES]:
                asked = boot_time()
                with suppress(NodeError):  # an agent refuses every command that is not of the newest controller
                    client.send_command("ping", seconds=1.0)
                    self._witnessed = asked
            self.check_superseded()
            if self._witnessed + WITNESS_SECONDS > boot_time():
                continue
            if boot_time() - start > CONFIRM_SECONDS:
                raise LeaseUnconfirmed(node, "the lease of the job could not be renewed in time, and no agent confirms this controller")
            time.sleep(0.1)
        self.check_superseded()
        return FencingToken(job=self.plan["job"], epoch=self.epoch, until=until)

    # -- commands -----------------------------------------------------------------------------------------------------

    def send_command(
        self, nodes: Iterable[str], command: str, *, seconds: float = 10.0, **facts: object
    ) -> dict[str, Message | WorldError]:
        """Send the same command to all *nodes*, then wait for the answers together."""
        return self.send_commands(dict.fromkeys(nodes, facts), command, seconds=seconds)

    def send_commands(
        self, by_node: Mapping[str, Mapping[str, object]], command: str, *, seconds: float = 10.0
    ) -> dict[str, Message | WorldError]:
        """Send each node the command with its own facts, then wait for the answers together.

        One thread sends to all agents that read, as switching threads costs more than sending; slow readers are served by other threads.
        """
        broadcast = Broadcast(command, seconds, len(by_node))
        for node, facts in by_node.items():
            client = self.clients.get(node)
            if client is None:
                broadcast.note_answer(node, AgentDisconnected(node, "it has no agent"))
            elif client.is_writable():
                broadcast.send(client, facts)
            else:
                self._threads.submit(broadcast.send, client, facts)
        answers = broadcast.wait(by_node)
        self.check_superseded()
        return answers

    def send_commands_async(self, by_node: Mapping[str, Mapping[str, object]], command: str) -> None:
        """Send each node the command with its own facts in another thread; the answers are dropped."""
        self._threads.submit(self.send_commands, by_node, command)

    def send_command_async(self, node: str, command: str, **facts: object) -> Future[Message]:
        """Send a command to one node in another thread; return the future of its answer."""
        return self._threads.submit(lambda: self.client(node).send_command(command, seconds=10.0, **facts))

    def client(self, node: str) -> AgentClient:
        """Return the client of *node*; raise `AgentDisconnected` when there is none."""
        try:
            return self.clients[node]
        except KeyError:
            raise AgentDisconnected(node, "it has no agent") from None

    def agent(self, node: str) -> AgentClient | None:
        """Return the client of *node* if its agent is not lost; another agent on the node has another client."""
        client = self.clients.get(node)
        return None if client is None or client.lost_reason else client

    def ping(self) -> None:
        """Ping silent agents and renew all leases in time; try silent nodes by new connections; clean dropped nodes that answer again."""
        now = time.monotonic()
        quiet, due = now - max(QUIET, 2 * self.beat), now - min(self.plan["lease"] / RENEWALS, MAX_PING_INTERVAL)
        for client in list(self.clients.values()):
            if client.last_received < quiet or client.last_sent < due or client.catching_up is not None:
                client.ping()
        if self.source.remote:
            unseen = list(self.unseen)
            for node in unseen:
                self._attempts.start(node, self._reattach_late)
            for node in self.silent(STALE * self.beat).keys() - set(unseen):
                self._attempts.start(node, self._attempts.try_node)
            if self.all_silent(STALE * self.beat):
                self._attempts.start(OTHERS, self._try_others)
        for node in self.uncleaned - self.clients.keys():
            self._attempts.start(node, self._clean)

    def _try_others(self, name: str) -> None:
        """Check whether other nodes of the cluster answer: then the job's nodes are lost, and this host is not cut off."""
        start = time.monotonic()
        self._attempts.note_result(name, start, answered=self.source.any_other_reachable(self.expected()))

    # -- connections --------------------------------------------------------------------------------------------------

    def alive(self, but: Collection[str] = ()) -> list[str]:
        """Return the nodes with a connection, or with one that has just ended; none of *but*."""
        clients = self.clients.copy()  # here and below: other threads bring up nodes
        return [node for node, client in clients.items() if node not in but and not (client.lost_reason or client.is_unreachable)]

    def connected(self) -> list[str]:
        """Return the nodes whose agents are not known to be lost, including those that cannot be reached now."""
        return [node for node, client in self.clients.copy().items() if not client.lost_reason]

    def expected(self) -> set[str]:
        """Return the nodes whose agents are connected, or are waited for."""
        return self.unseen.keys() | set(self.connected())

    def disconnected(self) -> dict[str, str]:
        """Return the nodes whose agents are lost or missing, and why."""
        lost = {node: client.lost_reason for node, client in self.clients.copy().items() if client.lost_reason}
        return {**self.without_agent, **lost}

    def lost_at(self, node: str) -> float:
        """Return when the agent of *node* was last known to run (wall clock)."""
        client = self.clients.get(node)
        if client is None:
            return time.time()
        return client.lost_at or time.time() - (time.monotonic() - client.last_received)

    def silent(self, seconds: float) -> dict[str, str]:
        """Return the nodes whose agents are connected but have sent nothing for longer than *seconds*, and a description.

        A process that was suspended itself does not know how long others were silent: the count starts again when this is first called
        after a gap. What has arrived and was not read yet does not count as silence.
        """
        now = time.monotonic()
        if now - self._silence_checked > SUSPENDED:
            self._awake_since = now
        self._silence_checked = now
        now = min(now, REACTOR.caught_up)
        if self._awake_since > (last := now - seconds):
            return {}
        clients = self.clients.copy()
        since = {node: at for node, at in self.unseen.copy().items() if at < last and node not in clients}
        since |= {node: client.last_received for node, client in clients.items() if client.last_received < last and not client.lost_reason}
        return {node: f"it has been silent for {now - max(at, self._awake_since):.1f} s" for node, at in since.items()}

    def all_silent(self, seconds: float) -> bool:
        """Return whether no agent has sent anything for longer than *seconds*; on one machine nothing can be cut between nodes."""
        last = time.monotonic() - seconds
        clients = self.clients.copy().values()
        if not self.source.remote or any(client.last_received >= last for client in clients if not client.lost_reason):
            return False
        expected = self.expected()
        return bool(expected) and expected <= self.silent(seconds).keys()

    @property
    def last_contact(self) -> float:
        """Return when any agent last sent something, or began to be waited for (monotonic); now, where there is none."""
        received = [client.last_received for client in self.clients.copy().values()]
        return max([*received, *self.unseen.copy().values()], default=time.monotonic())

    def known_until(self, members: Collection[str]) -> float:
        """Return until when (monotonic) it is known what the ranks on *members* do: that a spare node talks tells nothing of them.

        For a single silent member, and where one is not connected, that is the last contact with any agent, or now if another node
        answers: then its node is checked, and not the way to it.
        """
        clients = [client for node in members if (client := self.clients.get(node)) is not None and not client.lost_reason]
        if len(clients) == len(members) and (len(members) > 1 or any(client.catching_up is not None for client in clients)):
            return max(client.known_until for client in clients)
        return time.monotonic() if self.answered() else self.last_contact

    def answered(self) -> set[str]:
        """Return the nodes that have answered by a new connection since the last contact, and `OTHERS` if other nodes have."""
        return self._attempts.answered_since(self.last_contact)

    def forget_failed_attempts(self) -> None:
        """Forget which nodes did not answer: it was this host that could not reach them."""
        self._attempts.forget_failed()

    def cut_off(self) -> dict[str, str]:
        """Return the nodes whose connection ended and could not be restored at once; their agents may run."""
        clients = self.clients.copy()
        nodes = [node for node, client in clients.items() if client.disconnected_since is not None and client.failed_attempts]
        return dict.fromkeys(nodes, "its connection ended, and it cannot be reached")

    def reconnecting(self) -> frozenset[str]:
        """Return the nodes whose connection has just ended and is being restored: nobody knows yet what that means."""
        return frozenset(
            node
            for node, client in self.clients.copy().items()
            if client.disconnected_since is not None and not (client.failed_attempts or client.is_unreachable)
        )

    def lost(self, seconds: float) -> dict[str, str]:
        """Return the nodes whose agents are lost, or were silent for so long while the node did not answer a new connection either."""
        if not self.source.remote:
            return self.disconnected()
        silent = {}
        for node, why in self.silent(seconds).items():
            client = self.clients.get(node)
            if self._attempts.failed(node, self.unseen.get(node, time.monotonic()) if client is None else client.last_received):
                silent[node] = why
        return {**silent, **self.disconnected()}

    def recheck(self, node: str) -> bool | None:
        """Return whether *node* works although its agent is silent: it answers, and a new agent starts on it.

        What the old agent left is killed first, so that no two agents serve one node. None: only the connection was lost, and the agent
        answers over another one.
        """
        if node in self.unseen and not self._attempts.failed(node) and self._reattached(node):
            return None
        old, answers = self.clients.get(node), None
        if self.source.remote and old is not None and not old.lost_reason:
            attempt = self._attempts.since(node, old.last_received)
            if (answers := attempt.answered) and old.receives_within(attempt.start, REPLY_SECONDS):
                return None
        self.clients.pop(node, None)
        if old is not None:
            old.close()
        self.memory.pop(node, None)
        self.unseen.pop(node, None)
        self.without_agent.setdefault(node, "no agent since it was checked again")
        if node in self.leaving or not (self.source.is_reachable(node) if answers is None else answers):
            return False
        try:
            self.fence(node)
            self.bring_up(node)
        except (LeaseLost, LeaseUnconfirmed):  # the latter is a problem of this controller, not of the node
            raise
        except WorldError as error:
            note(log, "node.recheck-failed", node=node, why=error)
            return False
        return True

    def _reattached(self, node: str) -> bool:
        """Reattach to the agent of *node* now; return whether that worked, or had already."""
        self._attempts.finish(node)
        if node not in self.clients:
            with suppress(WorldError):
                self._late.put((node, self.reattach(node)))
        return node in self.clients

    def logs(self, node: str) -> str:
        """Return the folder on *node* with the logs of the job's ranks."""
        return str(self.source.node_settings(node, self._job).get("log_directory") or self.plan["log_directory"])

    def free(self) -> list[str]:
        """Return the nodes of the cluster that answer and run no other job, in the cluster's order.

        A node that an earlier controller took for this job at its end is free too.
        """
        taken = self.leaving | self.clients.keys() | self.uncleaned | self._coming
        free, unusable = list[str](), dict[str, str]()
        for view in self.source.survey():
            if view.name in taken:
                continue
            if view.status == "idle" or (view.status == "up" and view.job in {None, self.plan["job"]}):
                free.append(view.name)
            else:
                unusable[view.name] = "another job runs on it" if view.status == "up" else view.why or "it does not answer"
        self.unusable_nodes = unusable  # as a whole: another thread may read it now
        return free

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, *, end: bool) -> None:
        """Close all connections; with *end*, first end all agents and whatever they had started."""
        self._closed = True
        self._threads.shutdown(wait=end, cancel_futures=True)  # a launch that a signal cut short starts no agent after this
        if end:
            with ThreadPoolExecutor(THREADS, thread_name_prefix="agents end") as threads:
                done = [threads.submit(self.drop, node) for node in list(self.clients)]
                done += [threads.submit(self.clear, node) for node in self._starting]
            with ThreadPoolExecutor(THREADS, thread_name_prefix="agents end") as threads:
                done += [threads.submit(self._clean, node) for node in self.uncleaned]
            for future in done:
                with suppress(WorldError):
                    future.result()
        for client in list(self.clients.values()):
            client.close()
        self.clients.clear()
        self.source.close()


def failures(answers: dict[str, Any]) -> dict[str, WorldError]:
    """Return the nodes that did not carry out a command, and why."""
    return {node: answer for node, answer in answers.items() if isinstance(answer, WorldError)}
