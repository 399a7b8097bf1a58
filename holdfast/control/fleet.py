"""The nodes of one job: agents brought up, ordered in parallel, looked at, fenced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, TypeVar

from holdfast.cluster import NodeSource
from holdfast.control.channel import AgentChannel, Inbox
from holdfast.errors import AgentGone, OrderRefused, WorldError
from holdfast.log import note
from holdfast.wire import Message

log = logging.getLogger("holdfast.control")

BEFORE: Final = 500
"""Events before the current generation that an adopting flow hears again: the flow before may have died with their rows unwritten."""

HANDS: Final = 32
"""Threads that reach nodes at once: more only fight for the interpreter."""

STOOD_STILL: Final = 1.0
"""Seconds between two looks at silence, usually 0.1 s apart, after which this process had no say over its time."""

T = TypeVar("T")


class Fleet:
    """The agents of a job's nodes."""

    def __init__(self, source: NodeSource, plan: dict[str, Any], *, epoch: int) -> None:
        self.source, self.plan, self.epoch = source, plan, epoch
        self.inbox: Inbox = Inbox()
        self.channels: dict[str, AgentChannel] = {}
        self.unreached: dict[str, str] = {}
        """Nodes that should have an agent of this job and, when looked for, had none."""
        self.memory: dict[str, tuple[str, int]] = {}
        """Node to host and port of the server of what it keeps in memory."""
        self.leaving: set[str] = set()
        """Nodes that were told to go, and will be gone in a moment."""
        self._asked = self._awake = 0.0
        """When somebody last asked who is silent, and since when that has been asked without a gap (monotonic)."""
        self._begun: set[str] = set()
        """Nodes on which an agent may have been started that has no channel here (yet)."""
        self._hands = ThreadPoolExecutor(HANDS, thread_name_prefix="fleet")

    def each(self, nodes: Iterable[str], act: Callable[[str], T]) -> dict[str, T | WorldError]:
        """Do *act* on all *nodes* at once; what failed for the world's reasons is an answer too."""

        def safely(node: str) -> T | WorldError:
            try:
                return act(node)
            except WorldError as error:
                return error

        nodes = list(nodes)
        if len(nodes) == 1:
            return {nodes[0]: safely(nodes[0])}
        return dict(zip(nodes, self._hands.map(safely, nodes), strict=True))

    # -- agents -------------------------------------------------------------------------------------------------------

    def bring_up(self, node: str) -> AgentChannel:
        """Have an agent on *node*, attached and ready to run this job's workers; raise a `WorldError` when that cannot be."""
        channel = self._reach(node)
        if channel is None:
            self._begun.add(node)
            self.source.start_agent(node)
            channel = AgentChannel(node, lambda: self.source.connect(node), self.inbox, epoch=self.epoch, job=self.plan["job"])
        try:
            channel.attach()
            answer = channel.order("prepare", **self._plan_of(node))
        except WorldError:
            channel.close()
            raise
        self.channels[node] = channel
        self._begun.discard(node)
        self.unreached.pop(node, None)
        self._note_memory(node, answer)
        return channel

    def _plan_of(self, node: str) -> dict[str, Any]:
        memory = self.plan.get("memory")
        return {**self.plan, "memory": None if memory is None else {**memory, "address": self.source.address(node)}}

    def _note_memory(self, node: str, told: Message) -> None:
        """Remember where other nodes reach what *node* keeps in memory."""
        port = (told.get("memory") or {}).get("port")
        self.memory.pop(node, None)
        if port is not None:
            self.memory[node] = (self.source.address(node), int(port))

    def adopt(self, node: str) -> Message:
        """Attach to an agent that runs already, and have it tell all events of its generation; return what it says of itself."""
        channel = self._reach(node)
        if channel is None:
            raise AgentGone(node, "no agent listens")
        try:
            told = channel.about()
            if told["job"] != self.plan["job"]:
                raise OrderRefused(node, "attach", "its agent does not run this job")
            channel.attach(since=max(0, told["since"] - BEFORE))
        except WorldError:
            channel.close()
            raise
        self.channels[node] = channel
        self._note_memory(node, told)
        return told

    def _reach(self, node: str) -> AgentChannel | None:
        try:
            return AgentChannel(node, lambda: self.source.connect(node), self.inbox, epoch=self.epoch, job=self.plan["job"])
        except AgentGone:
            return None

    def drop(self, node: str) -> None:
        """Let go of a node: its agent ends, and what it had started is killed."""
        self._part(node)()

    def drop_later(self, node: str) -> None:
        """Let go of a node beside what the flow does."""
        self._hands.submit(self._part(node))

    def _part(self, node: str) -> Callable[[], None]:
        """Forget a node; return what ends all on it."""
        channel = self.channels.pop(node, None)
        self.unreached.pop(node, None)
        self.memory.pop(node, None)
        return lambda: self._finish(node, channel)

    def _finish(self, node: str, channel: AgentChannel | None) -> None:
        if channel is not None:
            with suppress(WorldError):
                channel.order("end", seconds=2.0)
            channel.close()
        self.clear(node)

    def clear(self, node: str) -> None:
        """Make sure nothing of the job runs on *node*, or is left in its memory."""
        self.fence(node)
        self.source.wipe_memory(node, self.plan["job"])

    def fence(self, node: str) -> None:
        """Make sure nothing of the job runs on *node*."""
        killed = self.source.fence(node, self.plan["job"])
        if killed:
            note(log, "node.fenced", node=node, killed=len(killed))

    def order(self, nodes: Iterable[str], verb: str, *, seconds: float = 10.0, **facts: object) -> dict[str, Message | WorldError]:
        """Give the same order to all *nodes*: every order is out before the first answer is waited for."""
        return self.each(nodes, lambda node: self.channel(node).order(verb, seconds=seconds, **facts))

    def later(self, node: str, verb: str, *, seconds: float = 10.0, **facts: object) -> Future[Message]:
        """Give an order without waiting for its answer, which comes with the future."""
        return self._hands.submit(lambda: self.channel(node).order(verb, seconds=seconds, **facts))

    def channel(self, node: str) -> AgentChannel:
        """Return the connection to *node*; raise `AgentGone` when there is none."""
        try:
            return self.channels[node]
        except KeyError:
            raise AgentGone(node, "it has no agent") from None

    def ping(self) -> None:
        """Renew the agents' leases."""
        for channel in list(self.channels.values()):
            channel.ping()

    # -- looking ------------------------------------------------------------------------------------------------------

    def gone(self) -> dict[str, str]:
        """Return the nodes whose agents' connections ended, and how."""
        return {**self.unreached, **{node: channel.gone for node, channel in self.channels.items() if channel.gone}}

    def gone_at(self, node: str) -> float:
        """Return when the agent of *node* was last known to speak (wall clock)."""
        channel = self.channels.get(node)
        if channel is None:
            return time.time()
        return channel.gone_at or time.time() - (time.monotonic() - channel.heard)

    def silent(self, seconds: float) -> dict[str, str]:
        """Return the nodes whose agents are connected but have not spoken for longer than *seconds*.

        Who stood still himself cannot tell how long others were silent: the count begins anew when this is first asked again.
        """
        now = time.monotonic()
        if now - self._asked > STOOD_STILL:
            self._awake = now
        self._asked = now
        since = {node: now - max(channel.heard, self._awake) for node, channel in self.channels.items() if not channel.gone}
        return {node: f"it has been silent for {silence:.1f} s" for node, silence in since.items() if silence > seconds}

    def alive(self) -> list[str]:
        """Return the nodes with a living connection."""
        return [node for node, channel in self.channels.items() if not channel.gone]

    def agent(self, node: str) -> AgentChannel | None:
        """Return the living connection to *node*; one that came after another agent's end is another one."""
        channel = self.channels.get(node)
        return None if channel is None or channel.gone else channel

    def second_look(self, node: str) -> bool:
        """Tell whether *node* lives although its agent does not speak: it answers, and a new agent comes up on it.

        What the old agent left is killed first, so that no two agents serve one node.
        """
        old = self.channels.pop(node, None)
        if old is not None:
            old.close()
        self.memory.pop(node, None)
        self.unreached.setdefault(node, "no agent since a second look")
        if node in self.leaving or not self.source.answers(node):
            return False
        self.fence(node)
        try:
            self.bring_up(node)
        except WorldError as error:
            note(log, "node.second-look-failed", node=node, why=error)
            return False
        return True

    def free(self) -> list[str]:
        """Return the nodes of the cluster that answer and are held by nobody, in the cluster's order."""
        idle = [view.name for view in self.source.survey() if view.standing == "idle" or (view.standing == "up" and view.job is None)]
        return [node for node in idle if node not in self.leaving]

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, *, end: bool) -> None:
        """Part from all agents; with *end*, end them and whatever they had started."""
        self._hands.shutdown(wait=end, cancel_futures=True)  # a launch that a signal cut short starts no agent after this
        if end:
            with ThreadPoolExecutor(HANDS, thread_name_prefix="fleet end") as hands:
                done = [hands.submit(self.drop, node) for node in list(self.channels)]
                done += [hands.submit(self.clear, node) for node in self._begun]
            for future in done:
                with suppress(WorldError):
                    future.result()
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()


def failures(answers: dict[str, Any]) -> dict[str, WorldError]:
    """Return the nodes that did not do as told, and why."""
    return {node: answer for node, answer in answers.items() if isinstance(answer, WorldError)}
