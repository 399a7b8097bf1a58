"""The nodes of one job: agents brought up, ordered in parallel, looked at, fenced."""

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
from holdfast.cluster import NodeBackend, NodeView
from holdfast.control.agents.broadcast import Broadcast
from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.event_queue import EventQueue
from holdfast.control.agents.reactor import REACTOR
from holdfast.control.agents.reconnect import Reconnects
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
from holdfast.log import note
from holdfast.process import boot_time
from holdfast.protocol import HEARTBEAT_INTERVAL, Message

log = logging.getLogger("holdfast.control")

BEFORE: Final = 500
"""Events before the current generation that an adopting flow hears again: the flow before may have died with their rows unwritten."""

HANDS: Final = 32
"""Threads that reach nodes at once: more only fight for the interpreter."""
IMPATIENT: Final = 3.0
"""Seconds without any answer after which the rest of the agents are not waited for when a job is adopted: a dead host says nothing for
ten, and it may be the one that the flow before ran on."""

STALE: Final = 4
"""Beats of silence after which a connection is tried: on a network that was cut it may never say that it ended."""

SPEAK_SECONDS: Final = 1.0
"""How long an agent may take to speak over a new connection."""
QUIET: Final = 0.5
"""Seconds after which an agent that has said nothing is asked for a word."""
RENEWALS: Final = 10
"""Words of the flow in the time of a lease, at least."""
LONGEST_PAUSE: Final = 60.0
"""Seconds between two words of the flow to an agent, at most."""

STOOD_STILL: Final = 1.0
"""Seconds between two looks at silence, usually 0.1 s apart, after which this process had no say over its time."""

WITNESSES: Final = 3
"""Agents that are asked who steers, before something is done that no agent could refuse."""
WITNESSED: Final = 2.5
"""Seconds for which the answer of one of them holds: for as long a flow is sure of a lease that it has renewed."""
CONFIRM_SECONDS: Final = 5.0
"""How long it is waited for the lease to be renewed, or an agent to answer, before such a thing is left undone."""
LONGEST_LEASE: Final = 3600.0
"""Seconds, where nobody else could hold the lease."""
HIGHEST_EPOCH: Final = 2**30
"""No job changes hands so often: a greater one is no word of an honest agent."""

OTHERS: Final = ""
"""Stands for all of the cluster that has nothing to do with the job."""

T = TypeVar("T")


def _safely(act: Callable[[str], T], node: str) -> T | WorldError:
    try:
        return act(node)
    except LeaseLost:  # no node's trouble: it ends what this flow does
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
        """Nodes that should have an agent of this job and, when looked for, had none."""
        self.unseen: dict[str, float] = {}
        """Nodes that should have an agent of this job and have not answered yet, and since when they are waited for (monotonic)."""
        self._late: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
        self.memory: dict[str, tuple[str, int]] = {}
        """Node to host and port of the server of what it keeps in memory."""
        self.leaving: set[str] = set()
        """Nodes that were told to go, and will be gone in a moment."""
        self.lease_until: Callable[[], float] = lambda: boot_time() + LONGEST_LEASE
        """Tells until when nobody else can steer the job, as far as the history goes (seconds since boot)."""
        self.raise_epoch: Callable[[int], int] = self._overtaken_by
        """Has the history give this flow an epoch above that which agents remember; raises `LeaseLost` if another flow has the job."""
        self._newer = 0
        self._witnessed = -WITNESSED
        """When an agent was asked last that took an order of this flow for the newest one's (seconds since boot)."""
        self._outranking = threading.Lock()
        self._ours: set[str] = set()
        """Agents that have taken orders of this flow."""
        self._asked = self._awake = 0.0
        """When somebody last asked who is silent, and since when that has been asked without a gap (monotonic)."""
        self._begun: set[str] = set()
        """Nodes on which an agent may have been started that has no channel here (yet)."""
        self._coming: set[str] = set()
        """Nodes that are being brought up now: nobody else is to begin with them."""
        self.uncleaned: set[str] = set()
        """Nodes of which the job has let go without being able to end what it had started there."""
        self.unusable_nodes: dict[str, str] = {}
        """Nodes that the job could not be given when free ones were last looked for, and why."""
        self._hands = ThreadPoolExecutor(HANDS, thread_name_prefix="fleet")
        self._tries = Reconnects(self._hands, source.answers)
        self._closed = False

    def each(self, nodes: Iterable[str], act: Callable[[str], T]) -> dict[str, T | WorldError]:
        """Do *act* on all *nodes* at once; what failed for the world's reasons is an answer too."""
        nodes = list(nodes)
        if len(nodes) == 1:
            return {nodes[0]: _safely(act, nodes[0])}
        return dict(zip(nodes, self._hands.map(partial(_safely, act), nodes), strict=True))

    @property
    def beat(self) -> float:
        """Return the seconds between two beats of an agent with workers."""
        return float(self.plan.get("beat", HEARTBEAT_INTERVAL))

    # -- agents -------------------------------------------------------------------------------------------------------

    def bring_up(self, node: str) -> AgentClient:
        """Have an agent on *node*, attached and ready to run this job's workers; raise a `WorldError` when that cannot be."""
        self._coming.add(node)
        try:
            return self._bring_up(node)
        finally:
            self._coming.discard(node)

    def _bring_up(self, node: str) -> AgentClient:
        client = self._reach(node)
        if client is None:
            self._go_on(node)
            self._past_agents(node, lambda: self.source.start_agent(node, lambda: self._begin(node)))
            client = AgentClient(node, lambda: self.source.connect(node), self.event_queue, epoch=self.epoch, job=self.plan["job"])
        try:
            client.attach()
            self._go_on(node)
            answer = client.send_command("prepare", **self._plan_of(node))
        except WorldError:
            client.close()
            raise
        self.clients[node] = client
        self._ours.add(str(client.agent))
        self._begun.discard(node)
        self._tries.forget(node)
        self.without_agent.pop(node, None)
        self._note_memory(node, answer)
        return client

    def _begin(self, node: str) -> FencingToken:
        """Return in whose name an agent is started on *node*; from now on there may be one."""
        token = self.confirm(node)
        self._begun.add(node)
        return token

    def _go_on(self, node: str) -> None:
        """Raise `AgentDisconnected` once all have been parted from: what a thread is still at must not disturb the flow that comes next."""
        if self._closed:
            raise AgentDisconnected(node, "this flow has parted from all agents")

    def _plan_of(self, node: str) -> dict[str, Any]:
        memory, own = self.plan.get("memory"), self.source.node_settings(node, self._job)
        plan = {**self.plan, **own, "environment": {**own.get("environment", {}), **self.plan["environment"]}}
        if self.plan["python"]:  # the job names one
            plan["python"] = self.plan["python"]
        return {**plan, "memory": None if memory is None else {**memory, "address": self.source.address(node)}}

    def _note_memory(self, node: str, told: Message) -> None:
        """Remember where other nodes reach what *node* keeps in memory."""
        port = (told.get("memory") or {}).get("port")
        self.memory.pop(node, None)
        if port is not None:
            self.memory[node] = (self.source.address(node), int(port))

    def reattach(self, node: str) -> Message:
        """Attach to an agent that runs already, and have it tell all events of its generation; return what it says of itself."""
        client = self._reach(node)
        if client is None:
            raise AgentDisconnected(node, "no agent listens")
        try:
            told = client.about()
            if told["job"] != self.plan["job"]:
                raise CommandRejected(node, "attach", "its agent does not run this job")
            if told["epoch"] >= self.epoch and told["agent"] not in self._ours:  # the same number may be another flow's
                self._rise_above(node, told["epoch"])
            client.epoch = self.epoch
            client.attach(since=max(0, told["since"] - BEFORE))
        except WorldError:
            client.close()
            raise
        with self._outranking:
            client.epoch = self.epoch
            self.clients[node] = client
            self._ours.add(told["agent"])
        self.unseen.pop(node, None)
        self._note_memory(node, told)
        return told

    def reattach_all(self, nodes: Iterable[str]) -> dict[str, Message | WorldError]:
        """Adopt the agents of all *nodes* at once; return what they say of themselves, or why they do not.

        Once some have answered and no other has for `IMPATIENT` seconds, the rest are left to themselves: the job needs who steers it, and
        one that answers after all is told of by `newly_reachable`.
        """
        begun = time.monotonic()
        left = {self._hands.submit(_safely, self.reattach, node): node for node in nodes}
        answers: dict[str, Message | WorldError] = {}
        while left:
            done, _ = wait(left, timeout=IMPATIENT if answers else None, return_when=FIRST_COMPLETED)
            for one in done:
                answers[left.pop(one)] = one.result()
            if not done:
                break
        for one, node in left.items():
            answers[node] = NodeLost(node, f"no answer within {time.monotonic() - begun:.0f} s")
            self._tries.go_on(node, one, begun)
            one.add_done_callback(partial(self._came_late, node))
        return answers

    def _came_late(self, node: str, answer: Future[Message | WorldError]) -> None:
        if not answer.cancelled() and answer.exception() is None and not isinstance(told := answer.result(), WorldError):
            self._late.put((node, told))

    def wait_for(self, node: str) -> None:
        """Adopt the agent of *node* as soon as it can be reached: it is cut off from here, which says nothing of its ranks."""
        if node not in self.clients:
            self.unseen.setdefault(node, time.monotonic())

    def newly_reachable(self) -> Iterator[tuple[str, Message]]:
        """Yield the nodes whose agents were reached since this was last asked, with what they say of themselves."""
        with suppress(queue.Empty):
            while True:
                yield self._late.get_nowait()

    def _adopt_late(self, node: str) -> None:
        begun = time.monotonic()
        try:
            self._late.put((node, self.reattach(node)))
        except (NodeLost, ProtocolMismatch):
            self._tries.take(node, begun, answered=False)
        except NodeError as error:
            self.without_agent[node] = str(error)
            self.unseen.pop(node, None)

    def _adopt_now(self, node: str) -> bool:
        """Tell whether the agent of *node* was reached after all."""
        self._tries.see_out(node)
        if node not in self.clients:
            with suppress(WorldError):
                self._late.put((node, self.reattach(node)))
        return node in self.clients

    def _reach(self, node: str) -> AgentClient | None:
        try:
            return AgentClient(node, lambda: self.source.connect(node), self.event_queue, epoch=self.epoch, job=self.plan["job"])
        except AgentDisconnected:
            return None

    def drop(self, node: str) -> None:
        """Let go of a node: its agent ends, and what it had started is killed."""
        self._part(node)()

    def drop_async(self, node: str) -> None:
        """Let go of a node beside what the flow does."""
        self._hands.submit(self._part(node))

    def _part(self, node: str) -> Callable[[], None]:
        """Forget a node; return what ends all on it."""
        client = self.clients.pop(node, None)
        self.without_agent.pop(node, None)
        self.unseen.pop(node, None)
        self.memory.pop(node, None)
        return lambda: self._finish(node, client)

    def _finish(self, node: str, client: AgentClient | None) -> None:
        heard = False
        if client is not None:
            try:
                with suppress(NodeError):
                    asked = boot_time()
                    client.send_command("end", seconds=2.0)
                    heard, self._witnessed = True, asked
            finally:
                self._newer = max(self._newer, client.superseded)
                client.close()
        self.clear(node, heard=heard)

    def clear(self, node: str, *, heard: bool = False) -> None:
        """Make sure nothing of the job runs on *node*, or is left in its memory: now, or as soon as the node can be reached.

        Unless its agent was *heard* to its end, what it may have told nobody is put into the inbox.
        """
        if self._tries.failed(node):  # a moment ago: nobody waits for that again
            self.uncleaned.add(node)
        else:
            self._settle(node, heard=heard)

    def _settle(self, node: str, *, heard: bool = False) -> None:
        try:
            self.fence(node)
            if not heard:
                self._hear_the_past(node)
            self.wipe(node)
        except NodeError as error:
            if node not in self.uncleaned:
                note(log, "node.not-fenced", node=node, why=error)
            self.uncleaned.add(node)
        else:
            self.uncleaned.discard(node)
            self._tries.forget(node)

    def _hear_the_past(self, node: str) -> None:
        try:
            events = self.source.past(node, self.plan["job"])
        except OSError as error:
            note(log, "past.not-heard", node=node, why=error)
            return
        if events:
            self.event_queue.put((node, {"event": "past", "events": events}))

    def fence(self, node: str) -> None:
        """Make sure nothing of the job runs on *node*; raise a `NodeError` when it cannot be reached."""
        killed = self._past_agents(node, lambda: self.source.fence(node, self.plan["job"], lambda: self.confirm(node)))
        if killed:
            note(log, "node.fenced", node=node, killed=len(killed))

    def wipe(self, node: str) -> None:
        """Take what the job keeps in the memory of *node*; raise a `NodeError` when that cannot be reached."""
        self._past_agents(node, lambda: self.source.wipe_memory(node, self.plan["job"], lambda: self.confirm(node)))

    def _past_agents(self, node: str, act: Callable[[], T]) -> T:
        """Do *act* on *node*; where it was refused for an epoch that the history does not know, do it again in a greater one."""
        try:
            return act()
        except Superseded as error:
            self._rise_above(node, error.epoch)
            return act()

    def _rise_above(self, node: str, epoch: int) -> None:
        """Have an epoch above that which *node* remembers: after a backup was restored the history's may be the older one.

        Raise `LeaseLost` where the history says that another flow steers the job.
        """
        if epoch > HIGHEST_EPOCH:
            raise CommandRejected(node, "attach", f"it has had orders of epoch {epoch}, and no job changes hands so often")
        note(log, "node.superseded", level=logging.WARNING, node=node, epoch=epoch, ours=self.epoch)
        with self._outranking:
            if epoch >= self.epoch:
                try:
                    self.epoch = self.raise_epoch(epoch)
                except LeaseLost as error:
                    self._newer = max(self._newer, epoch)
                    raise LeaseLost(self._job, error.holder) from error
                for client in self.clients.copy().values():
                    client.epoch = self.epoch

    def _overtaken_by(self, epoch: int) -> int:
        raise LeaseLost(self._job, f"a newer flow (epoch {epoch})")

    def send_command(self, nodes: Iterable[str], verb: str, *, seconds: float = 10.0, **facts: object) -> dict[str, Message | WorldError]:
        """Give the same order to all *nodes*: every order is out before the first answer is waited for."""
        return self.send_commands(dict.fromkeys(nodes, facts), verb, seconds=seconds)

    def send_commands(
        self, by_node: Mapping[str, Mapping[str, object]], verb: str, *, seconds: float = 10.0
    ) -> dict[str, Message | WorldError]:
        """Give each node the order with its own facts, all at once: every order is out before the first answer is waited for.

        One thread sends to all that read, as thousands of orders cost more between threads than in them; who is slow to read is waited for
        beside them.
        """
        round_ = Broadcast(verb, seconds, len(by_node))
        for node, facts in by_node.items():
            client = self.clients.get(node)
            if client is None:
                round_.fail(node, AgentDisconnected(node, "it has no agent"))
            elif client.takes():
                round_.send(client, facts)
            else:
                self._hands.submit(round_.send, client, facts)
        answers = round_.wait(by_node)
        self.check_superseded()
        return answers

    def send_commands_async(self, by_node: Mapping[str, Mapping[str, object]], verb: str) -> None:
        """Give each node the order with its own facts, beside what the flow does; nobody waits for the answers."""
        self._hands.submit(self.send_commands, by_node, verb)

    def send_command_async(self, node: str, verb: str, **facts: object) -> Future[Message]:
        """Give an order without waiting for its answer, which comes with the future."""
        return self._hands.submit(lambda: self.client(node).send_command(verb, seconds=10.0, **facts))

    def client(self, node: str) -> AgentClient:
        """Return the connection to *node*; raise `AgentDisconnected` when there is none."""
        try:
            return self.clients[node]
        except KeyError:
            raise AgentDisconnected(node, "it has no agent") from None

    def ping(self) -> None:
        """Ask those agents for a word that say nothing by themselves, and renew the leases of all in time.

        Beside that try connections that say nothing at all, and end what is left on nodes that were let go of unreached.
        """
        now = time.monotonic()
        quiet, due = now - max(QUIET, 2 * self.beat), now - min(self.plan["lease"] / RENEWALS, LONGEST_PAUSE)
        for client in list(self.clients.values()):
            if client.heard < quiet or client.spoke < due:
                client.ping()
        if self.source.remote:
            unseen = list(self.unseen)
            for node in unseen:
                self._tries.beside(node, self._adopt_late)
            for node in self.silent(STALE * self.beat).keys() - set(unseen):
                self._tries.beside(node, self._tries.knock)
            if self.all_silent(STALE * self.beat):
                self._tries.beside(OTHERS, self._ask_others)
        for node in self.uncleaned - self.clients.keys():
            self._tries.beside(node, self._settle)

    # -- looking ------------------------------------------------------------------------------------------------------

    def gone(self) -> dict[str, str]:
        """Return the nodes whose agents' connections ended, and how."""
        return {**self.without_agent, **{node: client.gone for node, client in self.clients.items() if client.gone}}

    def gone_at(self, node: str) -> float:
        """Return when the agent of *node* was last known to speak (wall clock)."""
        client = self.clients.get(node)
        if client is None:
            return time.time()
        return client.gone_at or time.time() - (time.monotonic() - client.heard)

    def silent(self, seconds: float) -> dict[str, str]:
        """Return the nodes whose agents are connected but have not spoken for longer than *seconds*.

        Who stood still himself cannot tell how long others were silent: the count begins anew when this is first asked again. Nor does
        what has come count as silence because nobody had the time to hear it yet.
        """
        now = time.monotonic()
        if now - self._asked > STOOD_STILL:
            self._awake = now
        self._asked = now
        now = min(now, REACTOR.caught_up)
        if self._awake > (last := now - seconds):
            return {}
        unseen = {node: at for node, at in self.unseen.items() if at < last and node not in self.clients}
        heard = {node: client.heard for node, client in self.clients.items() if client.heard < last and not client.gone}
        since = {**unseen, **heard}
        return {node: f"it has been silent for {now - max(at, self._awake):.1f} s" for node, at in since.items()}

    @property
    def newest_word(self) -> float:
        """Return when any agent was heard last, or began to be waited for (monotonic); now, where there is none."""
        return max([*(client.heard for client in self.clients.values()), *self.unseen.values()], default=time.monotonic())

    def not_gone(self) -> list[str]:
        """Return the nodes whose agents live as far as is known, those included that cannot be reached now."""
        return [node for node, client in self.clients.items() if not client.gone]

    def expected(self) -> set[str]:
        """Return the nodes whose agents are connected, or are sought."""
        return self.unseen.keys() | set(self.not_gone())

    def all_silent(self, seconds: float) -> bool:
        """Tell whether no agent at all has been heard for longer than *seconds*; on one machine nothing can be cut between nodes."""
        last = time.monotonic() - seconds
        if not self.source.remote or any(client.heard >= last for client in self.clients.values() if not client.gone):
            return False
        expected = self.expected()
        return bool(expected) and expected <= self.silent(seconds).keys()

    def answered(self) -> set[str]:
        """Return the nodes that have answered by a new connection since any agent was heard last, and `OTHERS` if any of those has."""
        return self._tries.answered_since(self.newest_word)

    def forget_tries(self) -> None:
        """Forget what nodes did not answer: it was this machine that could not reach them."""
        self._tries.forget_failures()

    def _ask_others(self, name: str) -> None:
        """See whether anything of the cluster answers that has nothing to do with the job: then it is the job's nodes that are gone."""
        begun = time.monotonic()
        self._tries.take(name, begun, answered=self.source.any_other_reachable(self.expected()))

    def alive(self, but: Collection[str] = ()) -> list[str]:
        """Return the nodes with a living connection, or one that ended only now and is sought; none of *but*."""
        return [node for node, client in self.clients.items() if node not in but and not (client.gone or client.away)]

    def cut_off(self) -> dict[str, str]:
        """Return the nodes whose connection ended and could not be had again at once; their agents may live."""
        away = [node for node, client in self.clients.items() if client.disconnected_since is not None and client.missed]
        return dict.fromkeys(away, "its connection ended, and it cannot be reached")

    def reconnecting(self) -> frozenset[str]:
        """Return the nodes whose connection has just ended and is sought for the first time: nobody knows yet what that means."""
        return frozenset(
            node for node, client in self.clients.items() if client.disconnected_since is not None and not (client.missed or client.away)
        )

    def lost(self, seconds: float) -> dict[str, str]:
        """Return the nodes that are gone, or were silent for so long and gave no answer by a new connection either."""
        quiet = {node: why for node, why in self.silent(seconds).items() if self._unanswered(node)} if self.source.remote else {}
        return {**quiet, **self.gone()}

    def _unanswered(self, node: str) -> bool:
        client = self.clients.get(node)
        return self._tries.failed(node, self.unseen.get(node, time.monotonic()) if client is None else client.heard)

    def logs(self, node: str) -> str:
        """Return the folder on *node* with the logs of the job's ranks."""
        own = self.source.node_settings(node, self._job)
        return str(own.get("log_directory") or self.plan["log_directory"])

    @property
    def superseded_by(self) -> int:
        """Return the epoch of a newer flow of which an agent has told; 0 while there is none."""
        self._newer = max([self._newer, *(client.superseded for client in self.clients.copy().values())])
        return self._newer

    def confirm(self, node: str) -> FencingToken:
        """Return in whose name an order to *node* goes past its agent, and by when it has to be begun.

        A flow that cannot renew its lease does not know whether another one steers by now. Then some of its agents are asked, as any newer
        flow begins with theirs. Raise `LeaseLost` if one does, and `LeaseUnconfirmed` when for some seconds nobody could say.
        """
        since = boot_time()
        while (until := max(self.lease_until(), self._witnessed + WITNESSED)) <= boot_time():
            self._ask_agents()
            self.check_superseded()
            if self._witnessed + WITNESSED > boot_time():
                continue
            if boot_time() - since > CONFIRM_SECONDS:
                why = "the lease of the job could not be renewed in time, and none of its agents says that it is still this flow's"
                raise LeaseUnconfirmed(node, why)
            time.sleep(0.1)
        self.check_superseded()
        return FencingToken(job=self.plan["job"], epoch=self.epoch, until=until)

    def _ask_agents(self) -> None:
        """Have some agents answer: they refuse any order that is not of the newest flow they have heard of, and raise `LeaseLost` here."""
        alive = [client for client in self.clients.copy().values() if not (client.gone or client.away)]
        for client in alive[:WITNESSES]:
            asked = boot_time()
            with suppress(NodeError):
                client.send_command("ping", seconds=1.0)
                self._witnessed = asked

    def check_superseded(self) -> None:
        """Raise `LeaseLost` if an agent has told of a newer flow."""
        if self.superseded_by:
            raise LeaseLost(self._job, f"a newer flow (epoch {self.superseded_by})")

    def agent(self, node: str) -> AgentClient | None:
        """Return the living connection to *node*; one that came after another agent's end is another one."""
        client = self.clients.get(node)
        return None if client is None or client.gone else client

    def recheck(self, node: str) -> bool | None:
        """Tell whether *node* lives although its agent does not speak: it answers, and a new agent comes up on it.

        What the old agent left is killed first, so that no two agents serve one node. None: it was the connection alone, and the agent
        speaks over another one.
        """
        if node in self.unseen and not self._tries.failed(node) and self._adopt_now(node):
            return None
        old, answers = self.clients.get(node), None
        if self.source.remote and old is not None and not old.gone:
            tried = self._tries.newest(node, old.heard)
            if (answers := tried.answered) and old.speaks(tried.begun, SPEAK_SECONDS):
                return None
        self.clients.pop(node, None)
        if old is not None:
            old.close()
        self.memory.pop(node, None)
        self.unseen.pop(node, None)
        self.without_agent.setdefault(node, "no agent since a second look")
        if node in self.leaving or not (self.source.answers(node) if answers is None else answers):
            return False
        try:
            self.fence(node)
            self.bring_up(node)
        except (LeaseLost, LeaseUnconfirmed):  # the latter speaks against this flow, not against the node
            raise
        except WorldError as error:
            note(log, "node.second-look-failed", node=node, why=error)
            return False
        return True

    def free(self) -> list[str]:
        """Return the nodes of the cluster that answer and are held by nobody, in the cluster's order.

        One that a flow before took for this job in its last moment is held by nobody either.
        """
        own = {None, self.plan["job"]}
        taken = self.leaving | self.clients.keys() | self.uncleaned | self._coming
        others = [view for view in self.source.survey() if view.name not in taken]
        free = [view.name for view in others if view.status == "idle" or (view.status == "up" and view.job in own)]
        usable = set(free)
        self.unusable_nodes = {view.name: _no_use(view) for view in others if view.name not in usable}
        return free

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, *, end: bool) -> None:
        """Part from all agents; with *end*, end them and whatever they had started."""
        self._closed = True
        self._hands.shutdown(wait=end, cancel_futures=True)  # a launch that a signal cut short starts no agent after this
        if end:
            with ThreadPoolExecutor(HANDS, thread_name_prefix="fleet end") as hands:
                done = [hands.submit(self.drop, node) for node in list(self.clients)]
                done += [hands.submit(self.clear, node) for node in self._begun]
            with ThreadPoolExecutor(HANDS, thread_name_prefix="fleet end") as hands:
                done += [hands.submit(self._settle, node) for node in self.uncleaned]
            for future in done:
                with suppress(WorldError):
                    future.result()
        for client in list(self.clients.values()):
            client.close()
        self.clients.clear()
        self.source.close()


def _no_use(view: NodeView) -> str:
    """Say why no job can be given a node as it is seen."""
    return "another job holds it" if view.status == "up" else view.why or "it does not answer"


def failures(answers: dict[str, Any]) -> dict[str, WorldError]:
    """Return the nodes that did not do as told, and why."""
    return {node: answer for node, answer in answers.items() if isinstance(answer, WorldError)}
