"""Random real faults for one job on a local cluster; each counts only once it has been observed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.controlled import ControlledJob
from benchmarks.measuring import wait_for
from holdfast.errors import NodeLost
from holdfast.host.process import NODE_MARK, is_alive, marked, started_at, state_of
from holdfast.runtime.checkpoint import manifest
from holdfast.testing.chaos import Placed

SECONDS: Final = 20.0
"""How long the sign of a fault may take to show."""
LONGEST: Final = 400.0
"""How long the job may take to train again: an attempt that hangs costs its deadline, and the next one comes after it."""
DISK_BYTES: Final = 8 << 20
"""Room for checkpoints, where they have a file system of their own."""


class NotPossible(Exception):
    """No target for this kind of fault now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What a fault did to one rank, one node, or the controller."""

    at: float
    """Wall clock."""
    node: str = ""
    """Empty: the controller, which runs on no node."""
    rank: int | None = None
    """The rank whose process was hit; None: something else on the node, or all of it."""
    ranks: tuple[int, ...] = ()
    """The rank, or those that the node had."""
    seconds: float = 0.0
    """How long it lasted; 0: what was hit has ended, or never goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An injected fault."""

    kind: str
    at: float
    what: str
    hits: tuple[Hit, ...] = ()
    """What it did, in order; nothing of what happens to files."""


@dataclass
class Havoc:
    """Injects random faults into one job, by a seed."""

    job: ControlledJob
    dice: random.Random
    own_disk: bool
    """The checkpoints have a small file system to themselves, which may be filled."""
    done: list[Done] = field(default_factory=list)
    impossible: Counter[str] = field(default_factory=Counter)
    """Number of times without a target, by kind."""
    awaited: int = 0
    """Faults that were kept back until all ranks trained."""
    _hits: list[Hit] = field(default_factory=list)

    def wreak(self, kind: str) -> bool:
        """Inject a fault of *kind*; return whether that was possible."""
        at = time.time()
        self._hits = []
        try:
            what = KINDS[kind](self)
        except (NotPossible, NodeLost, ProcessLookupError, KeyError):  # what it was about has gone, for another fault
            self.impossible[kind] += 1
            return False
        self.done.append(Done(kind=kind, at=at, what=what, hits=tuple(self._hits)))
        return True

    # -- looking ------------------------------------------------------------------------------------------------------

    def a_rank(self) -> Placed:
        """Return a rank that has a process."""
        ranks = self.job.chaos.ranks()
        if not ranks:
            raise NotPossible
        return self.dice.choice(sorted(ranks.values(), key=lambda one: one.rank))

    def an_agent(self) -> tuple[str, int]:
        """Return a node with an agent, and the agent's process."""
        up = [(one.name, one.pid) for one in self.job.nodes.survey() if one.pid is not None]
        if not up:
            raise NotPossible
        return self.dice.choice(up)

    def a_part(self, module: bytes) -> tuple[str, int]:
        """Return a node, and the process of *module* that runs on it."""
        found = [(node, pid) for node in self.job.nodes.names() for pid in marked(NODE_MARK, self.job.mark(node)) if module in command(pid)]
        if not found:
            raise NotPossible
        return self.dice.choice(sorted(found))

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """Return the ranks that *node* has."""
        return tuple(sorted(one.rank for one in self.job.chaos.ranks().values() if one.node == node))

    # -- acting -------------------------------------------------------------------------------------------------------

    def note(self, node: str = "", rank: int | None = None, *, at: float | None = None, seconds: float = 0.0) -> None:
        """Note what this fault does now, or did at a time *at*."""
        ranks = (rank,) if rank is not None else self.ranks_on(node) if node else ()
        self._hits.append(Hit(at=time.time() if at is None else at, node=node, rank=rank, ranks=ranks, seconds=round(seconds, 3)))

    def end_rank(self, one: Placed, number: int = signal.SIGKILL) -> None:
        """End the process of a rank by a signal, and see its end."""
        self.note(one.node, one.rank)
        self.end(one.pid, number)

    def stop_node(self, node: str, pids: list[int], seconds: float) -> str:
        """Stop processes of a node for some seconds."""
        self.note(node, seconds=seconds)
        with self.stopped(pids):
            time.sleep(seconds)
        return f"{node} for {seconds:g} s"

    def signal_to(self, pid: int, number: int, sign: Callable[[int | None], bool]) -> None:
        """Send a signal, and see its *sign*."""
        started = started_at(pid)
        os.kill(pid, number)
        wait_for(lambda: sign(started), f"the effect of signal {number} on process {pid}", seconds=SECONDS)

    def end(self, pid: int, number: int = signal.SIGKILL) -> None:
        """End a process by a signal, and see its end."""
        self.signal_to(pid, number, lambda started: not is_alive(pid, started))

    @contextmanager
    def stopped(self, pids: list[int]) -> Iterator[None]:
        """Stop processes meanwhile, then continue those that still exist."""
        try:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            wait_for(lambda: all(state_of(pid) in "TZ?" for pid in pids), "stopped processes", seconds=SECONDS)
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def in_a_step(self, statements: str) -> str:
        """Have a rank run *statements* in a step of its, while all train; a fault in a recovery's first step is `hang_at_first_step`."""
        if not self.job.at_work():
            self.awaited += 1
            self.job.until(self.job.at_work, "a job at work", seconds=LONGEST)
        rank = self.dice.randrange(self.job.ranks)
        node = self.job.chaos.ranks()[rank].node
        self.note(node, rank, at=self.job.trouble(rank, statements))
        return f"rank {rank}: {statements}"


def command(pid: int) -> bytes:
    """Return the command line of a process; empty if it ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


# -- ranks ---------------------------------------------------------------------------------------------------------------


def by_signal(number: signal.Signals) -> Callable[[Havoc], str]:
    """Return what ends a rank by a signal."""

    def act(havoc: Havoc) -> str:
        one = havoc.a_rank()
        havoc.end_rank(one, number)
        return f"rank {one.rank} on {one.node}"

    return act


def stop(havoc: Havoc) -> str:
    """Stop a rank permanently."""
    one = havoc.a_rank()
    havoc.note(one.node, one.rank)
    havoc.signal_to(one.pid, signal.SIGSTOP, lambda _: state_of(one.pid) in "TZ?")
    return f"rank {one.rank} on {one.node}"


def kill_all(havoc: Havoc) -> str:
    """End all ranks at once."""
    ranks = havoc.job.chaos.ranks()
    for one in ranks.values():
        havoc.end_rank(one)
    return f"ranks {', '.join(map(str, ranks))}"


def kill_two(havoc: Havoc) -> str:
    """End two ranks at once."""
    ranks = havoc.job.chaos.ranks()
    picked = havoc.dice.sample(sorted(ranks), min(2, len(ranks)))
    for rank in picked:
        havoc.end_rank(ranks[rank])
    return f"ranks {', '.join(map(str, picked))}"


def kill_in_recovery(havoc: Havoc) -> str:
    """End a rank, and another one while the job recovers from that."""
    one = havoc.a_rank()
    havoc.end_rank(one)
    with suppress(TimeoutError):
        wait_for(lambda: havoc.job.state() != "RUNNING", "a recovery", every=0.005, seconds=2.0)
    time.sleep(havoc.dice.uniform(0.0, 0.4))
    other = havoc.a_rank()
    havoc.end_rank(other)
    return f"rank {one.rank} on {one.node}, then rank {other.rank} on {other.node}"


def hang_at_first_step(havoc: Havoc) -> str:
    """End a rank, and have the process that follows it come to no end in its first step."""
    one = havoc.a_rank()
    havoc.end_rank(one)
    havoc.note(one.node, one.rank, at=havoc.job.trouble(one.rank, "stuck_in_user_code()"))
    return f"rank {one.rank} on {one.node}"


def raise_(havoc: Havoc) -> str:
    """Have a rank raise an exception that never comes again."""
    return havoc.in_a_step(f"raise RuntimeError('fault {len(havoc.done)} of the benchmark')")


def slow(havoc: Havoc) -> str:
    """Have a rank compute slowly for a while."""
    rank = havoc.dice.randrange(havoc.job.ranks)
    havoc.note(havoc.job.chaos.ranks()[rank].node, rank, at=havoc.job.trouble(rank, "slow = 0.1"), seconds=2.0)
    time.sleep(2.0)
    havoc.job.trouble(rank, "slow = 0.0")
    return f"rank {rank} for 2 s"


def in_a_step(statements: str) -> Callable[[Havoc], str]:
    """Return what has a rank run *statements*."""
    return lambda havoc: havoc.in_a_step(statements)


# -- nodes ---------------------------------------------------------------------------------------------------------------


def power_off(havoc: Havoc) -> str:
    """Remove a node, and bring it back empty some time later."""
    node, pid = havoc.an_agent()
    started, away = started_at(pid), havoc.dice.uniform(0.2, 4.0)
    havoc.note(node, seconds=away)
    havoc.job.nodes.power_off(node)
    wait_for(lambda: not is_alive(pid, started), f"the end of {node}'s agent", seconds=SECONDS)
    time.sleep(away)
    havoc.job.nodes.power_on(node)
    return f"{node} for {away:.1f} s"


def kill_agent(havoc: Havoc) -> str:
    """End a node's agent."""
    node, pid = havoc.an_agent()
    havoc.note(node)
    havoc.end(pid)
    return node


def stall_agent(havoc: Havoc) -> str:
    """Stop a node's agent for less than the timeout of agents; training continues meanwhile."""
    node, pid = havoc.an_agent()
    return havoc.stop_node(node, [pid], 1.5)


def cut_node(havoc: Havoc) -> str:
    """Stop everything on a node, as if its network were cut, and continue after it was given up."""
    node, agent = havoc.an_agent()
    others = [pid for pid in marked(NODE_MARK, havoc.job.mark(node)) if pid != agent]
    return havoc.stop_node(node, [agent, *others], 6.0)


def kill_part(module: str) -> Callable[[Havoc], str]:
    """Return what ends one of the agent's helpers."""

    def act(havoc: Havoc) -> str:
        node, pid = havoc.a_part(module.encode())
        havoc.note(node)
        havoc.end(pid)
        return f"{module} on {node}"

    return act


def kill_hot_spare(havoc: Havoc) -> str:
    """End a hot spare."""
    up = [one.name for one in havoc.job.nodes.survey() if one.status == "up"]
    found = [(node, number, one["pid"]) for node in up for number, one in havoc.job.chaos.ask(node)["hot_spares"].items() if one["pid"]]
    if not found:
        raise NotPossible
    node, number, pid = havoc.dice.choice(sorted(found))
    havoc.note(node)
    havoc.end(pid)
    return f"hot spare {number} on {node}"


# -- controllers ---------------------------------------------------------------------------------------------------------


def kill_flow(havoc: Havoc) -> str:
    """Kill the flow, and start another one."""
    away = havoc.dice.uniform(0.0, 2.0)
    havoc.note(seconds=away)
    havoc.job.kill_flow()
    time.sleep(away)
    havoc.job.begin_flow()
    return f"for {away:.1f} s"


def kill_flow_and_rank(havoc: Havoc) -> str:
    """End a rank and, a moment later, the flow that is to answer that."""
    one = havoc.a_rank()
    havoc.end_rank(one)
    time.sleep(havoc.dice.uniform(0.0, 0.3))
    return f"rank {one.rank} on {one.node}, and the flow {kill_flow(havoc)}"


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def newest_of_two(havoc: Havoc) -> Path:
    """Return the newest complete checkpoint; there is another one."""
    whole = [one for one in manifest.candidates(havoc.job.checkpoints) if manifest.looks_complete(one)]
    if len(whole) < 2:  # noqa: PLR2004 (the last one is left alone: nobody could go back to another)
        raise NotPossible
    return max(whole, key=manifest.step_of)


def flip_bit(havoc: Havoc) -> str:
    """Flip a bit in the newest checkpoint."""
    folder = newest_of_two(havoc)
    try:
        place = next(folder.glob("*.distcp"))
        data = bytearray(place.read_bytes())
        data[len(data) // 2] ^= 1
        with place.open("r+b") as file:
            file.write(data)
    except (OSError, StopIteration) as error:  # it was the oldest a moment later, and was removed
        raise NotPossible from error
    return folder.name


def remove_checkpoint(havoc: Havoc) -> str:
    """Take a file of the newest checkpoint away."""
    folder = newest_of_two(havoc)
    try:
        next(folder.glob("*.distcp")).unlink()
    except (OSError, StopIteration) as error:
        raise NotPossible from error
    return folder.name


def fill_disk(havoc: Havoc) -> str:
    """Use up the space for checkpoints for a while."""
    if not havoc.own_disk:
        raise NotPossible
    filler = havoc.job.checkpoints / "filler"
    written = 0
    try:
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while written < DISK_BYTES:
                written += file.write(bytes(1 << 12))
        time.sleep(2.0)
    finally:
        filler.unlink(missing_ok=True)
    return f"with {written:,} bytes for 2 s"


KINDS: Final[dict[str, Callable[[Havoc], str]]] = {
    "rank-sigkill": by_signal(signal.SIGKILL),
    "rank-sigsegv": by_signal(signal.SIGSEGV),
    "rank-sigabrt": by_signal(signal.SIGABRT),
    "rank-stopped": stop,
    "rank-raises": raise_,
    "rank-exits": in_a_step("os._exit(7)"),
    "rank-hangs": in_a_step("stuck_in_user_code()"),
    "rank-slow": slow,
    "wrong-collective": in_a_step("dist.broadcast(torch.zeros(4), 0)"),
    "connections-cut": in_a_step("cut_connections()"),
    "two-ranks-killed": kill_two,
    "all-ranks-killed": kill_all,
    "killed-in-recovery": kill_in_recovery,
    "hangs-at-first-step": hang_at_first_step,
    "node-power-cut": power_off,
    "node-cut-off": cut_node,
    "agent-killed": kill_agent,
    "agent-stalls": stall_agent,
    "memory-server-killed": kill_part("holdfast.agent.memstore.server"),
    "lookout-killed": kill_part("holdfast.agent.monitor"),
    "hot-spare-killed": kill_hot_spare,
    "flow-killed": kill_flow,
    "flow-and-rank-killed": kill_flow_and_rank,
    "checkpoint-bit-flipped": flip_bit,
    "checkpoint-file-removed": remove_checkpoint,
    "disk-full": fill_disk,
}
"""Each kind of fault with its injector."""
