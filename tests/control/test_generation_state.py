"""The progress of ranks in the state of a generation."""

from __future__ import annotations

from typing import Any

from holdfast.control.faults.evaluator import FaultEvaluator
from holdfast.control.faults.rank_status import Pauses
from holdfast.control.state.generation import GenerationState
from holdfast.control.supervisor import event_table
from holdfast.detectors.catalogue import Fault
from holdfast.detectors.diagnosis import diagnose, see
from holdfast.detectors.evidence import HangLimits
from holdfast.detectors.training.progress import Pause
from holdfast.protocol import Message
from tests.each import each
from tests.mentions import mentions

BEAT = {"age": 0.0, "step": None, "managed": True, "section": None, "section_limit": None, "process": "S", "wait": "", "output_age": None}


def send(board: GenerationState, name: str, now: float, **facts: Any) -> None:
    """Change the state by an event of generation 1, from all nodes that it is about."""
    for node, here in board.membership.items():
        own = {name: one for name, one in facts.get("ranks", {}).items() if int(name) in here}
        event: Message = {"event": name, "generation": 1, "at": now, **facts, **({"ranks": own} if own else {})}
        if own or facts.get("rank", 0) in here:
            event_table.change_state(board, node, event_table.parse(event), now)


def test_step_times_do_not_apply_to_a_rank_before_its_first_step() -> None:
    """Rank 0 has finished its steps before rank 1, whose node has just come up, has a process: that is no hang."""
    board = GenerationState(1, {"a": [0], "b": [1]})
    send(board, "worker.started", 10.0, rank=0, pid=100)
    send(board, "heartbeats", 10.0, ranks={"0": BEAT, "1": BEAT | {"managed": False}})
    send(board, "worker.stepped", 10.1, rank=0, step=1, until=9)
    send(board, "steps", 10.2, steps=[(1, 10.1, 0.1, 0.5), (2, 10.2, 0.1, 0.5)])
    seen = board.progress(10.3, steps_expected=True)
    assert seen is not None
    assert seen.step_seconds == ()
    send(board, "worker.started", 13.0, rank=1, pid=101)
    send(board, "resumed", 13.0, rank=1, step=0)
    seen = board.progress(13.1, steps_expected=True)
    assert seen is not None
    assert seen.step_seconds == ()
    send(board, "worker.stepped", 13.2, rank=1, step=1, until=9)
    seen = board.progress(13.3, steps_expected=True)
    assert seen is not None
    assert seen.step_seconds == (0.1, 0.1)


def test_a_start_lasts_from_the_first_worker_to_the_last_first_step() -> None:
    """What a recovery may take depends on it, and on the median step."""
    board = GenerationState(1, {"a": [0], "b": [1]})
    assert (board.start_seconds(), board.step_seconds()) == (None, None)
    for rank, at in ((0, 10.0), (1, 13.0)):
        send(board, "worker.started", at, rank=rank, pid=100 + rank)
    send(board, "heartbeats", 13.0, ranks={"0": BEAT, "1": BEAT})
    send(board, "worker.stepped", 70.0, rank=0, step=1, until=9)
    assert board.start_seconds() is None
    send(board, "worker.stepped", 75.0, rank=1, step=1, until=9)
    send(board, "steps", 80.0, steps=[(1, 70.0, 0.5, 0.5), (2, 75.0, 2.0, 0.5), (3, 80.0, 1.0, 0.5)])
    assert (board.start_seconds(), board.step_seconds()) == (65.0, 1.0)


def test_a_rank_without_heartbeats_does_not_hide_a_stall_and_is_the_first_suspect() -> None:
    """Neither one whose agent a reattaching controller cannot reach, nor one whose agent does not report it at a start."""
    limits = HangLimits(startup=60.0, hang_min=5.0)
    reattached, started = GenerationState(1, {"a": [0], "b": [1]}), GenerationState(1, {"a": [0], "b": [1]})
    reattached.unseen = {1}
    for board in (reattached, started):
        send(board, "worker.started", 10.0, rank=0, pid=100)
        beat_of_a(board, 10.0, age=0.0)
    send(reattached, "worker.stepped", 10.1, rank=0, step=1, until=9)
    send(reattached, "steps", 10.2, steps=[(1, 10.1, 0.1, 0.5), (2, 10.2, 0.1, 0.5)])
    for board, later, kind in ((reattached, 20.0, "job-hang"), (started, 80.0, "job-never-stepped")):
        beat_of_a(board, later, age=0.0)
        assert faults_of(board, later, limits) == [], "the other rank makes progress"
        beat_of_a(board, later + 70.0, age=70.0)
        (fault,) = faults_of(board, later + 70.0, limits)
        assert (fault.kind, fault.node, fault.rank) == (kind, "b", 1)
        assert mentions(fault.quote, "rank 1 on b")


def beat_of_a(board: GenerationState, now: float, *, age: float) -> None:
    """Have the agent of node a report that its rank made progress *age* seconds ago."""
    event_table.change_state(
        board, "a", event_table.parse({"event": "heartbeats", "generation": 1, "at": now, "ranks": {"0": BEAT | {"age": age}}}), now
    )


def faults_of(board: GenerationState, now: float, limits: HangLimits) -> list[Fault]:
    """Return the faults in the ranks' progress."""
    seen = board.progress(now, steps_expected=True)
    assert seen is not None
    return see([seen], limits)


def test_with_heartbeats_ranks_without_steps_are_not_awaited() -> None:
    """Many scripts report on rank 0 only. The step that they resumed from follows from the first step and the distance of two."""
    before = GenerationState(1, {"a": [0], "b": [1]})
    send(before, "steps", 9.0, steps=[(step, 9.0, 0.1, None) for step in (10, 20, 30)])
    assert before.stride() == 10
    board = GenerationState(2, {"a": [0], "b": [1]})
    for rank in (0, 1):
        send(board, "worker.started", 10.0, generation=2, rank=rank, pid=100 + rank)
    assert not board.all_stepped()
    send(board, "worker.stepped", 12.0, generation=2, rank=0, step=20, until=None, heartbeat=True)
    assert board.all_stepped()
    assert (board.first_step_at(), board.resumed_step(), board.resumed_from_step(before)) == (12.0, None, 10)
    seen = board.progress(12.1, steps_expected=True)
    assert seen is None or seen.ranks
    assert GenerationState(3, {"a": [0]}).resumed_from_step(board) is None


def test_the_exit_of_a_rank_is_a_sign_of_progress() -> None:
    """Only rank 0 printed, and exited: its exit is the job's latest sign of life, not the start of the remaining rank."""
    limits = HangLimits(log_silence=30.0, exit_grace=60.0)
    board = GenerationState(1, {"a": [0], "b": [1]})
    for rank, pid in ((0, 100), (1, 101)):
        send(board, "worker.started", 10.0, rank=rank, pid=pid)
    silent = BEAT | {"managed": False, "output_age": 0.0, "printed": False}
    send(board, "heartbeats", 11.0, ranks={"0": silent, "1": silent})
    assert board.startup() is None
    seen = board.progress(60.0, steps_expected=False)
    assert seen is not None
    assert (seen.printed, see([seen], limits)) == (False, []), "it may still be loading"
    send(board, "heartbeats", 70.0, ranks={"0": silent | {"printed": True}, "1": silent | {"output_age": 60.0}})
    assert board.startup() == 60.0
    end = {"step": None, "ended": 80.0, "code": 0, "signal": None, "finished": True, "ordered": False, "raised": None}
    send(board, "worker.exited", 80.0, rank=0, oom=None, oom_blind=None, output="", **end)
    for later, kinds in ((139.0, []), (141.0, ["job-end-stuck"])):
        send(board, "heartbeats", later, ranks={"1": silent | {"output_age": later - 10.0}})
        seen = board.progress(later, steps_expected=False)
        assert seen is not None
        assert (seen.ended, seen.since_end, seen.output_age) == ((0,), later - 80.0, later - 80.0)
        assert [fault.kind for fault in see([seen], limits)] == kinds


def test_a_rank_that_exits_before_any_step_is_reported_while_others_run() -> None:
    """With status 0, and some time later, as ranks that finish together do not exit at the same moment; never once a step is known."""
    limits = HangLimits()
    for steps in (False, True):
        board = GenerationState(1, {"a": [0], "b": [1]})
        for rank, pid in ((0, 100), (1, 101)):
            send(board, "worker.started", 10.0, rank=rank, pid=pid)
        assert board.early_exit(11.0) is None
        if steps:
            send(board, "worker.stepped", 11.0, rank=0, step=1, until=9)
        end = {"step": None, "ended": 12.0, "code": 0, "signal": None, "finished": True, "ordered": False, "raised": None}
        send(board, "worker.exited", 12.0, rank=1, oom=None, oom_blind=None, output="", **end)
        found = [see([seen], limits) for now in (13.0, 30.0) if (seen := board.early_exit(now)) is not None]
        if steps:
            assert found == []
            continue
        soon, (late,) = found
        assert (soon, late.kind, late.rank, late.node, late.at) == ([], "rank-exited-early", 1, "b", 12.0)
        assert mentions(late.quote, "rank 1 exited", "2.0 s after its start", "rank 0 still runs", "`timeouts.exit_grace`")
        send(board, "worker.exited", 31.0, rank=0, oom=None, oom_blind=None, output="", **end)
        assert board.early_exit(50.0) is None, "all have ended"


@each("first", ["the exit", "the failure"])
@each("managed", [False, True])
def test_a_rank_that_finished_while_another_needed_it_is_the_cause(first: str, *, managed: bool) -> None:
    """Whichever the controller hears of first. A rank whose steps are known says itself whether it has finished."""
    board, limits = GenerationState(1, {"a": [0], "b": [1]}), HangLimits()
    evaluator = FaultEvaluator(board, lambda: 100.0)
    for rank, pid in ((0, 100), (1, 101)):
        send(board, "worker.started", 10.0, rank=rank, pid=pid)
        if managed:
            send(board, "worker.stepped", 11.0, rank=rank, step=1, until=9)

    def the_exit() -> None:
        how = {"step": None, "ended": 12.0, "code": 0, "signal": None, "finished": True, "ordered": False, "raised": None}
        send(board, "worker.exited", 12.0, rank=1, oom=None, oom_blind=None, output="", **how)

    def the_failure() -> None:
        raised = {"type": "RuntimeError", "message": "Connection closed by peer [127.0.0.1]:4711", "traceback": "", "peer_lost": True}
        send(board, "worker.raised", 12.5, rank=0, step=None, raised=raised)

    for happens in (the_exit, the_failure) if first == "the exit" else (the_failure, the_exit):
        happens()
        evaluator.faults(limits, steps_expected=False)
    found = {fault.kind: fault for fault in evaluator.faults(limits, steps_expected=False)}
    assert found.keys() - {"job-hang", "job-never-stepped"} == {"worker-peer-lost"} | (set() if managed else {"worker-exit-early"})
    root = diagnose(list(found.values()), (), 2).root
    if not managed:
        assert (root.kind, root.rank, root.node) == ("worker-exit-early", 1, "b")
        assert mentions(root.quote, "status 0", "rank 0 lost a peer")


def quiet_for(board: GenerationState, now: float, quiet: float) -> None:
    """Have both ranks make no progress for so long."""
    send(board, "heartbeats", now, ranks={"0": BEAT | {"age": quiet}, "1": BEAT | {"age": quiet}})


def test_a_pause_is_reported_once_and_extends_the_limit_for_later_ones() -> None:
    """A longer one is reported again; one that a recovery ended does not count."""
    board, limits, words = GenerationState(1, {"a": [0], "b": [1]}), HangLimits(), list[str]()
    recorded = list[Pause | None]()
    pauses = Pauses(words.append, recorded.append)
    for rank, pid in ((0, 100), (1, 101)):
        send(board, "worker.started", 0.0, rank=rank, pid=pid)
        send(board, "worker.stepped", 1.0, rank=rank, step=1, until=9)
    send(board, "steps", 1.0, steps=[(1, 1.0, 0.1, 0.5), (2, 1.1, 0.1, 0.5)])

    def poll(quiet: float, at: float) -> None:
        quiet_for(board, at, quiet)
        seen = board.progress(at, steps_expected=True)
        assert seen is not None
        assert see([seen], limits) == []
        pauses.poll(board, seen, limits)

    now = 10.0
    for pause in (1.0, 40.0, 50.0, 80.0):
        for share in (0.25, 0.5, 1.0):
            poll(share * pause, now + share * pause)
        now += pause
        poll(0.0, now)
    assert all(mentions(one, pause) for one, pause in zip(words, ("10.0 s", "80.0 s"), strict=True))
    assert board.longest_pause == 80.0
    after = GenerationState(2, {"a": [0], "b": [1]})
    after.keep(board)
    assert after.longest_pause == 80.0
    assert mentions(words[0], "300 s")
    quiet = [None if one is None else one.quiet for one in recorded]
    assert quiet == [10.0, None, 12.5, None, 20.0, None], "every pause is recorded where it is seen first, and its end"
