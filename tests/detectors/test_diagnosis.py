"""From mixed evidence to one diagnosis: scenes as they happen, each with its root, its secondary failures and how long to wait for more."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.detectors.associations import follows_step, is_secondary
from holdfast.detectors.catalogue import CATALOGUE, CATALOGUE_ACTIONS, Attribution, Fault
from holdfast.detectors.diagnosis import (
    SILENCE_SECONDS,
    Diagnosis,
    FirstStart,
    PastFailure,
    diagnose,
    evidence_wait_seconds,
    unexplained_faults,
)
from holdfast.detectors.evidence import (
    CheckpointFailure,
    Evidence,
    LogLine,
    Progress,
    RecoveryTimeout,
    StartFailure,
    Unknown,
    WorkerException,
    WorkerStop,
)
from holdfast.detectors.training.exceptions import ABORT_ERROR
from tests.detectors.evidence_of import a_killed, a_rank, a_silence, an_echo, an_end, an_error, seen
from tests.each import each
from tests.mentions import mentions

BAD_SHAPE = "ValueError at train.py:3"
SHAPE = ("ValueError", "train.py:3")
HANGING = Progress(at=400.0, ranks={0: a_rank("n0", age=400.0), 1: a_rank("n1", age=400.0)}, step_seconds=(0.3,) * 8)
STUCK = CheckpointFailure(node="n0", rank=0, at=0.0, kind="checkpoint-torn", path="/ckpt/step-00000100", why="no manifest")
CAUSE_SECONDS = 0.5
"""Secondary failures from every node wait for their cause: all agents speak, so an end that caused them is on its way."""
TWINS_SECONDS = 0.3
"""A failure waits for its like on other nodes: ranks in step reach the same line within milliseconds."""
AWAY = SILENCE_SECONDS + 1.0
"""A secondary failure waits for a node that says nothing at all until its silence must have been noticed."""


def missing(node: str, number: int = errno.ENOENT) -> StartFailure:
    """Return that *node* could not start its workers."""
    return StartFailure(node=node, at=0.0, why="[Errno 2] No such file or directory: 'trian'", errno=number)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What was seen, what was known before, and the diagnosis."""

    evidence: tuple[Evidence, ...]
    root: str
    on: str
    """Whom the root was seen on."""
    waits: float = 0.0
    """Seconds to wait for more once all of this is known."""
    past: tuple[PastFailure, ...] = ()
    members: int = 2
    first_start: FirstStart | None = None

    def faults(self) -> list[Fault]:
        """Return the faults in the evidence."""
        return seen(*self.evidence)

    def diagnosis(self) -> Diagnosis:
        """Return the diagnosis."""
        return diagnose(self.faults(), self.past, self.members, first_start=self.first_start)


def before(node: str | None = "n0", step: int | None = 7, signature: str = BAD_SHAPE) -> PastFailure:
    """Return a failure that was answered earlier."""
    return PastFailure(node=node, step=step, signature=signature)


TWO_START = FirstStart(ranks=frozenset({0, 1}))


def lacking(*ranks: int, error: str = "ModuleNotFoundError") -> tuple[Evidence, ...]:
    """Return what *ranks* of one node raise before the first step, at one line."""
    return tuple(an_error("n0", rank, type=error, step=None) for rank in ranks)


SCENES = {
    "a killed rank and the secondary failures of its peers": Scene(
        evidence=(an_echo("n1", 2, at=0.0), a_killed("n0", 0, at=0.1), an_echo("n0", 1, at=0.2)), root="worker-sigkill", on="rank 0 on n0"
    ),
    "a killed rank and peers whose errors nobody knows": Scene(
        evidence=(an_error("n1", 1), an_error("n2", 2), a_killed("n0", 0, at=0.2)), root="worker-sigkill", on="rank 0 on n0", members=3
    ),
    "a lost node and the errors of its peers": Scene(
        evidence=(an_echo("n1", 1), an_error("n2", 2, type="RuntimeError"), a_silence("n0", at=5.0)),
        root="node-lost",
        on="node n0",
        members=3,
    ),
    "a lost node and a peer that was killed for it": Scene(
        evidence=(a_killed("n1", 1, at=0.0), a_silence("n0", at=5.0)), root="node-lost", on="node n0"
    ),
    "a node that nobody could look at": Scene(
        evidence=(an_echo("n1", 1), a_silence("n0", node_answers=Unknown("no route"))), root="node-unknown", on="node n0"
    ),
    "an agent that died with its workers": Scene(
        evidence=(an_echo("n1", 1), a_silence("n0", node_answers=True)), root="agent-lost", on="node n0"
    ),
    "two kills that have nothing to do with each other": Scene(
        evidence=(a_killed("n1", 1, at=0.2), a_killed("n0", 0, at=0.1)), root="worker-sigkill", on="rank 0 on n0"
    ),
    "echoes from one node alone": Scene(evidence=(an_echo("n1", 1),), root="worker-peer-lost", on="rank 1 on n1", waits=AWAY),
    "echoes from every node": Scene(
        evidence=(an_echo("n1", 1, at=0.1), an_echo("n0", 0, at=0.2)), root="worker-peer-lost", on="rank 1 on n1", waits=CAUSE_SECONDS
    ),
    "a watchdog's abort and another secondary failure": Scene(
        evidence=(
            an_end("n1", 1, signal=6, output="terminate called after throwing an instance of 'gloo::IoException'\n  what(): Broken pipe"),
            an_echo("n0", 0, at=0.4),
        ),
        root="worker-peer-lost",
        on="rank 1 on n1",
        waits=CAUSE_SECONDS,
    ),
    "an exception on one node so far": Scene(
        evidence=(an_error("n0", 0),), root="worker-exception", on="rank 0 on n0", waits=TWINS_SECONDS
    ),
    "an exception on one node and the secondary failures of the others": Scene(
        evidence=(an_echo("n1", 1, at=0.0), an_error("n0", 0, at=0.3)), root="worker-exception", on="rank 0 on n0"
    ),
    "an exception and peers that all failed of it in a way nobody knows": Scene(
        evidence=(
            an_error("n0", 0, at=0.0),
            an_error("n1", 1, at=0.2, type="RuntimeError", line=50),
            an_error("n2", 2, at=0.3, type="RuntimeError", line=50),
        ),
        root="worker-exception",
        on="rank 0 on n0",
        members=3,
    ),
    "the same exception at the same step on two nodes": Scene(
        evidence=(an_error("n0", 0), an_echo("n1", 2), an_error("n1", 1, at=0.1)), root="user-error", on="rank 0 on n0"
    ),
    "the same exception at different steps on two nodes": Scene(
        evidence=(an_error("n0", 0, step=7), an_error("n1", 1, at=0.1, step=8)), root="worker-exception", on="rank 0 on n0"
    ),
    "different exceptions at the same step on two nodes": Scene(
        evidence=(an_error("n0", 0, line=3), an_error("n1", 1, at=0.1, line=4)), root="worker-exception", on="rank 0 on n0"
    ),
    "the same exception on two ranks of one node of two": Scene(
        evidence=(an_error("n0", 0), an_error("n0", 1, at=0.1)), root="worker-exception", on="rank 0 on n0", waits=TWINS_SECONDS
    ),
    "the same exception at the same step, now on another node": Scene(
        evidence=(an_error("n1", 0), an_echo("n0", 1)), past=(before("n0"),), root="user-error", on="rank 0 on n1"
    ),
    "the same exception at another step on another node": Scene(
        evidence=(an_error("n1", 0, step=9), an_echo("n0", 1)), past=(before("n0"),), root="worker-exception", on="rank 0 on n1"
    ),
    "the same exception at the same step on the same node": Scene(
        evidence=(an_error("n0", 0), an_echo("n1", 1)), past=(before("n0"),) * 3, root="worker-exception", on="rank 0 on n0"
    ),
    "an exception at the step where another one was before": Scene(
        evidence=(an_error("n1", 0, line=4), an_echo("n0", 1)), past=(before("n0"),), root="worker-exception", on="rank 0 on n1"
    ),
    "an import error on all ranks before the first step": Scene(
        evidence=tuple(an_error(f"n{rank // 2}", rank, type="ModuleNotFoundError", step=0) for rank in range(4)),
        root="user-error",
        on="rank 0 on n0",
    ),
    "a failed import on all ranks of the only node at its first start": Scene(
        evidence=lacking(0, 1), members=1, first_start=TWO_START, root="user-error", on="rank 0 on n0"
    ),
    "a syntax error on all ranks of the only node at its first start, with a spare one": Scene(
        evidence=lacking(0, 1, error="SyntaxError"),
        members=1,
        first_start=FirstStart(ranks=frozenset({0, 1}), spares=1),
        root="user-error",
        on="rank 0 on n0",
    ),
    "wrong arguments on all ranks of the only node at its first start": Scene(
        evidence=(an_end("n0", 0, code=2, step=None), an_end("n0", 1, code=2, step=None)),
        members=1,
        first_start=TWO_START,
        root="user-error",
        on="rank 0 on n0",
    ),
    "a failed import on all ranks of the only node, which is no first start": Scene(
        evidence=lacking(0, 1), members=1, root="worker-exception", on="rank 0 on n0"
    ),
    "a failed import on one rank of the only node at its first start": Scene(
        evidence=lacking(1), members=1, first_start=TWO_START, root="worker-exception", on="rank 1 on n0"
    ),
    "a failed import on the only node, which a spare one may replace": Scene(
        evidence=lacking(0, 1),
        members=1,
        first_start=FirstStart(ranks=frozenset({0, 1}), spares=1),
        root="worker-exception",
        on="rank 0 on n0",
    ),
    "a failed import on one node of two at the first start": Scene(
        evidence=lacking(0, 1),
        first_start=FirstStart(ranks=frozenset({0, 1, 2, 3})),
        root="worker-exception",
        on="rank 0 on n0",
        waits=TWINS_SECONDS,
    ),
    "another exception on all ranks of the only node at its first start": Scene(
        evidence=lacking(0, 1, error="ValueError"), members=1, first_start=TWO_START, root="worker-exception", on="rank 0 on n0"
    ),
    "another status on all ranks of the only node at its first start": Scene(
        evidence=(an_end("n0", 0, code=3, step=None), an_end("n0", 1, code=3, step=None)),
        members=1,
        first_start=TWO_START,
        root="worker-exit-code",
        on="rank 0 on n0",
    ),
    "a script without steps that fails on all nodes at once": Scene(
        evidence=(an_error("n0", 0, step=None), an_error("n1", 1, step=None)), root="user-error", on="rank 0 on n0"
    ),
    "a script without steps that fails at one line a second time": Scene(
        evidence=(an_error("n1", 0, step=None), an_echo("n0", 1)), past=(before("n0", None),), root="worker-exception", on="rank 0 on n1"
    ),
    "a script without steps that fails at one line a third time": Scene(
        evidence=(an_error("n1", 0, step=None), an_echo("n0", 1)),
        past=(before("n0", None), before("n1", None)),
        root="user-error",
        on="rank 0 on n1",
    ),
    "a job of one node fails for the first time": Scene(
        evidence=(an_error("n0", 0), an_error("n0", 1)), members=1, root="worker-exception", on="rank 0 on n0"
    ),
    "a job of one node fails at the same step again": Scene(
        evidence=(an_error("n0", 0),), members=1, past=(before("n0"),), root="user-error", on="rank 0 on n0"
    ),
    "a job of one node without steps fails again": Scene(
        evidence=(an_error("n0", 0, step=None),), members=1, past=(before("n0", None),), root="worker-exception", on="rank 0 on n0"
    ),
    "a job of one node is killed at the same step again": Scene(
        evidence=(a_killed("n0", 0),), members=1, past=(before("n0", 7, "signal 9"),), root="worker-sigkill", on="rank 0 on n0"
    ),
    "a full disk seen by several nodes at one step": Scene(
        evidence=(an_error("n0", 0, type="OSError", errno=errno.ENOSPC), an_error("n1", 1, at=0.1, type="OSError", errno=errno.ENOSPC)),
        root="worker-disk-full",
        on="rank 0 on n0",
    ),
    "a full disk on one node": Scene(
        evidence=(an_error("n0", 0, type="OSError", errno=errno.ENOSPC),), root="worker-disk-full", on="rank 0 on n0"
    ),
    "a mount that went stale under all nodes, twice": Scene(
        evidence=(an_error("n1", 0, type="OSError", errno=errno.ESTALE), an_error("n0", 1, at=0.1, type="OSError", errno=errno.ESTALE)),
        past=(before("n0", 7, "OSError at train.py:3"),),
        root="storage-service-failed",
        on="job",
    ),
    "a data server that refuses all nodes": Scene(
        evidence=tuple(an_error(f"n{n}", n, at=n / 10, type="ConnectionRefusedError", errno=errno.ECONNREFUSED) for n in range(2)),
        root="worker-service-unreachable",
        on="rank 0 on n0",
    ),
    "a refused connection on one node so far": Scene(
        evidence=(an_error("n0", 0, type="ConnectionRefusedError", errno=errno.ECONNREFUSED),),
        root="worker-service-unreachable",
        on="rank 0 on n0",
        waits=TWINS_SECONDS,
    ),
    "memory that ran out on two nodes": Scene(
        evidence=(a_killed("n0", 0, oom="Killed process 1"), a_killed("n1", 1, at=0.1, oom="Killed process 2")),
        past=(before("n1", 7, "oom"),),
        root="worker-oom-killed",
        on="rank 0 on n0",
    ),
    "memory that ran out and a kill that came of it": Scene(
        evidence=(a_killed("n0", 1, at=0.0), a_killed("n0", 0, at=0.1, oom="Killed process 1")), root="worker-oom-killed", on="rank 0 on n0"
    ),
    "GPU memory that ran out on one node": Scene(
        evidence=(an_error("n0", 0, type="torch.OutOfMemoryError"), an_echo("n1", 1)), root="worker-gpu-out-of-memory", on="rank 0 on n0"
    ),
    "GPU memory that ran out on all nodes at one step": Scene(
        evidence=(an_error("n0", 0, type="torch.OutOfMemoryError"), an_error("n1", 1, type="torch.OutOfMemoryError")),
        root="user-error",
        on="rank 0 on n0",
    ),
    "a stopped rank and the hang that it caused": Scene(
        evidence=(HANGING, WorkerStop(node="n1", rank=1, at=1.0, signal=19, seconds=9.0)), root="worker-stopped", on="rank 1 on n1"
    ),
    "a hang alone": Scene(evidence=(HANGING,), root="job-hang", on="rank 0 on n0"),
    "a hang and a rank that lost patience with it": Scene(evidence=(an_echo("n1", 1), HANGING), root="job-hang", on="rank 0 on n0"),
    "a hang and a rank that raised before it": Scene(
        evidence=(HANGING, an_error("n1", 1)), root="worker-exception", on="rank 1 on n1"
    ),
    "a status without a reason on one node": Scene(
        evidence=(an_end("n0", 0, code=3),), root="worker-exit-code", on="rank 0 on n0", waits=TWINS_SECONDS
    ),
    "the same status without a reason on two nodes": Scene(
        evidence=(an_end("n0", 0, code=3), an_end("n1", 1, at=0.1, code=3)), root="user-error", on="rank 0 on n0"
    ),
    "a loop left early on all nodes": Scene(
        evidence=(an_end("n0", 0, code=0), an_end("n1", 1, at=0.1, code=0)), root="user-error", on="rank 0 on n0"
    ),
    "an exception, and an abort while its peer was torn down": Scene(
        evidence=(an_error("n0", 0, at=0.0), an_end("n1", 1, at=3.0, signal=6)), root="worker-exception", on="rank 0 on n0"
    ),
    "an abort, and an exception that came of it": Scene(
        evidence=(an_error("n1", 1, at=3.0), an_end("n0", 0, at=0.0, signal=6)), root="worker-sigabrt", on="rank 0 on n0"
    ),
    "a killed rank, and two whose communicators did not abort after it": Scene(
        evidence=(a_killed("n0", 0), an_error("n1", 1, at=10.1, type=ABORT_ERROR), an_error("n2", 2, at=10.1, type=ABORT_ERROR)),
        root="worker-sigkill",
        on="rank 0 on n0",
    ),
    "two ranks whose communicators did not abort, which is no script's error": Scene(
        evidence=(an_error("n0", 0, type=ABORT_ERROR), an_error("n1", 1, at=0.1, type=ABORT_ERROR)),
        root="worker-abort-timed-out",
        on="rank 0 on n0",
    ),
    "an abort alone so far": Scene(evidence=(an_end("n0", 0, signal=6),), root="worker-sigabrt", on="rank 0 on n0", waits=TWINS_SECONDS),
    "a segmentation fault alone": Scene(evidence=(an_end("n0", 0, signal=11),), root="worker-sigsegv", on="rank 0 on n0"),
    "a command that no node has": Scene(evidence=(missing("n0"), missing("n1")), root="user-error", on="node n0"),
    "a command that one node of two lacks": Scene(
        evidence=(missing("n1"),), root="worker-command-not-runnable", on="node n1", waits=TWINS_SECONDS
    ),
    "a command that two nodes of three lack": Scene(
        evidence=(missing("n1"), missing("n2")), root="worker-command-not-runnable", on="node n1", members=3, waits=TWINS_SECONDS
    ),
    "a command that the only node lacks": Scene(evidence=(missing("n0"),), members=1, root="user-error", on="node n0"),
    "nodes that are out of processes": Scene(
        evidence=(missing("n0", errno.EAGAIN), missing("n1", errno.EAGAIN)), root="worker-start-failed", on="node n0"
    ),
    "a recovery that takes too long": Scene(
        evidence=(
            RecoveryTimeout(at=200.0, action="shrink-restart", seconds=181.0, limit=180.0, reached={0: ("n0", 1, ""), 1: ("n1", 3, "")}),
        ),
        root="recovery-overrun",
        on="node n0",
    ),
}  # fmt: skip

scenes = each("name", SCENES)


@scenes
def test_the_root_cause_is_found_among_its_secondary_failures(name: str) -> None:
    """By what it is first, by when it came second."""
    root = SCENES[name].diagnosis().root
    assert (root.kind, root.target) == (SCENES[name].root, SCENES[name].on)


@scenes
def test_the_order_in_which_evidence_comes_in_changes_no_diagnosis(name: str) -> None:
    """Agents speak over connections of their own."""
    scene = SCENES[name]
    root = scene.diagnosis().root
    for faults in permutations(scene.faults()):
        again = diagnose(list(faults), scene.past, scene.members, first_start=scene.first_start).root
        assert (again.kind, again.at) == (root.kind, root.at)


@scenes
def test_no_longer_is_waited_than_a_diagnosis_needs(name: str) -> None:
    """Nothing for a root that speaks for itself, a moment for twins, longest for the cause of secondary failures."""
    assert evidence_wait_seconds(SCENES[name].faults(), SCENES[name].members) == SCENES[name].waits


@scenes
def test_a_diagnosis_names_the_rank_and_the_reason(name: str) -> None:
    """The words go unchanged into log, history and command line."""
    diagnosis = SCENES[name].diagnosis()
    assert diagnosis.root.quote in diagnosis.reason
    if diagnosis.root.kind == "user-error":
        assert mentions(diagnosis.reason, "not a node")
    else:
        assert diagnosis.reason.startswith(f"{diagnosis.root.kind} of {diagnosis.root.place}: ")
        assert "of node " not in diagnosis.reason


@scenes
def test_every_fault_is_kept_as_root_cause_or_secondary_failure(name: str) -> None:
    """Each diagnosis lists its evidence; a user's error lists what made it one, too."""
    scene = SCENES[name]
    diagnosis, faults = scene.diagnosis(), scene.faults()
    assert all(fault in (diagnosis.root, *diagnosis.secondary_failures) for fault in faults)
    made = [fault for fault in (diagnosis.root, *diagnosis.secondary_failures) if fault not in faults and fault.kind != "user-error"]
    assert len(diagnosis.secondary_failures) == len(faults) + len(made) - (diagnosis.root.kind != "user-error")


def test_a_users_error_shows_the_traceback_of_the_first_that_failed() -> None:
    """It is what a person needs to mend the script."""
    root = SCENES["the same exception at the same step on two nodes"].diagnosis().root
    assert 'File "train.py", line 3' in root.detail
    assert root.signature == BAD_SHAPE
    assert root.entry.recommended_action == "user-error"


def test_a_second_cause_is_named_and_a_secondary_fault_only_counted() -> None:
    """One kill does not follow from another."""
    reason = diagnose(seen(a_killed("n0", 0, at=0.1), a_killed("n1", 2, at=0.2), an_echo("n0", 1), an_echo("n1", 3))).reason
    assert mentions(reason, "worker-sigkill of rank 2 on n1", "2 secondary failures")


def test_warnings_from_before_a_fault_are_not_counted_beside_it() -> None:
    """Training went on through them; one from the same moment is counted."""

    def behind(at: float) -> CheckpointFailure:
        return CheckpointFailure(node="n1", rank=2, at=at, kind="replica-lag", path="/dev/shm/x", why="10 snapshots were left out")

    earlier = diagnose(seen(a_killed("n0", 0, at=30.0), behind(9.0), behind(10.0)))
    assert "fault" not in earlier.reason
    assert unexplained_faults(earlier.candidates[0], CATALOGUE_ACTIONS) == []
    assert len(earlier.candidates[0].unexplained) == 2, "the diagnosis still accounts for all"
    assert mentions(diagnose(seen(a_killed("n0", 0, at=30.0), behind(9.0), behind(30.1))).reason, "1 unrelated fault")


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ("the same exception at the same step on two nodes", (*SHAPE, "step 7", "nodes n0, n1", "at once")),
        ("the same exception at the same step, now on another node", (*SHAPE, "step 7", "first on n0", "now on n1")),
        ("a job of one node fails at the same step again", ("step 7", "again", "no other node")),
        ("a script without steps that fails on all nodes at once", (*SHAPE, "nodes n0, n1", "at once")),
        (
            "a failed import on all ranks of the only node at its first start",
            ("ModuleNotFoundError", "All 2 ranks", "train.py:3", "before the first step", "Install"),
        ),
        ("wrong arguments on all ranks of the only node at its first start", ("status 2", "All 2 ranks", "`args`")),
        ("a command that no node has", ("cannot be run", "any node", "n0, n1")),
    ],
)
def test_a_user_error_states_the_evidence(scene: str, words: tuple[str, ...]) -> None:
    """A person who doubts it can check."""
    assert mentions(SCENES[scene].diagnosis().reason, *words)


def test_an_error_of_no_line_is_stated_without_one() -> None:
    """A script that no node has is opened by none of its own lines."""
    raised = WorkerException(type="FileNotFoundError", message="no train.py")
    gone = [an_end(node, rank, code=2, raised=raised, step=None) for rank, node in enumerate(("n0", "n1"))]
    assert mentions(diagnose(seen(*gone), members=4).reason, "FileNotFoundError: no train.py. The same failure on nodes n0, n1")


@each("name", sorted(CATALOGUE))
def test_only_what_the_script_itself_did_can_become_the_users_error(name: str) -> None:
    """Whatever else comes twice, at once or again, on however many nodes, stays what it is, or becomes the fault of what they share."""
    faults = [Fault(kind=name, at=float(n), node=f"n{n}", rank=n, step=7, signature="same") for n in range(3)]
    past = (before("n8", 7, "same"), before("n9", 7, "same"))
    scripts = {"worker-exception", "worker-exit-code", "worker-exit-early", "worker-gpu-out-of-memory", "user-error"}
    if isinstance(CATALOGUE[name].unhealthy.evidence, LogLine):
        scripts |= {name} & {one for one in CATALOGUE if follows_step(one) and CATALOGUE[one].attributed_to is Attribution.USER_CODE}
    assert (diagnose(faults[:1], past, 4).root.kind == "user-error") is (name in scripts)
    assert (diagnose(faults, (), 4).root.kind == "user-error") is (name in scripts)


def test_a_failure_of_the_job_as_a_whole_is_no_twin_of_a_nodes() -> None:
    """What was seen on no node compares with nothing."""
    assert diagnose(seen(an_error("n1", 0)), (before(None),)).root.kind == "worker-exception"


def test_what_asks_for_nothing_is_not_waited_for() -> None:
    """A checkpoint's trouble lets training go on, and nothing at all is nothing."""
    assert evidence_wait_seconds([], 2) == 0.0
    assert evidence_wait_seconds(seen(STUCK), 2) == 0.0
    assert evidence_wait_seconds(seen(STUCK, an_echo("n0"), an_echo("n1")), 2) == CAUSE_SECONDS


def test_a_secondary_failure_waits_as_long_as_the_job_lets_an_agent_be_silent() -> None:
    """The cause may be a node that fell silent just now."""
    assert evidence_wait_seconds(seen(an_echo("n1")), 2, silence=20.0) == 21.0
    assert evidence_wait_seconds(seen(an_echo("n1"), an_echo("n0")), 2, silence=20.0) == CAUSE_SECONDS


def test_a_fault_without_a_node_is_no_sign_of_life() -> None:
    """The job as a whole does not speak for a node that has said nothing."""
    faults = [*seen(an_error("n0", 0)), Fault(kind="recovery-overrun", at=0.0)]
    assert evidence_wait_seconds(faults, 2) == TWINS_SECONDS


PIECES = [
    *(an_end(f"n{n}", n, at=n / 10, signal=number) for n in range(3) for number in (6, 9, 11)),
    *(maker(f"n{n}", n, at=n / 10) for n in range(3) for maker in (an_error, an_echo)),
    *(a_silence(f"n{n}", at=1.0) for n in range(3)),
    *(missing(f"n{n}") for n in range(3)),
    HANGING,
]


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8), st.integers(1, 4))
def test_any_evidence_has_a_diagnosis_and_an_end_of_waiting(evidence: list[Evidence], members: int) -> None:
    """The root is no secondary failure where there is anything else, and a node that is gone always beats what follows from it."""
    faults = seen(*evidence)
    diagnosis = diagnose(faults, (before(),), members)
    assert 0.0 <= evidence_wait_seconds(faults, members) <= AWAY
    assert not is_secondary(diagnosis.root.kind) or all(is_secondary(fault.kind) for fault in faults)
    assert diagnosis.candidates[0].fault == diagnosis.root
    assert all(0.0 <= one.confidence <= 1.0 for one in diagnosis.candidates)
    assert 0.7 <= sum(one.confidence for one in diagnosis.candidates) <= 1.001
    if any(fault.kind == "node-lost" for fault in faults):
        assert diagnosis.root.kind == "node-lost"
