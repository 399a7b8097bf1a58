"""A generation that follows another while processes live on: kept workers, hot spares, fresh ones, and those that leave."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from holdfast.host.process import children_of, is_alive, is_ending, state_of
from holdfast.protocol import PROTOCOL, Message
from tests.agent.rig import CLIENT, Flow, Node
from tests.mentions import mentions, one_line_mentions
from tests.waiting import wait_until

GROUPED = (
    CLIENT
    + """
def train(step, **of):
    say(t="resumed", step=step - 1, path=None, **of)
    say(t="beat", step=step, seconds=0.1, loss=0.5, **of)
hello()
if "HOLDFAST_HOT_SPARE" in os.environ:
    say(t="parked", roles=[0, 1], role=1, seconds=0.5, rss=4096, coverage={"kernels": 7})
elif "HOLDFAST_FRESH" not in os.environ:
    say(t="groups")
    train(1)
for line in incoming:
    message = json.loads(line)
    if "re" in message:
        say(t="coverage", answer=message)
        continue
    say(t="coverage", received=message)
    if message["do"] == "regroup":
        if "log" in message:
            log = os.open(message["log"], os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1), os.dup2(log, 2)
        train(10 * message["generation"], generation=message["generation"])
    elif message["do"] == "say":
        for one in message["what"]:
            say(**one)
    elif message["do"] == "exit":
        os._exit(message["code"])
"""
)
"""A worker or hot spare that reports each line it receives, and does what it says."""

TAIL = "def train" + GROUPED.split("def train")[1]

FACTS = {"world": 2, "store": ["127.0.0.1", 29500], "changed": [1], "since": 1}


class Team:
    """A node's workers and hot spares, and what their controller sends them."""

    def __init__(self, node: Node, flow: Flow) -> None:
        self.node, self.flow = node, flow
        flow.prepare(node, [node.script(GROUPED)], warm=True)

    def train(self, *ranks: int) -> None:
        """Start workers, and wait until each has done a step."""
        self.flow.start(1, ranks)
        for rank in ranks:
            self.flow.wait("worker.stepped", rank=rank, generation=1)

    def stand_by(self, *hot_spares: int) -> None:
        """Start hot spares, and wait until each has parked."""
        self.flow.ok(
            "start-hot-spares",
            hot_spares=[{"id": hot_spare, "environment": places(HOLDFAST_HOT_SPARE=str(hot_spare))} for hot_spare in hot_spares],
        )
        for hot_spare in hot_spares:
            self.flow.wait("hot-spare.ready", id=hot_spare)

    def abandon(self, generation: int, kill: Iterable[int] = (), lost: Iterable[int] = ()) -> Message:
        """Give up a generation."""
        return self.flow.ok("abandon", generation=generation, lost=list(lost), kill=list(kill))

    def regroup(self, generation: int, *workers: Message, verb: str = "regroup", **how: Any) -> Message:
        """Have the next generation begin."""
        membership = {"node": [worker["rank"] for worker in workers]}
        return self.flow.order(verb, generation=generation, membership=membership, facts=FACTS, workers=list(workers), **how)

    def say(self, *what: Message, ranks: Iterable[int] = (), hot_spares: Iterable[int] = ()) -> None:
        """Have workers say something."""
        self.flow.ok("forward", ranks=list(ranks), hot_spares=list(hot_spares), message={"do": "say", "what": list(what)})

    def received(self, verb: str, *, generation: int, rank: int) -> Message:
        """Wait until a worker has received a command."""
        wanted = {"do": verb, "generation": generation}

        def found() -> Message | None:
            lines = [event["received"] for event in self.flow.events if "received" in event and event.get("rank") == rank]
            return next((line for line in lines if {**line, **wanted} == line), None)

        return dict(self.flow.until(found, f"{verb} of {generation} received by rank {rank}"))

    def leave_to_commit(self, rank: int) -> Message:
        """Have a worker ask for leave to commit; return the answer."""
        number = len(self.flow.events)
        self.say({"t": "commit-request", "id": number, "step": 1}, ranks=[rank])

        def answered() -> Message | None:
            return next((event["answer"] for event in self.flow.events if event.get("answer", {}).get("re") == number), None)

        return dict(self.flow.until(answered, "leave to commit"))

    def about(self) -> Message:
        """Ask the agent what runs."""
        return self.flow.ok("about", protocol=PROTOCOL)

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        """Return the events of these names, each with its rank or number."""
        return [(event["event"], event.get("rank", event.get("id"))) for event in self.flow.events if event["event"] in names]


def places(**environment: str) -> dict[str, str]:
    """Return a process's variables."""
    return {"RANK": "0", "HOLDFAST_GENERATION": "1", **environment}


def living(team: Team) -> list[int]:
    """Ask the agent who lives."""
    answer = team.flow.ok("living")
    assert answer["generation"] == 1
    return list(answer["ranks"])


def kept(rank: int) -> Message:
    """Let a worker be kept."""
    return {"rank": rank, "from": "kept", "hot_spare": None}


def from_hot_spare(rank: int, hot_spare: int) -> Message:
    """Let a hot spare take over a rank."""
    return {"rank": rank, "from": "hot-spare", "hot_spare": hot_spare, "environment": places(RANK=str(rank))}


def fresh(rank: int, generation: int) -> Message:
    """Let a new process have a rank."""
    environment = places(RANK=str(rank), HOLDFAST_GENERATION=str(generation), HOLDFAST_FRESH="1")
    return {"rank": rank, "from": "fresh", "hot_spare": None, "environment": environment}


@pytest.fixture
def team(node: Node, flow: Flow) -> Team:
    """Give a prepared node."""
    return Team(node, flow)


def test_a_generation_that_is_abandoned_wakes_some_and_kills_others(team: Team) -> None:
    """Whoever lives is notified at once, the unhealthy are killed by order, and nobody commits a checkpoint any more."""
    team.train(0, 1, 2)
    os.kill(team.flow.pid(2), signal.SIGSTOP)
    assert team.leave_to_commit(0)["ok"]
    answer = team.abandon(1, kill=[2, 7], lost=[2])
    assert (answer["notified"], answer["killed"]) == ([0, 1], [2])
    for rank in (0, 1):
        assert team.received("abandon", generation=1, rank=rank) == {"do": "abandon", "generation": 1, "lost": [2]}
    end = team.flow.exited(2)
    assert (end["signal"], end["ordered"]) == (signal.SIGKILL, True)
    leave = team.leave_to_commit(0)
    assert (leave["ok"], leave["why"]) == (False, "generation 1 is over")
    assert team.about()["abandoned"] == 1
    assert team.abandon(1, kill=[1], lost=[1, 2])["notified"] == [0], "it may come again when more is lost"
    assert team.flow.exited(1)["ordered"] is True
    refused = team.flow.order("abandon", generation=2, lost=[], kill=[])
    assert mentions(refused["why"], "generation 2", 1)


def test_kept_hot_spare_and_fresh_workers_make_the_next_generation(team: Team) -> None:
    """Each receives what it needs, steps in the new generation, and the steps of rank 0 are on record under it."""
    team.train(0, 1, 2)
    before = team.flow.pid(1)
    team.stand_by(4)
    hot_spare = int(team.flow.wait("hot-spare.started", id=4)["pid"])
    assert team.about()["hot_spares"] == {"4": {"pid": hot_spare, "ready": True, "local_rank": None, **PARKED}}
    team.abandon(1, kill=[0, 2], lost=[0, 2])
    answer = team.regroup(2, from_hot_spare(0, 4), kept(1), fresh(2, 2))
    assert answer["ok"], answer
    assert team.flow.wait("worker.started", rank=0, generation=2)["pid"] == hot_spare
    assert team.flow.wait("worker.started", rank=0, generation=2)["hot_spare"] == 4
    event = team.flow.wait("worker.kept", rank=1)
    assert (event["pid"], event["generation"], event["grouped"]) == (before, 2, True)
    common = {**FACTS, "do": "regroup", "generation": 2}
    assert team.received("regroup", generation=2, rank=1) == {**common, "rank": 1}
    assert team.received("regroup", generation=2, rank=2) == {**common, "rank": 2}, "after its hello"
    log = team.node.logs / "rank-0.log"
    expected = {**common, "rank": 0, "environment": places(), "log": str(log)}
    assert team.received("regroup", generation=2, rank=0) == expected
    for rank in (0, 1, 2):
        assert team.flow.wait("worker.stepped", rank=rank, generation=2)["step"] == 20
    assert team.flow.wait("steps", generation=2)["steps"][0][0] == 20
    about = team.about()
    assert (about["generation"], about["hot_spares"], about["abandoned"]) == (2, {}, None)
    assert about["grouped"] == [0, 1, 2], "a flow that comes later can keep them"
    assert about["workers"] == {"0": hot_spare, "1": before, "2": team.flow.pid(2, generation=2)}
    assert team.leave_to_commit(1)["ok"]
    assert one_line_mentions(log.read_text(), "holdfast", "rank 0", "generation 2", "job job")
    ends = {rank: team.flow.exited(rank) for rank in (0, 2)}
    assert all(end["ordered"] and end["signal"] == signal.SIGKILL for end in ends.values())
    os.kill(hot_spare, signal.SIGKILL)
    end = team.flow.exited(0, generation=2)
    assert (end["pid"], end["ordered"], end["finished"], end["step"]) == (hot_spare, False, False, 20)


PARKED = {"roles": [0, 1], "role": 1, "seconds": 0.5, "rss": 4096, "coverage": {"kernels": 7}}


def test_living_ranks_are_reported_after_all_received_ends(team: Team) -> None:
    """A rank that has raised is about to end, and one that was killed has ended, whether or not anybody has seen to it."""
    team.train(0, 1, 2)
    assert living(team) == [0, 1, 2]
    team.say({"t": "exception", "type": "ValueError", "message": "no", "traceback": "", "step": 1}, ranks=[1])
    team.flow.wait("worker.raised", rank=1)
    killed = team.flow.pid(2)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: is_ending(killed), seconds=60, explain="the end of rank 2")
    assert living(team) == [0]


def test_a_later_controller_gets_the_new_generation_only(team: Team) -> None:
    """And learns of what came before from the agent itself."""
    team.train(0, 1)
    team.say({"t": "roles", "roles": [[0], [1]], "recordings": "/tapes"}, ranks=[0])
    team.flow.wait("worker.roles")
    team.stand_by(1, 2)
    team.abandon(1, kill=[1], lost=[1])
    assert team.regroup(2, kept(0), from_hot_spare(1, 2))["ok"]
    team.flow.wait("worker.stepped", rank=1, generation=2)
    team.flow.wait("worker.stepped", rank=0, generation=2)
    with team.node.flow(epoch=2) as later:
        about = later.ok("about", protocol=PROTOCOL)
        later.attach(about["since"])
        later.wait("worker.kept", rank=0, generation=2)
        assert later.wait("worker.started", rank=1, generation=2)["hot_spare"] == 2
        later.wait("worker.stepped", rank=1, generation=2)
        assert {event.get("generation", 2) for event in later.events if event["event"] != "worker.exited"} == {2}
    assert (about["roles"], about["grouped"]) == ({"roles": [[0], [1]], "recordings": "/tapes"}, [0, 1])
    assert {key: one["ready"] for key, one in about["hot_spares"].items()} == {"1": True}


def test_a_regroup_that_lacks_anybody_changes_nothing(team: Team) -> None:
    """The flow decides anew, with everybody still there."""
    team.train(0, 1)
    team.stand_by(1)
    team.flow.ok("start-hot-spares", hot_spares=[{"id": 2, "environment": places()}])
    os.kill(team.flow.pid(1), signal.SIGKILL)
    cases = (
        (2, [kept(0), kept(1)], "rank 1 has no living worker here"),
        (2, [kept(0), from_hot_spare(1, 9)], "hot spare 9 does not run here"),
        (1, [kept(0)], "generation 1 is not newer than 1"),
        (2, [kept(0), kept(0)], "names each rank and each hot spare once"),
        (2, [from_hot_spare(0, 1), from_hot_spare(1, 1)], "names each rank and each hot spare once"),
        (2, [{"rank": 0, "from": "afar"}], "must be one of kept, hot-spare, fresh"),
    )
    wait_until(lambda: not is_alive(team.flow.pid(1), None), seconds=60)
    for generation, workers, why in cases:
        refused = team.regroup(generation, *workers)
        assert (refused["ok"], why in refused["why"]) == (False, True), refused
    hot_spare = int(team.flow.wait("hot-spare.started", id=1)["pid"])
    os.kill(hot_spare, signal.SIGSTOP)
    wait_until(lambda: state_of(hot_spare) == "T", seconds=60)
    wait_until(lambda: "is stopped by a signal" in team.regroup(2, kept(0), from_hot_spare(1, 1))["why"], seconds=60)
    assert team.about()["generation"] == 1
    assert team.named("worker.kept") == []
    assert team.leave_to_commit(0)["ok"]


def test_a_worker_without_a_connection_cannot_be_kept(team: Team) -> None:
    """A script that knows nothing of Holdfast receives nothing, yet it can be killed."""
    team.node.script("import time; time.sleep(600)")
    team.flow.start(1, (0, 1))
    team.flow.pid(0)
    team.flow.pid(1)
    assert team.abandon(1, kill=[1])["notified"] == []
    assert team.flow.exited(1)["ordered"] is True
    assert mentions(team.regroup(2, kept(0))["why"], "not connected")
    refused = team.flow.order("forward", ranks=[0], hot_spares=[], message={})
    assert mentions(refused["why"], "rank 0")


def test_messages_before_a_regroup_belong_to_the_old_generation(team: Team) -> None:
    """A step on its way meanwhile must not pass for the first one of the new generation."""
    team.train(0)
    os.kill(team.flow.pid(0), signal.SIGSTOP)
    line = {"do": "say", "what": [{"t": "beat", "step": 2, "seconds": 0.1}, {"t": "broken", "generation": 1, "step": 3, "why": "peer"}]}
    team.flow.ok("forward", ranks=[0], hot_spares=[], message=line)
    assert team.regroup(2, kept(0))["ok"]
    os.kill(team.flow.pid(0), signal.SIGCONT)
    assert team.flow.wait("worker.stepped", generation=2)["step"] == 20
    broken = team.flow.wait("worker.broken")
    assert (broken["generation"], broken["for_generation"], broken["why"], broken["step"]) == (1, 1, "peer", 3)
    steps = team.flow.until(lambda: [(one["generation"], step[0]) for one in team.flow.events for step in one.get("steps", ())][2:])
    assert steps == [(2, 20)]
    assert team.flow.wait("steps", generation=1)


def test_a_step_of_the_lost_lowest_rank_does_not_get_the_loss_of_the_next_lowest(team: Team) -> None:
    """Rank 1 is the lowest rank of generation 2, and finishes a step of generation 1 after that began: it was rank 0's to report."""
    team.train(0, 1)
    os.kill(team.flow.pid(1), signal.SIGSTOP)
    late = {"t": "beat", "step": 2, "seconds": 0.1, "loss": 0.75}
    team.flow.ok("forward", ranks=[1], hot_spares=[], message={"do": "say", "what": [late]})
    team.abandon(1, kill=[0], lost=[0])
    assert team.regroup(2, kept(1))["ok"]
    os.kill(team.flow.pid(1), signal.SIGCONT)

    def steps() -> list[tuple[int, int, float | None]]:
        return [(one["generation"], step[0], step[3]) for one in team.flow.events for step in one.get("steps", ())]

    team.flow.until(lambda: (2, 20, 0.5) in steps())
    assert steps() == [(1, 1, 0.5), (1, 2, None), (2, 20, 0.5)]


def test_a_generation_that_was_overtaken_is_not_taken_for_the_next(team: Team) -> None:
    """A worker that resumes in one when another has begun is still to resume in that one."""
    team.train(0)
    os.kill(team.flow.pid(0), signal.SIGSTOP)
    assert team.regroup(2, kept(0))["ok"]
    assert team.abandon(2)["notified"] == [0]
    assert team.regroup(3, kept(0))["ok"]
    os.kill(team.flow.pid(0), signal.SIGCONT)
    assert team.flow.wait("worker.stepped", rank=0, generation=3)["step"] == 30
    assert [event["generation"] for event in team.flow.events if event["event"] == "worker.stepped"] == [1, 3]
    assert [event["generation"] for event in team.flow.events if event["event"] == "resumed"] == [1, 3]
    team.flow.wait("steps", generation=3)
    steps = [(event["generation"], step[0]) for event in team.flow.events for step in event.get("steps", ())]
    assert steps == [(1, 1), (2, 20), (3, 30)]


def test_a_hot_spare_that_dies_is_reported(team: Team) -> None:
    """With its reason; one that was to go is reported as such, and its number can be used again."""
    team.stand_by(1, 2)
    team.say({"t": "exception", "type": "ValueError", "message": "no room", "traceback": "", "step": None, "errno": 12}, hot_spares=[1])
    team.flow.ok("forward", ranks=[], hot_spares=[1], message={"do": "exit", "code": 3})
    gone = team.flow.wait("hot-spare.exited", id=1)
    assert (gone["code"], gone["signal"], gone["ordered"], gone["raised"]["message"]) == (3, None, False, "no room")
    before = int(team.flow.wait("hot-spare.started", id=2)["pid"])
    assert team.flow.ok("start-hot-spares", hot_spares=[{"id": 2, "environment": places()}])["started"] == []
    assert team.flow.ok("drop", hot_spares=[2, 5])["dropped"] == [2]
    gone = team.flow.wait("hot-spare.exited", id=2)
    assert (gone["signal"], gone["ordered"]) == (signal.SIGKILL, True)
    assert team.about()["hot_spares"] == {}
    assert not is_alive(before, None)
    assert team.flow.ok("start-hot-spares", hot_spares=[{"id": 2, "environment": places(HOLDFAST_HOT_SPARE="2")}])["started"] == [2]
    team.flow.until(lambda: team.about()["hot_spares"]["2"]["ready"])
    assert team.named("worker.started", "worker.hello", "worker.raised", "worker.exited") == []


def test_a_hot_spare_that_cannot_take_over_leaves_its_reasons(node: Node, flow: Flow) -> None:
    """What it printed before it had the rank's log is its output all the same."""
    code = """
hello()
say(t="parked")
incoming.readline()
print("no way", flush=True)
say(t="recovery-failed", generation=1, why="no way")
os._exit(4)
"""
    flow.prepare(node, [node.script(CLIENT + code)], warm=True)
    flow.ok("start-hot-spares", hot_spares=[{"id": 1, "environment": places()}])
    flow.wait("hot-spare.ready", id=1)
    flow.ok("regroup", generation=1, membership={"node": [5]}, facts=FACTS, workers=[from_hot_spare(5, 1)])
    cannot = flow.wait("worker.recovery-failed", rank=5, generation=1)
    assert (cannot["why"], cannot["for_generation"]) == ("no way", 1)
    end = flow.exited(5)
    assert (end["code"], end["ordered"], end["finished"], end["output"]) == (4, False, False, "no way\n")


LEAVING = """
ours, theirs = socket.socketpair()
child = os.fork()
if not child:
    ours.close()
    os.setsid()
    theirs.recv(1)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.environ["HOLDFAST_SOCKET"])
    incoming = sock.makefile()
    hello()
    for line in incoming:
        say(t="coverage", received=json.loads(line))
    os._exit(0)
hello()
say(t="parked")
order = json.loads(incoming.readline())
for pid in (1, os.getpid(), child):
    say(t="register-successor", id=pid, pid=pid)
    answer = json.loads(incoming.readline())
    while answer.get("re") != pid:
        answer = json.loads(incoming.readline())
    say(t="coverage", answer=answer)
while not os.path.exists("go"):
    time.sleep(0.01)
ours.send(b".")
os._exit(0)
"""
"""A hot spare that leaves its place to a child that it forked before."""


def test_a_hot_spare_may_register_a_child_as_its_successor(node: Node, flow: Flow) -> None:
    """Its end is no rank's end, what is sent to the rank meanwhile reaches the child, and whose end that is ends the rank."""
    flow.prepare(node, [node.script(CLIENT + LEAVING)], warm=True)
    flow.ok("start-hot-spares", hot_spares=[{"id": 1, "environment": places()}])
    flow.wait("hot-spare.ready", id=1)
    before = int(flow.wait("hot-spare.started", id=1)["pid"])
    flow.ok("regroup", generation=1, membership={"node": [5]}, facts=FACTS, workers=[from_hot_spare(5, 1)])
    pid = int(flow.wait("worker.pid-changed", rank=5, generation=1)["pid"])
    answers = [event["answer"]["ok"] for event in flow.events if "answer" in event]
    flow.until(lambda: len([event for event in flow.events if "answer" in event]) == 3, "three answers")
    answers = [event["answer"]["ok"] for event in flow.events if "answer" in event]
    assert answers == [False, False, True]
    assert flow.ok("abandon", generation=1, lost=[7], kill=[])["notified"] == [5]
    (node.work / "go").touch()
    flow.until(
        lambda: [event for event in flow.events if event.get("received", {}).get("do") == "abandon"], "the order, received by the child"
    )
    flow.until(lambda: not is_alive(before, None), "the end of the hot spare")
    assert [event for event in flow.events if event["event"] in ("worker.exited", "hot-spare.exited")] == []
    os.kill(pid, signal.SIGKILL)
    end = flow.exited(5)
    assert (end["pid"], end["signal"], end["ordered"]) == (pid, signal.SIGKILL, False)


def test_hot_spares_need_a_fork_server(node: Node, flow: Flow) -> None:
    """A cold start would take as long as a recovery without them."""
    refused = flow.order("start-hot-spares", hot_spares=[])
    assert mentions(refused["why"], "prepared")
    flow.prepare(node, [sys.executable, node.script(GROUPED)])
    refused = flow.order("start-hot-spares", hot_spares=[{"id": 1, "environment": {}}])
    assert mentions(refused["why"], "fork server")
    (node.work / "slow.py").write_text("import time; time.sleep(600)")
    flow.prepare(node, [node.script(GROUPED)], warm=True, preload=["slow"], environment={"PYTHONPATH": str(node.work)})
    flow.ok("start-hot-spares", hot_spares=[{"id": 1, "environment": places()}, {"id": 2, "environment": places()}])
    flow.ok("drop", hot_spares=[2])
    assert flow.wait("hot-spare.exited", id=2)["ordered"] is True
    (fork_server,) = [pid for pid in node.remains() if b"slow" in _command(pid)]
    os.kill(fork_server, signal.SIGKILL)
    gone = flow.wait("hot-spare.exited", id=1)
    assert (gone["pid"], gone["ordered"]) == (None, False)
    assert mentions(gone["why"], "fork server")


def _command(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 (as short as can be)
        return file.read()


def test_whoever_is_not_in_the_next_generation_leaves(team: Team) -> None:
    """Its exit is as ordered; one that stays on is killed, and neither hot spares nor the others are."""
    team.train(0, 1, 2)
    team.stand_by(1)
    assert team.regroup(2, kept(0), leave=0.5)["ok"]
    assert team.about()["workers"] == {"0": team.flow.pid(0)}
    refused = team.flow.order("start", generation=3, membership={}, workers=[])
    assert "still run" in refused["why"]
    ends = [team.flow.exited(rank) for rank in (1, 2)]
    assert [(end["signal"], end["ordered"], end["generation"]) for end in ends] == [(signal.SIGKILL, True, 1)] * 2
    about = team.about()
    assert (about["leavers"], about["hot_spares"]["1"]["ready"]) == ([], True)
    team.flow.wait("worker.stepped", rank=0, generation=2)
    team.flow.stop(2)
    assert team.about()["hot_spares"]["1"]["ready"] is True, "a stop is for workers"
    assert is_alive(int(about["hot_spares"]["1"]["pid"]), None)


def test_a_stop_takes_what_workers_left_and_spares_hot_spares_in_any_state(team: Team) -> None:
    """Also one that is being forked in that moment."""
    nap = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    team.node.script(f"{GROUPED.split('def train')[0]}\nif 'HOLDFAST_HOT_SPARE' not in os.environ:\n    {nap}\n{TAIL}")
    for generation in range(1, 6):
        team.flow.start(generation, (0, 1))
        for rank in (0, 1):
            team.flow.wait("worker.stepped", rank=rank, generation=generation)
        workers = {team.flow.pid(rank, generation=generation) for rank in (0, 1)}
        apart = [child for worker in workers for child in children_of(worker)]
        assert len(apart) == 2
        team.flow.ok("start-hot-spares", hot_spares=[{"id": generation, "environment": places(HOLDFAST_HOT_SPARE=str(generation))}])
        team.flow.stop(generation)
        assert [pid for pid in (*workers, *apart) if is_alive(pid, None)] == []
        team.flow.wait("hot-spare.ready", id=generation)
    assert len(team.about()["hot_spares"]) == 5
    assert team.named("hot-spare.exited") == []


def test_a_command_among_the_last_messages_of_a_worker_changes_nothing(node: Node, flow: Flow) -> None:
    """Its end is reported once, and the agent goes on."""
    code = """
hello()
for step in range(3000):
    say(t="saved", step=step, path="/" + "x" * 50, seconds=0.1, size=1)
for _ in range(3):
    sock.sendall(json.dumps({"do": "forward", "job": "job", "epoch": 1, "ranks": [], "hot_spares": [], "message": {}}).encode() + b"\\n")
os._exit(3)
"""
    flow.prepare(node, [sys.executable, node.script(CLIENT + code)])
    flow.start(1, (0, 1))
    for rank in (0, 1):
        assert flow.exited(rank)["code"] == 3
    flow.stop(1)
    assert [event["event"] for event in flow.events].count("worker.exited") == 2


def test_a_planned_switch_is_recorded_without_messages_to_workers(team: Team) -> None:
    """What the workers say of the new generation before that waits, their leave to commit included."""
    team.train(0, 1)
    team.stand_by(3)
    prepare = {"do": "prepare", "generation": 2, "leavers": [1]}
    team.flow.ok("forward", ranks=[0, 1], hot_spares=[3], message=prepare)
    team.say({"t": "prepared", "generation": 2, "seconds": 0.5}, ranks=[0], hot_spares=[3])
    prepared = team.flow.wait("worker.prepared", rank=0)
    assert (prepared["generation"], prepared["for_generation"], prepared["seconds"]) == (1, 2, 0.5)
    assert team.flow.wait("hot-spare.prepared", id=3)["for_generation"] == 2
    switched = [{"t": "switched", "generation": 2, "step": 5, "seconds": 0.1}, {"t": "beat", "step": 6, "seconds": 0.1}]
    team.say(*switched, {"t": "commit-request", "id": 77, "step": 6}, ranks=[0], hot_spares=[3])
    team.say({"t": "departed", "step": 5}, ranks=[1])
    team.flow.ok("forward", ranks=[1], hot_spares=[], message={"do": "exit", "code": 0})
    assert team.flow.wait("worker.departed", rank=1)["step"] == 5
    assert (team.flow.exited(1)["code"], team.flow.exited(1)["ordered"]) == (0, True)
    assert team.flow.wait("worker.switched", rank=0)["for_generation"] == 2
    team.flow.wait("hot-spare.switched", id=3)
    assert team.about()["generation"] == 1
    assert not [event for event in team.flow.events if "answer" in event]
    assert not [step for event in team.flow.events for step in event.get("steps", ()) if step[0] == 6]
    answer = team.regroup(2, kept(0), {"rank": 1, "from": "hot-spare", "hot_spare": 3}, verb="switch")
    assert answer["ok"], answer
    for rank in (0, 1):
        assert team.flow.wait("worker.stepped", rank=rank, generation=2)["step"] == 6
        answered = team.flow.wait("worker.coverage", rank=rank, generation=2, answer={"re": 77, "ok": True, "why": ""})
        assert answered
    assert team.flow.wait("steps", generation=2)["steps"][0][0] == 6
    received = [event["received"]["do"] for event in team.flow.events if "received" in event]
    assert set(received) == {"prepare", "say", "exit"}
    assert team.named("worker.kept", "worker.started")[-2:] == [("worker.kept", 0), ("worker.started", 1)]


def test_a_message_is_passed_on_to_all_or_to_none(team: Team) -> None:
    """As it is."""
    team.train(0)
    team.stand_by(1)
    message = {"do": "forget", "generation": 2, "more": [1, {"x": None}]}
    refused = team.flow.order("forward", ranks=[0, 4], hot_spares=[1, 8], message=message)
    assert mentions(refused["why"], "rank 4", "hot spare 8")
    team.flow.ok("forward", ranks=[0], hot_spares=[1], message=message)
    assert team.flow.wait("worker.coverage", rank=0)["received"] == message
    assert team.flow.wait("hot-spare.coverage", id=1)["received"] == message
    assert len([event for event in team.flow.events if "received" in event]) == 2


def test_one_that_is_lost_in_a_fresh_start_is_replaced_in_the_next(team: Team) -> None:
    """A process that has not said hello yet gets the newest generation alone."""
    team.train(0, 1)
    team.abandon(1, kill=[1], lost=[1])
    assert team.regroup(2, kept(0), fresh(1, 2))["ok"]
    assert team.abandon(2)["notified"] == [0, 1]
    answer = team.regroup(3, kept(0), kept(1))
    assert answer["ok"], answer
    assert team.received("regroup", generation=3, rank=1)["rank"] == 1
    for rank in (0, 1):
        assert team.flow.wait("worker.stepped", rank=rank, generation=3)["step"] == 30


def test_a_worker_that_does_not_read_blocks_nobody(team: Team) -> None:
    """What it does not read waits, and is cut off in the end."""
    team.train(0, 1)
    os.kill(team.flow.pid(1), signal.SIGSTOP)
    message = {"do": "nothing", "ballast": "x" * 1_000_000}
    for _ in range(9):
        team.flow.ok("forward", ranks=[1], hot_spares=[], message=message)
    assert team.leave_to_commit(0)["ok"]
    refused = team.flow.order("forward", ranks=[1], hot_spares=[], message=message)
    assert mentions(refused["why"], "rank 1")
    assert team.abandon(1, kill=[1])["notified"] == [0]
    assert team.flow.exited(1)["ordered"] is True


@pytest.mark.parametrize("whom", ["agent", "subreaper", "end", "lease"])
def test_nothing_is_left_of_hot_spares_and_leavers(team: Team, whom: str) -> None:
    """However their agent ends."""
    team.train(0, 1)
    team.stand_by(1, 2)
    assert team.regroup(2, kept(0), leave=600.0)["ok"]
    pids = [team.flow.pid(0), team.flow.pid(1), *(one["pid"] for one in team.about()["hot_spares"].values())]
    assert len([pid for pid in pids if is_alive(pid, None)]) == 4
    if whom == "end":
        team.flow.ok("end")
    elif whom == "lease":
        team.flow.prepare(team.node, [team.node.script(GROUPED)], warm=True, lease=0.5)
    else:
        os.kill(team.node.agent if whom == "agent" else team.node.subreaper_pid, signal.SIGKILL)
    team.node.wait_until_empty()
    assert [pid for pid in pids if is_alive(pid, None)] == []
    event_log = [json.loads(line) for line in (team.node.folder / "event-log.jsonl").read_text().splitlines()]
    if whom in {"end", "lease"}:
        ends = [event["ordered"] for event in event_log if event.get("event") in {"hot-spare.exited", "worker.exited"}]
        assert ends == [True] * 4
