"""`holdfast policy`: what a policy does, the problems of a file, and how decisions were made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.detectors.codec import packed
from holdfast.errors import UnknownPolicy
from holdfast.history.models import DecisionRecord, Incident, StragglerDecision
from holdfast.history.store import History
from holdfast.policies.recovery.policy import NAMED
from holdfast.policies.slowness import StragglerCase
from tests.cli.conftest import Command, refused
from tests.cli.written_history import Author
from tests.mentions import mentions, one_line_mentions

MINE = "based_on: patient\nrecommended_actions: {gpu-off-bus: restart}\nrecurring: {times: 2}\ntimeouts: {shrink_restart: 30s}\n"


@pytest.mark.parametrize("name", NAMED)
def test_a_named_policy_is_shown_rule_by_rule_and_marks_nothing(here: Command, name: str) -> None:
    """Each rule in English, none by its Python."""
    text = here("policy", "show", name).stdout
    for rule in NAMED[name].rules:
        assert f"{type(rule).__name__}: " in text
    assert repr(NAMED[name].rules[3]) not in text
    assert "*" not in text
    assert not json.loads(here("policy", "show", name, "--json").stdout)["differs"]


def test_without_a_name_the_usual_policy_is_shown(here: Command) -> None:
    """And the others are listed."""
    done = here("policy", "show")
    assert done.stdout == here("policy", "show", "balanced").stdout
    assert "patient, aggressive" in done.stderr


def test_a_file_is_shown_with_what_differs_from_its_base(here: Command, tmp_path: Path) -> None:
    """Rules, recommended actions and numbers that differ are marked, and listed with their previous values."""
    (tmp_path / "mine.yaml").write_text(MINE)
    marked = {line[1:].strip() for line in here("policy", "show", "mine.yaml").stdout.splitlines() if line.lstrip().startswith("*")}
    assert any(mentions(line, "LeaveWhenRecurring", "number 2") for line in marked)
    assert any(mentions(line, "gpu-off-bus", "restart", "was: evict") for line in marked)
    output = json.loads(here("policy", "show", "mine.yaml", "--json").stdout)
    action, times, timeout = output["differs"]
    assert mentions(action, "recommended_actions.gpu-off-bus", "restart", "catalogue")
    assert mentions(times, "recurring.times", 2, 6)
    assert mentions(timeout, "timeouts.shrink_restart", "30.0 s", "3 min 00 s")
    assert (output["based_on"], output["numbers"]["timeouts.shrink_restart"]) == ("patient", 30.0)
    assert output["recommended_actions"] == {"gpu-off-bus": {"recommended_action": "restart", "catalogue": "evict"}}
    assert [rule["differs"] for rule in output["rules"]].count(True) == 2


def test_an_unknown_policy_is_refused_with_a_suggestion(here: Command) -> None:
    """A path that is not there is a file that is not there."""
    done = here("policy", "show", "aggressiv")
    assert refused(done, UnknownPolicy("aggressiv", ("aggressive",), tuple(NAMED)))
    assert "mine.yaml" in here("policy", "show", "mine.yaml").stderr


def test_check_reports_every_problem_of_every_file(here: Command, tmp_path: Path) -> None:
    """Exit status 2 when one of them cannot be used, as of `validate`."""
    (tmp_path / "good.yaml").write_text(MINE)
    (tmp_path / "bad.yaml").write_text("recommended_actions: {gpu-of-bus: evict}\nactions: [shrnk]\n")
    done = here("policy", "check", "good.yaml")
    assert done.returncode == 0
    assert mentions(done.stdout, "good.yaml", "valid", "patient", "3 differences")
    done = here("policy", "check", "good.yaml", "bad.yaml", "none.yaml")
    assert done.returncode == 2
    for named in (
        ("good.yaml", "valid"),
        ("bad.yaml", "2 problems"),
        ("recommended_actions.gpu-of-bus", "line 1", "'gpu-off-bus'"),
        ("actions[0]", "line 2", "'shrnk'", "'shrink-live'"),
        ("none.yaml", "1 problem"),
        ("file", "does not exist"),
    ):
        assert one_line_mentions(done.stdout, *named), named
    output = json.loads(here("policy", "check", "good.yaml", "bad.yaml", "--json").stdout)
    assert [one["ok"] for one in output] == [True, False]
    assert output[1]["problems"][1]["field"] == "actions[0]"


def an_attempt(running: Author, one: Incident, seconds: float, action: str) -> DecisionRecord:
    """Return a further decision about an incident, as a flow records it now."""
    act = {"policy": "/where/mine.yaml", "noted": {"LeaveWhenRecurring": "too often, the node is replaced"}, "seats": []}
    return DecisionRecord(
        job_id=running.job.id, incident_id=one.id, at=one.fault_at + seconds, action=action, rule="ReplaceNode(on_secondary=True)",
        reason="n2 replaces n0", act=act, passed_over={"RestartWorkers": "n0 cannot hold ranks"},
    )  # fmt: skip


def test_explain_shows_rule_and_end_of_each_attempt(here: Command, running: Author, book: History) -> None:
    """Also of incidents from before a policy was on record."""
    one = running.incident(4, "worker-sigkill", "rank 0 on n0", seconds=50)
    running.state = "RESUMING"
    stalled = "restart-workers brought no step within 120 s"
    running.move("DIAGNOSING", stalled, seconds=50.1, event="faulted")
    running.write(an_attempt(running, one, 0.2, "replace-node"))
    output = json.loads(here("policy", "explain", "4", "--json").stdout)
    assert (output["job"], output["incident"], output["kind"], output["outcome"]) == ("gpt-small", 4, "worker-sigkill", "recovered")
    first, second = output["attempts"]
    assert (first["action"], first["policy"], first["noted"]) == ("restart-workers", None, {})
    assert first["ended"].endswith(stalled)
    assert (second["action"], second["policy"]) == ("replace-node", "/where/mine.yaml")
    assert second["passed_over"] == {"RestartWorkers": "n0 cannot hold ranks"}
    assert mentions(second["ended"], "recovered", "310 ms")
    text = here("policy", "explain", "4", "--job", "gpt-small").stdout
    for words in (
        "replace-node",
        "too often, the node is replaced",
        "n0 cannot hold ranks",
        "/where/mine.yaml",
    ):
        assert words in text


def test_explain_names_what_it_cannot_find(here: Command, running: Author) -> None:
    """As `holdfast incidents show` does."""
    assert here("policy", "explain", "99").returncode == 2
    assert "gpt-smal" in here("policy", "explain", "1", "--job", "gpt-smal").stderr


def test_an_incident_that_passed_by_itself_was_not_decided_about(here: Command, running: Author) -> None:
    """The output says so."""
    running.write(
        Incident(
            job_id=running.job.id, number=9, kind="worker-stopped", target="rank 1 on n0", fault_at=1.0, detected_at=1.0,
            generation_before=1, outcome="passed", closed_at=2.0,
        )
    )  # fmt: skip
    done = here("policy", "explain", "9")
    assert mentions(done.stderr, "No decision", "passed")
    assert json.loads(here("policy", "explain", "9", "--json").stdout)["attempts"] == []


def test_what_was_decided_about_slow_ranks_is_explained_with_its_sum(here: Command, running: Author) -> None:
    """As text and JSON; a replay shows what another policy decides."""
    assert mentions(here("policy", "explain", "slow").stderr, "No rank", "'gpt-small'")
    slow = StragglerCase(now=running.job.at, kind="straggler-gpu", rank=1, node="n0", step=0.4, lost=0.1, remaining=2_000, spares=("n3",))
    weighed = NAMED["aggressive"].stragglers(slow)
    running.write(
        StragglerDecision(
            job_id=running.job.id, at=slow.now, kind=slow.kind, rank=1, node="n0", act=weighed.act, reason=weighed.reason,
            policy="aggressive", record=packed(slow),
        )
    )  # fmt: skip
    text = here("policy", "explain", "slow", "--job", "gpt-small").stdout
    assert mentions(" ".join(text.split()), "move", "straggler-gpu", "aggressive", "rank 1", "n0", "100 ms", "2,000")
    output = json.loads(here("policy", "explain", "slow", "--json").stdout)
    assert (output["job"], output["slow_ranks"][0]["act"]) == ("gpt-small", "move")
    assert mentions(here("policy", "replay", "patient").stdout, "stay", "rank 1", "n0")
