"""Silent agents and bad checkpoints: what is named, and what is left open."""

from __future__ import annotations

import pytest

from holdfast.detectors.catalogue import RecommendedAction
from holdfast.detectors.evidence import CheckpointFailure, Unknown
from tests.detectors.evidence_of import a_silence, seen, the_fault
from tests.mentions import mentions


@pytest.mark.parametrize(
    ("answers", "kind", "recommended_action"),
    [
        (True, "agent-lost", RecommendedAction.RESTART),
        (False, "node-lost", RecommendedAction.EVICT),
        (Unknown("the probe timed out"), "node-unknown", RecommendedAction.EVICT),
    ],
)
def test_a_second_check_distinguishes_a_lost_agent_from_a_lost_node(
    answers: bool | Unknown,  # noqa: FBT001
    kind: str,
    recommended_action: RecommendedAction,
) -> None:
    """A node that answers keeps its ranks; one that nobody could look at is not called lost, but cannot be used either."""
    fault = the_fault(a_silence(node_answers=answers, step=7))
    assert (fault.kind, fault.entry.recommended_action, fault.node, fault.step) == (kind, recommended_action, "n0", 7)
    assert "its connection ended" in fault.quote


def test_a_probe_that_could_not_run_is_quoted() -> None:
    """Not seen is never healthy, and never dead."""
    quote = the_fault(a_silence(node_answers=Unknown("the probe timed out"))).quote
    assert mentions(quote, "probe timed out")
    assert "does not answer" not in quote


@pytest.mark.parametrize("answers", [True, False, Unknown("nobody looked")])
def test_an_agent_that_speaks_is_no_fault_whatever_the_probe_says(answers: bool | Unknown) -> None:  # noqa: FBT001
    """Two signals have to agree before a node is left."""
    assert seen(a_silence(why="", node_answers=answers)) == []


def trouble(kind: str, why: str = "[Errno 28] No space left on device") -> CheckpointFailure:
    """Return what rank 0 said about the checkpoint of step 100."""
    return CheckpointFailure(node="n0", rank=0, at=1.0, kind=kind, path="/ckpt/step-00000100", why=why, step=100)


@pytest.mark.parametrize("kind", ["checkpoint-corrupt", "checkpoint-torn", "checkpoint-disk-full", "checkpoint-read-only"])
def test_a_checkpoints_trouble_keeps_its_name_and_never_stops_the_job(kind: str) -> None:
    """Training goes on through all of them."""
    fault = the_fault(trouble(kind))
    assert fault.kind == kind
    assert fault.entry.recommended_action in (RecommendedAction.RECORD, RecommendedAction.MONITOR)
    assert "/ckpt/step-00000100" in fault.quote
    assert "No space left" in fault.quote


@pytest.mark.parametrize("word", ["checkpoint-melted", "", "job-hang", "worker-sigkill"])
def test_an_unknown_checkpoint_failure_is_a_failed_write(word: str) -> None:
    """Nor may a worker speak of anything but checkpoints here."""
    fault = the_fault(trouble(word))
    assert fault.kind == "checkpoint-write-failed"
    assert fault.signature == f"{word} /ckpt/step-00000100"
