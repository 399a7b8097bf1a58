"""Workers under a real agent: started, watched, stopped."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from holdfast.control.config.worker_env import rank_environments
from holdfast.control.state.rank_table import RankTable
from holdfast.host.process import is_alive, state_of
from tests.agent.rig import CLIENT, SECONDS, Flow, Node
from tests.waiting import wait_until

FATAL = sorted(
    signal.valid_signals()
    - {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH}
    - set(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
)
"""Every signal whose default action is to end a process."""


def _default(number: int) -> str:
    """Return what gives a signal its default action: Python has its own mind about SIGINT and SIGPIPE."""
    return "pass" if number == signal.SIGKILL else f"signal.signal({number}, signal.SIG_DFL)"


class Runs:
    """One agent for many short generations."""

    def __init__(self, node: Node, flow: Flow) -> None:
        self.node, self.flow, self._numbers = node, flow, count(1)

    def run(self, code: str, *ranks: int, **environment: str) -> int:
        """Start a generation of workers that run *code*; return its number."""
        generation = next(self._numbers)
        self.flow.prepare(self.node, [sys.executable, self.node.script(code)])
        self.flow.start(generation, ranks or (0,), **environment)
        return generation


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Give an agent that all tests of this file share; each leaves no worker."""
    node = Node(tmp_path_factory.mktemp("n")).begin()
    with node.flow() as flow:
        yield Runs(node, flow.attach(0))
    node.end()


@pytest.mark.parametrize("code", [0, 1, 2, 77, 255])
def test_an_exit_is_seen_with_its_code(runs: Runs, code: int) -> None:
    """And with what the worker printed last, unless it ended well."""
    generation = runs.run(f"print('last words'); raise SystemExit({code})")
    end = runs.flow.exited(generation=generation)
    assert (end["code"], end["signal"], end["ordered"], end["finished"], end["oom"]) == (code, None, False, True, None)
    assert end["output"] == "last words\n"
    assert end["pid"] == runs.flow.pid(generation=generation)


def test_logs_are_their_users_alone(runs: Runs) -> None:
    """Also in a folder that was everybody's to read: scripts print what is nobody else's."""
    runs.node.logs.mkdir(exist_ok=True)
    runs.node.logs.chmod(0o755)
    log = runs.node.logs / "rank-0.log"
    log.unlink(missing_ok=True)
    runs.flow.exited(generation=runs.run("print('a secret')"))
    assert "a secret" in log.read_text()
    assert (stat.S_IMODE(runs.node.logs.stat().st_mode), stat.S_IMODE(log.stat().st_mode)) == (0o700, 0o600)


@pytest.mark.parametrize("number", FATAL, ids=lambda number: signal.Signals(number).name)
def test_a_death_by_signal_is_seen_with_its_number(runs: Runs, number: int) -> None:
    """Each signal, sent from outside, at its default action: the agent hands none down ignored or blocked."""
    generation = runs.run(CLIENT + f"{_default(number)}; hello(); time.sleep(600)")
    runs.flow.wait("worker.hello", generation=generation)
    os.kill(runs.flow.pid(generation=generation), number)
    end = runs.flow.exited(generation=generation)
    assert (end["code"], end["signal"], end["ordered"]) == (None, number, False)


def test_a_worker_begins_with_no_signal_ignored_or_blocked(runs: Runs) -> None:
    """SIGPIPE and SIGXFSZ are Python's own doing; those above 31 are the C library's (its posix_spawn ignores 32, as under make)."""
    generation = runs.run("for line in open('/proc/self/status'):\n    if line[:6] in ('SigBlk', 'SigIgn'): print(line.split()[1])")
    runs.flow.exited(generation=generation)
    blocked, ignored = (int(line, 16) for line in runs.node.output().splitlines()[-2:])
    assert blocked == 0
    assert ignored & (2**31 - 1) & ~(1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)) == 0


def test_a_worker_that_ends_in_the_instant_it_was_started_is_not_lost(runs: Runs) -> None:
    """Its start is reported before its end, whichever the agent learned of first."""
    for _ in range(5):
        generation = next(runs._numbers)
        runs.flow.prepare(runs.node, ["/bin/true"])
        runs.flow.start(generation, range(8))
        for rank in range(8):
            end = runs.flow.exited(rank, generation=generation)
            assert end["code"] == 0
            assert runs.flow.wait("worker.started", rank=rank, generation=generation)["seq"] < end["seq"]


def test_a_stop_and_a_continuation_are_seen(runs: Runs) -> None:
    """A stopped worker lives, and does nothing."""
    generation = runs.run(CLIENT + "hello(); time.sleep(600)")
    runs.flow.wait("worker.hello", generation=generation)
    pid = runs.flow.pid(generation=generation)
    os.kill(pid, signal.SIGSTOP)
    assert runs.flow.wait("worker.stopped", generation=generation)["signal"] == signal.SIGSTOP
    runs.flow.until(lambda: runs.flow.heartbeats and runs.flow.heartbeats[-1]["ranks"].get("0", {}).get("process") == "T")
    os.kill(pid, signal.SIGCONT)
    runs.flow.wait("worker.continued", generation=generation)
    runs.flow.stop(generation)


def test_the_environment_of_torchrun_reaches_the_workers(runs: Runs) -> None:
    """With the node's own variables; the job's come from its plan."""
    node, flow = runs.node, runs.flow
    generation = next(runs._numbers)
    flow.prepare(
        node, [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"], environment={"OF_THE_JOB": "1", "RANK": "x"}
    )
    membership = {"other": [0], "node": [1, 2]}
    rank_table = RankTable.fresh(generation, membership, ("127.0.0.1", 12345), every=7)
    places = rank_environments(membership, generation=generation, rank_table=rank_table, job="name")["node"]
    flow.ok("start", generation=generation, membership=membership, workers=places)
    for rank in (1, 2):
        flow.exited(rank, generation=generation)
        seen = json.loads(node.output(rank).splitlines()[-1])
        assert seen["RANK"] == seen["ROLE_RANK"] == str(rank)
        assert seen["HOLDFAST_SAVE_EVERY"] == "7"
        assert seen["LOCAL_RANK"] == str(rank - 1)
        assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"], seen["GROUP_RANK"], seen["GROUP_WORLD_SIZE"]) == ("3", "2", "1", "2")
        assert (seen["MASTER_ADDR"], seen["MASTER_PORT"], seen["TORCHELASTIC_RUN_ID"]) == ("127.0.0.1", "12345", "name")
        assert (seen["HOLDFAST_NODE"], seen["HOLDFAST_GENERATION"], seen["OF_THE_JOB"]) == ("node", str(generation), "1")
        assert seen["HOLDFAST_SOCKET"] == str(node.folder / "agent.sock")


def test_each_rank_has_one_log_over_all_generations(runs: Runs) -> None:
    """What an earlier generation printed is not taken for the next one's last words; any bytes are fine."""
    first = runs.run("import os; os.write(1, b'caf\\xe9 \\0\\xff ' + os.environ['RANK'].encode()); os._exit(1)", 0, 1)
    ends = [runs.flow.exited(rank, generation=first) for rank in (0, 1)]
    assert [end["output"] for end in ends] == [f"caf\ufffd \ufffd\ufffd {rank}" for rank in (0, 1)]
    second = runs.run("import sys; sys.stderr.write('x' * 20_000 + 'the end'); sys.exit(1)", 0, 1)
    for rank in (0, 1):
        output = runs.flow.exited(rank, generation=second)["output"]
        assert len(output) == 8192
        assert output.endswith("the end")
        whole = (runs.node.logs / f"rank-{rank}.log").read_bytes()
        assert whole.index(b"caf\xe9") < whole.index(f"--- holdfast: rank {rank}, generation {second} of job job\n".encode())


def test_input_is_at_its_end(runs: Runs) -> None:
    """A script that asks a question must not wait for ever."""
    generation = runs.run("input()")
    assert "EOFError" in runs.flow.exited(generation=generation)["output"]


@pytest.mark.parametrize("argv", [["/no/such/program"], ["/etc/passwd"], ["/"]])
def test_a_command_that_cannot_be_run_is_reported_with_its_reason(runs: Runs, argv: list[str]) -> None:
    """Missing, not executable, a folder."""
    generation = next(runs._numbers)
    runs.flow.prepare(runs.node, argv)
    runs.flow.start(generation, (0, 1))
    for rank in (0, 1):
        failed = runs.flow.wait("start.failed", rank=rank, generation=generation)
        assert failed["errno"] in {2, 13}
        assert argv[0] in failed["why"]
    runs.flow.stop(generation)


def test_a_missing_folder_is_reported(runs: Runs) -> None:
    """The job's directory may have been removed."""
    generation = next(runs._numbers)
    runs.flow.prepare(runs.node, ["/bin/true"], directory=str(runs.node.work / "gone"))
    runs.flow.start(generation)
    assert "gone" in runs.flow.wait("start.failed", generation=generation)["why"]


def test_logs_that_cannot_be_written_are_reported(runs: Runs) -> None:
    """A worker without a log would take its reasons along."""
    generation = next(runs._numbers)
    logs = runs.node.work / "logs"
    (logs / "rank-0.log").mkdir(parents=True)
    runs.flow.prepare(runs.node, ["/bin/true"], log_directory=str(logs))
    runs.flow.start(generation, (0, 1))
    assert "rank-0.log" in runs.flow.wait("start.failed", rank=0, generation=generation)["why"]
    assert runs.flow.exited(1, generation=generation)["code"] == 0
    (runs.node.work / "file").touch()
    refused = runs.flow.order("prepare", **{**PLAN, "log_directory": str(runs.node.work / "file" / "logs"), "directory": "/"})
    assert refused["ok"] is False
    assert "Not a directory" in refused["why"]


PLAN = {"lease": 60.0, "warm": False, "argv": ["/bin/true"], "environment": {}}


def test_a_gentle_stop_lets_workers_end_by_themselves(runs: Runs) -> None:
    """SIGTERM comes once: frameworks take a second one as an order to hurry."""
    code = """
import signal
times = 0
def handler(*_):
    global times
    times += 1
signal.signal(signal.SIGTERM, handler)
hello()
while not times:
    time.sleep(0.01)
time.sleep(0.3)
print("times", times, flush=True)
"""
    generation = runs.run(CLIENT + code, 0, 1)
    for rank in (0, 1):
        runs.flow.wait("worker.hello", rank=rank, generation=generation)
    runs.flow.stop(generation, signal.SIGTERM, SECONDS)
    for rank in (0, 1):
        end = runs.flow.exited(rank, generation=generation)
        assert (end["code"], end["ordered"]) == (0, True)
        assert runs.node.output(rank).endswith("times 1\n")


def test_a_worker_that_ignores_the_gentle_stop_is_killed(runs: Runs) -> None:
    """After the grace that the order gives."""
    generation = runs.run(CLIENT + "signal.signal(signal.SIGTERM, signal.SIG_IGN); hello(); time.sleep(600)")
    runs.flow.wait("worker.hello", generation=generation)
    runs.flow.stop(generation, signal.SIGTERM, 0.2)
    end = runs.flow.exited(generation=generation)
    assert (end["signal"], end["ordered"]) == (signal.SIGKILL, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_worker_is_ended_too(runs: Runs, number: int) -> None:
    """A stopped process takes no SIGTERM until it continues."""
    generation = runs.run(CLIENT + "hello(); time.sleep(600)")
    runs.flow.wait("worker.hello", generation=generation)
    os.kill(runs.flow.pid(generation=generation), signal.SIGSTOP)
    runs.flow.wait("worker.stopped", generation=generation)
    runs.flow.stop(generation, number, SECONDS)
    assert runs.flow.exited(generation=generation)["signal"] == number


def test_stopping_twice_or_stopping_nothing_is_answered_the_same(runs: Runs) -> None:
    """The flow may have died between its order and its note of it."""
    generation = runs.run("")
    runs.flow.exited(generation=generation)
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        before = len(runs.flow.events)
        runs.flow.ok("stop", generation=generation, signal=int(number), grace=5.0)
        runs.flow.until(lambda: any(event["event"] == "workers.exited" for event in runs.flow.events[before:]))  # noqa: B023 (at once)


def test_a_harder_stop_overtakes_a_gentle_one(runs: Runs) -> None:
    """A fault comes while a person's stop waits for the workers."""
    generation = runs.run(CLIENT + "signal.signal(signal.SIGTERM, signal.SIG_IGN); hello(); time.sleep(600)")
    runs.flow.wait("worker.hello", generation=generation)
    runs.flow.ok("stop", generation=generation, signal=15, grace=600.0)
    runs.flow.stop(generation)


def test_forks_of_a_worker_that_ends_by_itself_go_with_it(runs: Runs) -> None:
    """Those in its process group at once, daemons with the stop of the generation."""
    generation = runs.run(
        CLIENT
        + """
plain = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
apart = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(plain.pid, apart.pid, flush=True)
os._exit(3)
"""
    )
    assert runs.flow.exited(generation=generation)["code"] == 3
    plain, apart = map(int, runs.node.output().splitlines()[-1].split())
    wait_until(lambda: not is_alive(plain, None), seconds=60)
    assert is_alive(apart, None)
    runs.flow.stop(generation)
    assert not is_alive(apart, None), "it was said that nothing is left"


def test_all_have_exited_when_that_is_reported(runs: Runs) -> None:
    """Daemons that fork daemons included: the next generation needs their ports and their memory."""
    code = """
def daemon(depth):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if depth:
            daemon(depth - 1)
        with open(sys.argv[0] + ".pids", "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(600)
        os._exit(0)
place = sys.argv[0] + ".pids"
daemon(3)
while not os.path.exists(place) or open(place).read().count("\\n") < 4:
    time.sleep(0.01)
hello()
time.sleep(600)
"""
    for _ in range(3):
        place = runs.node.work / "script.py.pids"
        place.unlink(missing_ok=True)
        generation = runs.run(CLIENT + code)
        runs.flow.wait("worker.hello", generation=generation)
        pids = [int(line) for line in place.read_text().split()]
        assert len(pids) == 4
        runs.flow.stop(generation)
        assert [pid for pid in pids if is_alive(pid, None)] == []


def test_a_generation_starts_where_the_one_before_has_left_nothing(runs: Runs) -> None:
    """Orders for a generation that is over, or out of turn, change nothing."""
    generation = runs.run(CLIENT + "hello(); time.sleep(600)")
    runs.flow.wait("worker.hello", generation=generation)
    assert "still run" in runs.flow.order("start", generation=generation + 1, membership={}, workers=[])["why"]
    assert "is over" in runs.flow.order("stop", generation=generation - 1, signal=9, grace=0.0)["why"]
    runs.flow.stop(generation)
    assert "not newer" in runs.flow.order("start", generation=generation, membership={}, workers=[])["why"]


def test_nothing_of_the_agent_leaks_into_a_worker(runs: Runs) -> None:
    """No descriptor, no umask, a session of its own."""
    generation = runs.run("import os\nprint(sorted(os.listdir('/proc/self/fd')), os.umask(0) == 0o022, os.getsid(0) == os.getpid())")
    runs.flow.exited(generation=generation)
    assert runs.node.output().splitlines()[-1] == "['0', '1', '2', '3'] True True", "3 is the one that listdir reads"


def test_an_agent_keeps_no_zombie(runs: Runs) -> None:
    """Whoever ends under it is reaped, orphans of workers included."""
    generation = runs.run("import os\nfor _ in range(20):\n    if os.fork() == 0:\n        os.setsid()\n        os._exit(0)\n")
    runs.flow.exited(generation=generation)
    runs.flow.stop(generation)
    children = Path(f"/proc/{runs.node.agent}/task/{runs.node.agent}/children")
    wait_until(lambda: not [pid for pid in children.read_text().split() if state_of(int(pid)) == "Z"], seconds=60)
