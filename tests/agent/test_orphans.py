"""No worker is ever orphaned, nor anything it has forked, whatever is killed in whatever order."""

from __future__ import annotations

import os
import signal
import sys
from itertools import permutations
from pathlib import Path

import pytest

from holdfast.host.process import is_alive, kill
from tests.agent.rig import CLIENT, Flow, Node
from tests.waiting import wait_until

FAMILY = (
    CLIENT
    + """
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
place = sys.argv[0] + ".pids" + os.environ["RANK"]
def note():
    with open(place, "a") as file:
        file.write(f"{os.getpid()}\\n")
nap = "import sys, os, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\\\n'); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", nap, place])
subprocess.Popen([sys.executable, "-c", nap, place], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note()
        time.sleep(600)
    os._exit(0)
if os.fork() == 0:
    note()
    os.setsid()
    child = os.fork()
    if child == 0:
        note()
    time.sleep(600)
while not os.path.exists(place) or open(place).read().count("\\n") < 5:
    time.sleep(0.01)
hello()
time.sleep(600)
"""
)
"""A worker with a plain child, one in a session of its own, a daemon forked twice, and a family in a session; deaf to gentle signals."""

ALONE = [("kill agent",), ("kill subreaper",), ("stop agent", "kill agent"), ("stop agent", "kill subreaper")]
TWO = [*permutations(("kill agent", "kill subreaper")), *permutations(("kill sentinel", "kill agent"))]
ODD = [
    ("kill sentinel", "kill subreaper"),
    ("stop agent", "kill agent", "kill subreaper"),
    ("stop agent", "kill subreaper", "kill agent"),
    ("stop sentinel", "kill agent"),
    ("stop subreaper", "kill agent", "kill subreaper"),
    ("term subreaper", "kill subreaper"),
    ("term agent", "kill agent"),
]


def family(node: Node, flow: Flow, *, warm: bool = False) -> list[int]:
    """Start two workers with children of all kinds; return the pids of all."""
    script = node.script(FAMILY)
    flow.prepare(node, [script] if warm else [sys.executable, script], warm=warm)
    flow.start(1, (0, 1))
    pids = []
    for rank in (0, 1):
        flow.wait("worker.hello", rank=rank)
        pids += [flow.pid(rank), *map(int, Path(f"{script}.pids{rank}").read_text().split())]
    assert all(is_alive(pid, None) for pid in pids)
    assert len(set(pids)) == 12
    return pids


def carry_out(node: Node, acts: tuple[str, ...]) -> None:
    """Stop and kill one after the other, without a pause."""
    pids = {"agent": node.agent, "subreaper": node.subreaper_pid, "sentinel": node.sentinel}
    numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
    for act in acts:
        verb, whom = act.split()
        kill(pids[whom], numbers[verb])  # it may have ended with the one before


@pytest.mark.parametrize("acts", [*ALONE, *TWO, *ODD], ids=", ".join)
def test_nothing_outlives_its_agent(node: Node, flow: Flow, acts: tuple[str, ...]) -> None:
    """Nobody helps from outside: no flow, no fence, no later agent."""
    pids = family(node, flow)
    carry_out(node, acts)
    node.wait_until_empty()
    assert [pid for pid in pids if is_alive(pid, None)] == []


def test_a_sentinel_that_is_killed_is_replaced(node: Node, flow: Flow) -> None:
    """Its loss costs nothing, and the next one does the same."""
    pids = family(node, flow)
    for _ in range(3):
        before = node.sentinel
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: node.sentinel != before, seconds=60)  # noqa: B023 (at once)
    flow.ok("ping")
    carry_out(node, ("kill agent", "kill subreaper"))
    node.wait_until_empty()
    assert [pid for pid in pids if is_alive(pid, None)] == []


def test_a_stopped_subreaper_does_not_save_the_orphans(node: Node, flow: Flow) -> None:
    """The sentinel needs nobody."""
    pids = family(node, flow)
    carry_out(node, ("stop subreaper", "kill agent"))
    wait_until(lambda: not [pid for pid in pids if is_alive(pid, None)], seconds=60)
    os.kill(node.subreaper_pid, signal.SIGCONT)
    node.ended()
    node.wait_until_empty()


def test_warm_started_workers_are_not_orphaned_either(node: Node, flow: Flow) -> None:
    """They are forks of a starter, and children of the agent like all others; the starter goes as well."""
    pids = family(node, flow, warm=True)
    carry_out(node, ("kill agent",))
    node.wait_until_empty()
    assert [pid for pid in pids if is_alive(pid, None)] == []


def test_a_stop_ends_all_forks(node: Node, flow: Flow) -> None:
    """When it is said that all are gone, they are."""
    pids = family(node, flow)
    flow.stop(1, signal.SIGTERM, 0.1)
    assert [pid for pid in pids if is_alive(pid, None)] == []


def test_an_end_ends_all_forks(node: Node, flow: Flow) -> None:
    """And the agent with it."""
    pids = family(node, flow)
    flow.ok("end")
    assert node.ended() == 0
    assert [pid for pid in pids if is_alive(pid, None)] == []


def test_a_daemon_that_has_dropped_its_mark_ends_with_the_agent(node: Node, flow: Flow) -> None:
    """An orphan comes to the agent or its subreaper whatever its environment says."""
    code = """
import os, subprocess, sys
code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code], env={}, start_new_session=True)
"""
    flow.prepare(node, [sys.executable, node.script(code)])
    flow.start(1)
    flow.exited()
    pid = int(wait_until(lambda: node.output().splitlines()[1:], seconds=60)[0])
    assert is_alive(pid, None)
    carry_out(node, ("kill agent",))
    node.ended()
    assert not is_alive(pid, None)


def test_what_outlives_agent_subreaper_and_sentinel_is_found_by_its_mark(node: Node, flow: Flow, tmp_path: Path) -> None:
    """Killed in one instant, they leave the kernel to end the workers; their forks wait for a fence or for the next agent."""
    pids = family(node, flow)
    os.kill(node.subreaper_pid, signal.SIGSTOP)
    carry_out(node, ("kill sentinel", "kill agent", "kill subreaper"))
    node.ended()
    wait_until(lambda: not is_alive(flow.pid(0), None) and not is_alive(flow.pid(1), None), seconds=60)
    assert [pid for pid in pids if is_alive(pid, None)], "the forks are there still"
    successor = Node(tmp_path).begin()
    assert successor.said["ready"]
    assert [pid for pid in pids if is_alive(pid, None)] == []
    successor.end()
