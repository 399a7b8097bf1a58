"""The warm starter: it forks workers, it can be lost at any time, and nobody depends on it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent import schema
from holdfast.agent.node.identity import Identity
from holdfast.agent.workers import spawner
from holdfast.agent.workers.spawner import Spawner, SpawnPlan
from holdfast.host.process import NODE_MARK, children_of, is_alive, mark_of, sweep
from holdfast.protocol import Message
from tests.agent.rig import CLIENT, Flow, Node
from tests.mentions import mentions
from tests.waiting import wait_until

QUIET = "import time; time.sleep(600)"


def fork_server_of(node: Node) -> int:
    """Return the pid of the warm starter, when the agent has no other child."""
    (pid,) = wait_until(lambda: children_of(node.agent), seconds=60)
    return pid


def wait_for_count(flow: Flow, event: str, times: int) -> None:
    """Wait until an event has come so many times."""
    flow.until(lambda: sum(one["event"] == event for one in flow.events) >= times, f"{event}, {times} times")


def test_workers_that_end_in_the_instant_they_were_forked_are_not_lost(node: Node, flow: Flow) -> None:
    """The starter reports each before it may run, and the agent reads that before it reaps any."""
    flow.prepare(node, [node.script("import os; os._exit(int(os.environ['RANK']))")], warm=True)
    for generation in range(1, 8):
        flow.start(generation, range(6))
        for rank in range(6):
            end = flow.exited(rank, generation=generation)
            assert end["code"] == rank
            assert flow.wait("worker.started", rank=rank, generation=generation)["pid"] == end["pid"]
    assert not any(event["event"] == "start.failed" for event in flow.events)


@pytest.mark.parametrize("argv", [["--key", "secret"], ["-m"]])
def test_ps_shows_which_rank_of_which_job_a_worker_is(node: Node, flow: Flow, argv: list[str]) -> None:
    """With its script, whose arguments may be secret, and with the environment by which others find it."""
    script = node.script(QUIET)
    what, argv = (["-m", "http.server"], ["-m", "http.server", "0"]) if argv == ["-m"] else ([Path(script).name], [script, *argv])
    flow.prepare(node, argv, warm=True)
    flow.start(1, [3], HOLDFAST_JOB="gpt-small")
    pid = flow.pid(3)
    ps = ["ps", "-ww", "-o", "args=", "-p", str(pid)]

    def shown() -> str:
        text = subprocess.check_output(ps, text=True).strip()
        return text if text.startswith("holdfast") else ""

    assert wait_until(shown, seconds=60, explain=node.output) == f"holdfast: rank 3 of job gpt-small ({' '.join(what)})"
    assert f"{NODE_MARK}={mark_of(node.folder)}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_a_fork_server_that_is_lost_while_idle_is_replaced(node: Node, flow: Flow) -> None:
    """The next recovery is to be quick again."""
    flow.prepare(node, [node.script("import json, sys; print('warm' if 'multiprocessing.process' in sys.modules else 'cold')")], warm=True)
    flow.wait("fork-server.ready")
    first = fork_server_of(node)
    os.kill(first, signal.SIGKILL)
    flow.until(lambda: [event["event"] for event in flow.events] == ["fork-server.ready", "fork-server.exited", "fork-server.ready"])
    assert fork_server_of(node) != first
    flow.start(1)
    flow.exited()
    assert node.output().endswith("\nwarm\n")


def test_a_fork_server_that_is_lost_over_and_over_is_given_up(node: Node, flow: Flow) -> None:
    """Something on this node wants it gone; workers start cold then."""
    flow.prepare(node, [node.script("print('here')")], warm=True)
    for lost in range(spawner.MAX_FORK_SERVERS):
        wait_for_count(flow, "fork-server.ready", lost + 1)
        os.kill(fork_server_of(node), signal.SIGKILL)
        wait_for_count(flow, "fork-server.exited", lost + 1)
    flow.start(1)
    assert flow.exited()["code"] == 0
    assert node.output().endswith("here\n")
    assert sum(event["event"] == "fork-server.ready" for event in flow.events) == spawner.MAX_FORK_SERVERS


@pytest.fixture
def slow(node: Node) -> dict[str, Any]:
    """Give the plan of a job whose starter imports without end."""
    (node.work / "slow.py").write_text("import time; time.sleep(600)")
    script = node.script(CLIENT + "hello(); time.sleep(600)")
    return {"argv": [script], "warm": True, "preload": ["slow"], "environment": {"PYTHONPATH": str(node.work)}}


def test_waiting_starts_of_a_lost_fork_server_are_done_without_it(node: Node, flow: Flow, slow: dict[str, Any]) -> None:
    """They start cold; one that never became of use is not tried again."""
    flow.prepare(node, **slow)
    flow.start(1, (0, 1))
    os.kill(fork_server_of(node), signal.SIGKILL)
    for rank in (0, 1):
        flow.wait("worker.hello", rank=rank)
    assert not any(event["event"] in {"start.failed", "fork-server.ready"} for event in flow.events)
    flow.stop(1)
    assert children_of(node.agent) == []


def test_a_stop_does_not_wait_for_a_fork_server_that_is_not_ready(node: Node, flow: Flow, slow: dict[str, Any]) -> None:
    """What was not started yet never is."""
    flow.prepare(node, **slow)
    flow.start(1, (0, 1))
    flow.stop(1, signal.SIGTERM, 600.0)
    os.kill(fork_server_of(node), signal.SIGKILL)
    flow.wait("fork-server.exited")
    flow.ok("ping")
    assert [event["event"] for event in flow.events] == ["workers.exited", "fork-server.exited"]


def test_an_end_does_not_wait_for_a_fork_server_either(node: Node, flow: Flow, slow: dict[str, Any]) -> None:
    """Nor for a stopped one."""
    flow.prepare(node, **slow)
    flow.start(1, (0, 1))
    os.kill(fork_server_of(node), signal.SIGSTOP)
    flow.ok("end")
    assert node.ended() == 0


def test_a_stop_right_after_a_start_leaves_nothing(node: Node, flow: Flow) -> None:
    """Whatever the starter was just about."""
    flow.prepare(node, [node.script(QUIET)], warm=True)
    flow.wait("fork-server.ready")
    for generation in range(1, 31):
        flow.start(generation, range(3))
        flow.stop(generation, signal.SIGTERM if generation % 2 else signal.SIGKILL, 5.0)
        assert len(children_of(node.agent)) == 1
    assert all(event["ordered"] for event in flow.events if event["event"] == "worker.exited")


def test_a_fork_server_killed_in_the_middle_of_starts_loses_no_rank_and_doubles_none(node: Node, flow: Flow) -> None:
    """Each rank is forked or started cold, and there is one of it."""
    flow.prepare(node, [node.script(CLIENT + "hello(); time.sleep(600)")], warm=True)
    for generation in range(1, 9):
        wait_for_count(flow, "fork-server.ready", generation)
        fork_server = fork_server_of(node)
        flow.ok("ping")
        flow.start(generation, range(4))
        for _ in range(generation * 40):
            os.getppid()
        os.kill(fork_server, signal.SIGKILL)
        for rank in range(4):
            flow.wait("worker.hello", rank=rank, generation=generation)
        wait_for_count(flow, "fork-server.ready", generation + 1)
        workers = {flow.pid(rank, generation=generation) for rank in range(4)}
        assert len(workers) == 4
        assert workers < set(children_of(node.agent))
        wait_until(lambda: len(children_of(node.agent)) == 5, seconds=60)  # a fork that was not reported yet ends by itself
        flow.stop(generation)


def test_a_stuck_fork_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time the workers it owes start cold; what it might still have forked ends by itself."""
    monkeypatch.setattr(spawner, "ANSWER_SECONDS", 0.2)
    born: dict[int, int] = {}
    events: list[str] = []
    others = children_of(os.getpid())  # such as servers that all tests share: they go on
    me = Identity(directory=tmp_path, node="node", cluster="local", id=f"id{os.getpid()}")
    with selectors.DefaultSelector() as selector:
        under_test = Spawner(me, selector, lambda event, **_facts: events.append(event))
        under_test.spawned = born.__setitem__
        facts: Message = {"job": "j", "lease": 1, "warm": True, "python": sys.executable, "preload": [], "argv": ["-c", QUIET]}
        under_test.prepare(schema.read_record(SpawnPlan, {**facts, "directory": "/", "environment": {}, "log_directory": str(tmp_path)}))

        def reported_events() -> list[str]:
            for key, mask in selector.select(0.01):
                key.data(mask)
            return events

        try:
            wait_until(reported_events, seconds=60)
            assert under_test.fork_server_pid is not None
            os.kill(under_test.fork_server_pid, signal.SIGSTOP)
            under_test.begin(3, {}, tmp_path / "rank-3.log")
            assert not born
            due = under_test.due()
            assert due is not None
            under_test.tick(due)
            assert list(born) == [3]
            assert events == ["fork-server.ready", "fork-server.exited"]
            wait_until(lambda: reported_events()[2:] == ["fork-server.ready"], seconds=60)
        finally:
            under_test.end()
            sweep(NODE_MARK, mark_of(tmp_path))
            for pid in set(children_of(os.getpid())) - set(others):
                os.waitpid(pid, 0)


def test_what_cannot_be_preloaded_is_left_to_the_script(node: Node, flow: Flow) -> None:
    """Missing, broken, or of the kind that ends the program."""
    for name, text in (("broken", "1 / 0"), ("rude", "raise SystemExit(3)"), ("fine", "print('imported', end='')")):
        (node.work / f"{name}.py").write_text(text)
    preload = ["missing", "broken", "rude", "fine"]
    environment = {"PYTHONPATH": str(node.work)}
    flow.prepare(
        node,
        [node.script("import sys; print('fine' in sys.modules, 'broken' in sys.modules)")],
        warm=True,
        preload=preload,
        environment=environment,
    )
    assert flow.wait("fork-server.ready")["preloaded"] == ["fine"]
    flow.start(1)
    flow.exited()
    assert node.output().splitlines()[1:] == ["True False"], "what was printed ahead is not printed again"
    assert mentions((node.folder / "fork-server.log").read_text(), "broken", "ZeroDivisionError")


def test_an_interpreter_without_holdfast_is_served_too(node: Node, flow: Flow, tmp_path: Path) -> None:
    """The job's own environment may have nothing but its packages, and gets none of ours."""
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    code = """
import sys, importlib.util
import holdfast.runtime.agent_client
print(sys.prefix, importlib.util.find_spec("pytest"), holdfast.runtime.agent_client.link().attached)
raise ValueError("raised")
"""
    flow.prepare(
        node, [node.script(code)], warm=True, python=python, environment={"PYTHONPATH": ""}, preload=["json", "holdfast.runtime.session"]
    )
    assert flow.wait("fork-server.ready")["preloaded"] == ["json"]
    flow.start(1)
    assert flow.exited()["raised"]["message"] == "raised"
    assert node.output().splitlines()[1] == f"{tmp_path / 'bare'} None True"


def test_an_interpreter_that_is_none_is_tried_once(node: Node, flow: Flow) -> None:
    """A starter that dies at once would do so again; the script's own start then says what is wrong."""
    flow.prepare(node, [node.script("")], warm=True, python="/bin/true")
    flow.wait("fork-server.exited")
    flow.start(1)
    assert flow.exited()["code"] == 0
    assert [event["event"] for event in flow.events] == ["fork-server.exited", "worker.started", "worker.exited"]


def test_an_interpreter_that_is_missing_is_refused(node: Node, flow: Flow) -> None:
    """Before anything is stopped or started; the node stays free."""
    plan = {"job": "job", "lease": 60.0, "warm": True, "preload": [], "argv": ["x.py"], "directory": "/", "environment": {}}
    refused = flow.order("prepare", **plan, python="/no/such/python", log_directory=str(node.logs))
    assert refused["ok"] is False
    assert "/no/such/python" in refused["why"]
    assert flow.ok("about", protocol=1)["job"] is None


def test_a_changed_plan_gets_a_new_fork_server(node: Node, flow: Flow) -> None:
    """What an interpreter reads at its start cannot be changed in a fork."""
    script = node.script("import os, sys; print(os.environ['WHICH'], sys.flags.dont_write_bytecode)")
    for generation, (which, flag) in enumerate((("a", ""), ("b", "1")), start=1):
        flow.prepare(node, [script], warm=True, environment={"WHICH": which, "PYTHONDONTWRITEBYTECODE": flag})
        flow.start(generation)
        flow.exited(generation=generation)
        assert node.output().splitlines()[-1] == f"{which} {len(flag)}"


# -- with torch -------------------------------------------------------------------------------------------------------


class Torch:
    """An agent with a starter that has imported torch."""

    def __init__(self, node: Node, flow: Flow) -> None:
        self.node, self.flow, self._numbers = node, flow, count(1)

    def run(self, code: str, *ranks: int, **environment: str) -> list[str]:
        """Run *code* on some ranks; return what each printed."""
        generation = next(self._numbers)
        Path(self.node.script("")).write_text(code)
        self.flow.start(generation, ranks or (0,), **environment)
        for rank in ranks or (0,):
            end = self.flow.exited(rank, generation=generation)
            assert end["code"] == 0, end["output"]
        return [self.node.output(rank).rpartition(f"generation {generation} of job job\n")[2].strip() for rank in ranks or (0,)]


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torch]:
    """Give one agent with torch imported to all tests that need it."""
    node = Node(tmp_path_factory.mktemp("n")).begin()
    with node.flow() as flow:
        flow.attach(0).prepare(
            node, [node.script("")], warm=True, preload=["numpy", "torch", "torch.distributed"], environment={"PYTHONUNBUFFERED": "1"}
        )
        flow.wait("fork-server.ready")
        yield Torch(node, flow)
    node.end()


def test_random_numbers_differ_between_forks_as_between_interpreters(torch: Torch) -> None:
    """Each library's own stream; a seed set by the script gives the same numbers everywhere."""
    code = """
import json, random, secrets, numpy, torch
free = [random.random(), float(numpy.random.rand()), float(torch.rand(1)), torch.initial_seed(), secrets.token_hex(8)]
free.append(float(numpy.random.default_rng().random()))
random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
print(json.dumps([free, [random.random(), float(numpy.random.rand()), float(torch.rand(1))]]))
"""
    seen = [json.loads(line) for _ in range(2) for line in torch.run(code, 0, 1)]
    for stream in zip(*(free for free, _ in seen), strict=True):
        assert len(set(stream)) == len(stream)
    assert all(seeded == [0.13436424411240122, 0.417022004702574, 0.7576315999031067] for _, seeded in seen)


def test_threads_loaders_and_forks_work_in_a_fork(torch: Torch) -> None:
    """The starter has run no thread and no operator, so nothing of theirs is left half-way."""
    code = """
import os, threading, torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    torch.set_num_threads(2)
    x = torch.randn(400, 400, requires_grad=True)
    (x @ x).relu().sum().backward()
    done = []
    thread = threading.Thread(target=lambda: done.append(torch.ones(1000, 1000).sum().item()))
    thread.start(), thread.join()
    data = torch.arange(8.0)
    loaded = {how: torch.cat(list(DataLoader(data, 4, num_workers=2, multiprocessing_context=how))).tolist() for how in ("fork", "spawn")}
    child = os.fork()
    if child == 0:
        os._exit(int(torch.ones(3).sum().item()))
    print(done, loaded["fork"] == loaded["spawn"] == data.tolist(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), x.grad is not None)
"""
    assert torch.run(code) == ["[1000000.0] True 3 True"]


def test_forks_train_together(torch: Torch) -> None:
    """The variables of torchrun are all that a script needs."""
    code = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print(dist.get_world_size(), x.tolist())
dist.destroy_process_group()
"""
    port = torch.flow.ok("port")["port"]
    said = torch.run(code, 0, 1, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    assert said == ["2 [3.0, 3.0, 3.0]"] * 2


def test_what_a_killed_worker_printed_is_there(torch: Torch) -> None:
    """Nothing waits in a buffer."""
    generation = next(torch._numbers)
    Path(torch.node.script("")).write_text("import os\nprint('the last thing', end='')\nos.kill(os.getpid(), 9)")
    torch.flow.start(generation)
    assert torch.flow.exited(generation=generation)["output"] == "the last thing"
    assert is_alive(torch.node.agent, None)
