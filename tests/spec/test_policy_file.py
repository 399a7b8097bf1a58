"""Policy files: every problem with its field, line and cure; missing values are the base's, and the job's take precedence."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.associations import belongs
from holdfast.detectors.catalogue import NO_ACTION_NEEDED, RecommendedAction
from holdfast.errors import BadFile
from holdfast.policies.recovery.case import RecoveryAction, RecoveryBudget
from holdfast.policies.recovery.escalation import ORDERS
from holdfast.policies.recovery.policy import NAMED, PolicyTimeouts
from holdfast.spec import RecoveryTimeouts, Timeouts, TrainingJob, load_job, review
from holdfast.spec.files.problems import model_in
from holdfast.spec.files.units import format_duration
from holdfast.spec.policy import PolicyFile, load_policy, policy_for, policy_of, review_policy
from tests.mentions import mentions


def test_a_file_overrides_its_base(file: Any) -> None:
    """Levels, actions, thresholds, budget and deadlines, times in seconds."""
    path = file(
        "based_on: patient\nrecommended_actions: {gpu-off-bus: drain}\nactions: [restart-workers, replace-node]\n"
        "max_restarts_in_place: 1\nrecovery_window: 2h\ntimeouts: {shrink_restart: 30s}\nrecurring: {times: 2}\n"
        "correlated: {min_share: 50%}\nflapping: {min_gap: 0s}\nfail_on_start_errors: false\n",
        "policy.yaml",
    )
    policy, base = load_policy(path), NAMED["patient"]
    assert (policy.name, policy.based_on) == (str(path), "patient")
    assert policy.recommended_actions == {"gpu-off-bus": RecommendedAction.DRAIN}
    assert policy.order == (RecoveryAction.RESTART_WORKERS, RecoveryAction.REPLACE_NODE)
    assert policy.budget == RecoveryBudget(max_restarts_in_place=1, recovery_window=7200.0)
    assert policy.timeouts == PolicyTimeouts(shrink_restart=30.0, stated=frozenset({"shrink_restart"}))
    correlated, recurring, flapping = policy.noting
    assert (correlated.min_share, correlated.min_nodes) == (0.5, base.noting[0].min_nodes)
    assert (recurring.times, recurring.window) == (2, base.noting[1].window)
    assert (flapping.min_gap, flapping.times) == (0.0, base.noting[2].times)
    assert (policy.fail_on_start_errors, base.fail_on_start_errors) == (False, True)


@pytest.mark.parametrize("name", NAMED)
def test_an_empty_override_equals_its_base(name: str) -> None:
    """Whatever the base is."""
    policy = policy_of(PolicyFile(based_on=name), name=name)  # type: ignore[arg-type]
    assert policy == NAMED[name]
    assert policy.order == ORDERS[name]


BAD = """\
based_on: balanced
recommended_actions:
  gpu-of-bus: evict
  gpu-off-bus: evct
  worker-sigkill: record
  node-lost: monitor
actions: [restart-workers, replace-nodes, fail]
max_restarts_in_place: -1
max_recoveries_without_progres: 3
timeouts: {shrink_restart: 0s, wait_for_capacity: soon}
recurring: {times: 2, window: 60d}
correlate: {min_nodes: 2}
"""

WRONG = {
    "recommended_actions.gpu-of-bus": ("line 3: no fault kind has this name", "Did you mean 'gpu-off-bus'?"),
    "recommended_actions.gpu-off-bus": ("line 4: 'evct' is not a recommended action", "Did you mean 'evict'?"),
    "recommended_actions.worker-sigkill": (
        "line 5: at 'record' a lost rank would never be recovered",
        "The least that is allowed is 'retry-step'",
    ),
    "recommended_actions.node-lost": (
        "line 6: at 'monitor' a lost rank would never be recovered",
        "The least that is allowed is 'retry-step'",
    ),
    "actions[1]": ("line 7: no action is called 'replace-nodes'", "Did you mean 'replace-node'?"),
    "actions[2]": ("line 7: 'fail' always comes last", "Leave it out"),
    "max_restarts_in_place": ("line 8: -1 is not greater than or equal to 0", "Raise it"),
    "max_recoveries_without_progres": ("line 9: unknown field", "Did you mean 'max_recoveries_without_progress'?"),
    "timeouts.shrink_restart": ("line 10: '0s' is not greater than 0s", "Raise it"),
    "timeouts.wait_for_capacity": ("line 10: 'soon' is not a duration", "Write a number and a unit"),
    "recurring.window": ("line 11: '60d' is not less than or equal to 30d", "Lower it"),
    "correlate": ("line 12: unknown field", "Did you mean 'correlated'?"),
}


def test_all_problems_have_line_and_cure(file: Any) -> None:
    """None hides another."""
    with pytest.raises(BadFile) as refused:
        load_policy(file(BAD, "policy.yaml"))
    found = {problem.field: problem for problem in refused.value.problems}
    assert found.keys() == WRONG.keys()
    assert len(found) == len(refused.value.problems)
    for field, (reason, cure) in WRONG.items():
        assert found[field].reason.startswith(reason)
        assert found[field].cure.startswith(cure)


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("", "policy.yaml", "is empty"),
        ("- a\n", "policy.yaml", "holds no fields"),
        ("recommended_actions: {", "policy.yaml", "not valid YAML"),
        ("recommended_actions: 3", "policy.yaml", "holds no fields"),
        ("actions: []", "policy.yaml", "at least 1"),
        ("actions: [shrink-restart, shrink-restart]", "policy.yaml", "is there twice"),
        ("based_on: bold", "policy.yaml", "is not one of"),
        ("recommended_actions: {gpu-off-bus: [1]}", "policy.yaml", "is not a recommended action"),
        (b"\xff\xfe", "policy.yaml", "not UTF-8"),
        ("based_on: balanced", "policy.txt", "is not that of YAML"),
    ],
)
def test_an_invalid_policy_is_refused_without_a_traceback(file: Any, text: str | bytes, name: str, reason: str) -> None:
    """An empty file is not a policy."""
    _, problems = review_policy(file(text, name))
    assert any(reason in problem.reason for problem in problems), problems
    assert all(problem.cure for problem in problems)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    """With the nearest name."""
    (tmp_path / "careful.yaml").touch()
    _, (problem,) = review_policy(tmp_path / "carefu.yaml")
    assert mentions(problem.reason, "does not exist")
    assert mentions(problem.cure, "'careful.yaml'")


def test_a_kind_that_ends_a_rank_needs_a_recovery() -> None:
    """A stall does not: its ranks live. Kinds that need no action may stay so."""
    ends = {kind for kind in CATALOGUE if belongs(kind, "stops-the-job") and not belongs(kind, "stall")}
    ends -= {kind for kind in ends if CATALOGUE[kind].recommended_action in NO_ACTION_NEEDED}
    assert {"worker-sigkill", "node-lost", "worker-exception"} <= ends
    for kind in ends:
        with pytest.raises(ValueError, match="never be recovered"):
            PolicyFile.model_validate({"recommended_actions": {kind: "monitor"}})
    others = dict.fromkeys(CATALOGUE.keys() - ends, RecommendedAction.MONITOR)
    assert PolicyFile.model_validate({"recommended_actions": others}).recommended_actions == others


def test_the_numbers_that_the_descriptions_name_are_those_in_force() -> None:
    """An empty value is the one after *else*."""
    correlated, recurring, flapping = NAMED["balanced"].noting
    parts = {"correlated": correlated, "recurring": recurring, "flapping": flapping, "timeouts": PolicyTimeouts()}
    for part, values in parts.items():
        for name, field in model_in(PolicyFile.model_fields[part].annotation).model_fields.items():  # type: ignore[union-attr]
            value = getattr(values, name)
            lasts = "Duration" in repr(field.annotation) or "timedelta" in repr(field.annotation)
            said = format_duration(timedelta(seconds=value)) if lasts else f"{value:g}"
            said = f"`{value:.0%}`" if name.endswith("share") else said
            least = "at least " if part == "timeouts" and name != "wait_for_capacity" else ""
            assert f"else {least}{said}" in (field.description or ""), (part, name)


# -- with the job ---------------------------------------------------------------------------------------------------------


def test_the_job_overrides_the_policy_and_that_its_base(file: Any) -> None:
    """Each number for itself; also after the job went through JSON, as for the next flow."""
    path = file(
        "based_on: balanced\nmax_restarts_in_place: 1\nmax_recoveries_without_progress: 7\n"
        "timeouts: {shrink_restart: 30s, replace_ranks: 5s}\n",
        "policy.yaml",
    )
    job = TrainingJob(name="a", script="b.py", policy=str(path), max_restarts_in_place=5)
    job = job.model_copy(update={"timeouts": Timeouts(recovery=RecoveryTimeouts(shrink_restart=timedelta(seconds=10)))})
    for one in (job, TrainingJob.model_validate(job.model_dump(mode="json"))):
        policy = policy_for(one)
        assert policy.budget == RecoveryBudget(max_restarts_in_place=5, max_recoveries_without_progress=7)
        assert policy.timeouts == PolicyTimeouts(
            shrink_restart=10.0, replace_ranks=5.0, stated=frozenset({"shrink_restart", "replace_ranks"})
        )


def test_a_job_names_a_policy_or_a_file_next_to_the_job_file(tmp_path: Path) -> None:
    """Other names are refused with a suggestion."""
    job_file = tmp_path / "job.yaml"
    beside, below = str(tmp_path / "mine.yaml"), str(tmp_path / "sub" / "mine.yml")
    for said, means in (("patient", "patient"), ("mine.yaml", beside), ("sub/mine.yml", below)):
        job_file.write_text(f"name: a\nscript: b.py\npolicy: {said}\n")
        assert load_job(job_file)[0].policy == means
    job_file.write_text("name: a\nscript: b.py\npolicy: aggressiv\n")
    with pytest.raises(BadFile, match=r"policy: line 3: .*'aggressiv'.*'aggressive'"):
        load_job(job_file)


def test_a_job_with_a_bad_policy_file_is_refused_with_the_files_problems(tmp_path: Path) -> None:
    """`holdfast validate` and `holdfast run` report them with the job's."""
    (tmp_path / "b.py").write_text("")
    (tmp_path / "mine.yaml").write_text("recommended_actions: {gpu-of-bus: evict}\nactions: [shrnk]\n")
    (tmp_path / "job.yaml").write_text("name: a\nscript: b.py\npolicy: mine.yaml\n")
    found = [problem for problem in review(tmp_path / "job.yaml").problems if problem.field == "policy"]
    assert len(found) == 2
    assert mentions(found[0].reason, tmp_path / "mine.yaml", "recommended_actions.gpu-of-bus", "line 1")
    assert mentions(found[1].cure, "'shrink-live'")
