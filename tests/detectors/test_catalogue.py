"""Every kind of fault, those to come included: its samples speak for it, and its entry is whole."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

import pytest

from holdfast.detectors.associations import follows_step
from holdfast.detectors.catalogue import CATALOGUE, Attribution, Fault, FaultKind, RecommendedAction, register
from holdfast.detectors.diagnosis import diagnose, see
from holdfast.detectors.evidence import LogLine, Sample, WorkerExit
from holdfast.detectors.training.exceptions import PEER_LOST
from tests.each import each

KINDS = sorted(name for name, entry in CATALOGUE.items() if not isinstance(entry.unhealthy.evidence, LogLine))
"""Kinds that the flow sees; tests/classify has those that stand in logs."""


def kinds_seen(sample: Sample) -> set[str]:
    """Return what is seen in *sample*; several pieces of evidence are an incident, and its root is what counts."""
    several = isinstance(sample.evidence, tuple)
    faults = see(sample.evidence if several else [sample.evidence], sample.limits)
    return {diagnose(faults).root.kind} if several else {fault.kind for fault in faults}


@each("name", KINDS)
def test_each_kind_sees_its_own_fault_and_no_other(name: str) -> None:
    """An unhealthy sample raises its own kind alone, its healthy twin does not raise it."""
    assert kinds_seen(CATALOGUE[name].unhealthy) == {name}
    healthy = CATALOGUE[name].healthy
    assert name not in kinds_seen(healthy)
    assert isinstance(healthy.evidence, tuple) or kinds_seen(healthy) == set()


@each("name", KINDS)
def test_an_id_says_what_happened_in_kebab_case(name: str) -> None:
    """The id is the same string in the log, the database, the command line and the docs."""
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)
    assert CATALOGUE[name].id == name


@each("name", KINDS)
def test_every_entry_is_whole(name: str) -> None:
    """Docs and diagnoses print these words: none may be missing, and a cure is no repetition of the title."""
    entry = CATALOGUE[name]
    words = (entry.title, entry.component, entry.source, entry.action, entry.reference)
    assert all(text.strip() == text and text for text in words)
    assert entry.title[0].isupper()
    assert not entry.title.endswith(".")
    assert entry.action != entry.title
    assert entry.reference.startswith(("https://", "docs/"))
    assert 0 <= entry.weight <= 100


@each("name", KINDS)
def test_a_fault_quotes_its_evidence(name: str) -> None:
    """A diagnosis without a quote cannot be judged by a person, one without a signature cannot be compared."""
    evidence = CATALOGUE[name].unhealthy.evidence
    for fault in see(evidence if isinstance(evidence, tuple) else [evidence], CATALOGUE[name].unhealthy.limits):
        assert fault.quote
        assert fault.signature
        assert fault.source
        assert fault.entry is CATALOGUE[fault.kind]


def the(entries: Iterable[FaultKind]) -> set[str]:
    """Return the ids of *entries*."""
    return {entry.id for entry in entries}


def test_a_level_asks_for_no_more_than_the_blame_bears() -> None:
    """A node leaves only for what speaks against a node, and only the diagnosis calls something the user's error."""
    entries = [CATALOGUE[name] for name in KINDS]
    assert the(one for one in entries if one.recommended_action is RecommendedAction.USER_ERROR) == {"user-error"}
    assert {one.attributed_to for one in entries if one.recommended_action in (RecommendedAction.EVICT, RecommendedAction.DRAIN)} == {
        Attribution.NODE,
        Attribution.GPU,
        Attribution.STORAGE,
    }
    assert {one.attributed_to for one in entries if one.recommended_action is RecommendedAction.RESET_GPU} == {Attribution.GPU}
    watched = the(
        one
        for one in entries
        if one.recommended_action in (RecommendedAction.RECORD, RecommendedAction.MONITOR)
        and one.attributed_to in (Attribution.USER_CODE, Attribution.NONE)
    )
    assert watched == {"loss-not-finite", "loss-spike", "training-frozen"}, "what is only watched speaks against somebody, a loss aside"
    assert the(one for one in entries if one.attributed_to is Attribution.NONE) == {
        PEER_LOST.id,
        "recovery-cut-short",
        "replace-ranks-failed",
    }


def test_a_secondary_failure_weighs_less_than_anything_that_may_have_caused_it() -> None:
    """And a lost node more than anything it may have caused."""
    others = [CATALOGUE[name].weight for name in KINDS if name != PEER_LOST.id]
    assert PEER_LOST.weight < min(others)
    assert CATALOGUE["node-lost"].weight > max(CATALOGUE[name].weight for name in KINDS if name != "node-lost")


def test_nothing_that_a_signal_or_the_world_did_can_become_the_users_error() -> None:
    """Only an end that the script itself came to can follow the step."""
    assert {name for name in KINDS if follows_step(name)} == {
        "worker-exception",
        "worker-exit-code",
        "worker-exit-early",
        "worker-gpu-out-of-memory",
    }


def test_a_second_entry_of_one_id_is_refused() -> None:
    """Two modules that name one kind would overwrite each other's samples."""
    with pytest.raises(ValueError, match="defined twice"):
        register(CATALOGUE["job-hang"])


@each("number", range(1, 65))
def test_every_signal_that_ends_a_worker_has_a_kind(number: int) -> None:
    """A signal is named by its own kind if it has one, and never passes for a good end."""
    (fault,) = see([WorkerExit(node="n0", rank=0, at=0.0, signal=number)], CATALOGUE["job-hang"].unhealthy.limits)
    known = {int(one): f"worker-{one.name.lower()}" for one in signal.Signals if f"worker-{one.name.lower()}" in CATALOGUE}
    assert fault.kind == known.get(number, "worker-other-signal")
    assert f"signal {number} " in fault.quote


def test_a_fault_says_whom_it_was_seen_on() -> None:
    """A rank on its node, a node, or the job as a whole."""
    assert Fault(kind="job-hang", at=0.0, node="n1", rank=3).target == "rank 3 on n1"
    assert Fault(kind="job-hang", at=0.0, node="n1").target == "node n1"
    assert Fault(kind="job-hang", at=0.0).target == "job"
