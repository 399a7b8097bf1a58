"""`holdfast simulate`: the examples run, results are kept and gone on from, and the text says what a reader must know."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.exit_codes import OPERATOR_ERROR
from holdfast.history.store import History
from tests.cli.conftest import ROOT, Command
from tests.cli.written_history import PHASES, Author
from tests.mentions import mentions

SMALL = """\
name: small
duration: 20d
runs: 2
cluster: {nodes: 70, hot_spares: 2}
jobs:
  - nnodes: 64
    TIMEOUTS
faults:
  constant_rate: {per_1000_node_days: 10}
systems: [holdfast-groups, torchrun]
"""
LONG = "timeouts: {replace_ranks: 5m, restart_workers: 20m, replace_node: 20m}"


def written(folder: Path, timeouts: str = LONG) -> str:
    """Write a small scenario and return its name."""
    (folder / "small.yaml").write_text(SMALL.replace("TIMEOUTS", timeouts or "step: 10s"))
    return "small.yaml"


EXAMPLES = sorted((ROOT / "examples/simulation").glob("*.yaml"))


@pytest.mark.parametrize(
    "example", [pytest.param(one, id=one.stem, marks=() if one.stem == "clustered-2k" else pytest.mark.long) for one in EXAMPLES]
)
def test_an_example_is_simulated_and_its_shares_add_up(here: Command, example: Path) -> None:
    """Every system of it, each with the same faults and with sources for its figures."""
    done = json.loads(here("simulate", str(example), "--json").stdout)
    assert len(done["systems"]) >= 3
    assert len({json.dumps([run["events"] for run in one["runs"]]) for one in done["systems"]}) == 1
    for one in done["systems"]:
        assert sum(one["shares"].values()) == pytest.approx(1)
        assert one["ettr"]["low"] <= one["ettr"]["median"] <= one["ettr"]["high"] <= 1
        phases = [phase for action in one["figures"]["actions"].values() for phase in action["phases"]]
        assert all(phase["source"] for phase in phases if phase["seconds"])
    lost = {one["system"]: one["lost_gpu_hours_per_week"]["median"] for one in done["systems"]}
    assert lost["holdfast-groups"] < 0.6 * lost["restart-hot-spares"]


def test_the_text_compares_the_systems(here: Command, tmp_path: Path) -> None:
    """A row for each, and where the time went."""
    lines = here("simulate", written(tmp_path)).stdout.splitlines()
    assert mentions(lines[0], "small", "512 GPUs", "2 runs")
    assert [line.split()[0] for line in lines if line.startswith(("holdfast-groups", "torchrun"))] == ["holdfast-groups", "torchrun"]
    assert any(line.startswith("rollback") for line in lines)


def test_a_timeout_that_is_too_short_is_named_with_its_cure(here: Command, tmp_path: Path) -> None:
    """Who states one that is shorter than the recovery is told which to raise; without one it lasts as long as the job needs."""
    assert "timeout" not in here("simulate", written(tmp_path, "")).stderr
    hints = here("simulate", written(tmp_path, "timeouts: {replace_ranks: 20s}")).stderr
    assert mentions(hints, "holdfast-groups", "replace-ranks", "timeout", "timeouts: {replace_ranks: ...}")


def test_finished_runs_are_kept_and_not_simulated_again(here: Command, tmp_path: Path) -> None:
    """After an interruption in the middle of a line: the whole lines count, the rest is simulated, and the outcome is the same."""
    whole = here("simulate", written(tmp_path), "--json").stdout
    file = tmp_path / "runs.jsonl"
    assert here("simulate", "small.yaml", "--json", "--results", "runs.jsonl").stdout == whole
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    changed = lines[1].replace('"events": ', '"events": 1')
    file.write_text(lines[0] + changed + lines[2][:100])
    again = json.loads(here("simulate", "small.yaml", "--json", "--results", "runs.jsonl").stdout)
    assert len(file.read_text().splitlines()) == 4
    kept = json.loads(changed)["result"]
    assert kept in [run for one in again["systems"] for run in one["runs"]], "the line was read, not simulated again"


@pytest.mark.long
def test_several_processes_come_to_the_same_result(holdfast: Command, tmp_path: Path) -> None:
    """To the last digit."""
    one, two = (holdfast("simulate", written(tmp_path), "--json", "--workers", number).stdout for number in ("1", "2"))
    assert one == two


def test_what_cannot_be_used_is_refused_without_a_traceback(here: Command, tmp_path: Path) -> None:
    """A scenario with a wrong field, and a file of results that is none."""
    (tmp_path / "wrong.yaml").write_text(SMALL.replace("TIMEOUTS", "copys: 2"))
    done = here("simulate", "wrong.yaml")
    assert done.returncode == OPERATOR_ERROR
    assert mentions(done.stderr, "jobs[0].copys", "line 7", "copies")
    (tmp_path / "text.txt").write_text("no result\n")
    done = here("simulate", written(tmp_path), "--results", "text.txt")
    assert done.returncode == OPERATOR_ERROR
    assert mentions(done.stderr, "text.txt", "line 1", "no result of a simulation")


@pytest.mark.long
def test_each_published_figure_is_reproduced_or_the_reason_is_given(here: Command, tmp_path: Path) -> None:
    """One line a target, with median, goal and met; the same lines are in the file."""
    lines = here("simulate", "--validate", "--runs", "1", "--json", "targets.jsonl").stdout.splitlines()
    assert (tmp_path / "targets.jsonl").read_text().splitlines() == lines
    targets = {one["name"]: one for one in map(json.loads, lines)}
    assert len(targets) == len(lines) > 15
    for one in targets.values():
        assert one["source"]
        assert one["met"] is True or one["reason"], one
        if one["met"]:
            least = 0.0 if one["tolerance"] is None else (1 - one["tolerance"]) * one["goal"]
            assert least <= one["median"] <= (1 + (one["tolerance"] or 0.0)) * one["goal"]
    assert {"meta-mttf-16384", "meta-mttf-131072", "meta-ettr-267s-1800s", "trainmover-131072-parcae"} <= {
        name for name, one in targets.items() if one["met"]
    }
    assert targets["clockwork-torchft"]["median"] is None


def test_a_plan_recommends_what_wastes_least_and_shows_the_rest(here: Command) -> None:
    """For a job of 64 nodes: no choice that it shows wastes clearly less than the recommended one, and no spare at all wastes more."""
    found = json.loads(here("plan", "--gpus", "512", "--runs", "1", "--price", "2", "--json").stdout)
    chosen = found["recommended"]
    wasted = {one["value"]: one["wasted_gpu_hours_per_week"]["median"] for one in found["spare_nodes"]}
    assert wasted[chosen["spare_nodes"]] <= 1.02 * min(wasted.values())
    assert wasted[0] > wasted[chosen["spare_nodes"]]
    assert chosen["cost_per_week"] == pytest.approx(2 * chosen["wasted_gpu_hours_per_week"]["median"])
    assert found["systems"][0]["choice"] == "holdfast-groups"
    assert found["assumptions"][0]["wasted_gpu_hours_per_week"] == chosen["wasted_gpu_hours_per_week"]
    assert len(found["assumptions"]) > 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "--gpus", "12"), ("--gpus", "12 GPUs do not fill nodes of 8", "8 or 16")),
        (("plan", "--gpus", "4"), ("--gpus-per-node", "8 GPUs of a node are more than the 4 of the job", "Write 4 or fewer")),
        (("plan", "--gpus", "64", "--state", "1TB"), ("--network", "makes no difference", "Write all three")),
        (
            ("plan", "--gpus", "64", "--state", "1TB", "--network", "400", "--storage", "2TB/s"),
            ("--network", "'400' is not a bandwidth", "400Gbit/s"),
        ),
        (("plan", "--gpus", "64", "--copies", "3"), ("--copies", "8 nodes cannot hold 3 copies", "divisor of 8")),
        (("plan", "--gpus", "64", "--policy", "agressive"), ("agressive", "aggressive")),
        (("simulate",), ("SCENARIO", "--validate")),
    ],
)
def test_a_plan_for_what_cannot_be_is_refused(here: Command, arguments: tuple[str, ...], said: tuple[str, ...]) -> None:
    """In one line with a cure."""
    done = here(*arguments)
    assert done.returncode == OPERATOR_ERROR
    assert mentions(done.stderr, *said)


def test_phase_times_come_from_the_history_where_it_has_enough(here: Command, holdfast_home: Path, tmp_path: Path) -> None:
    """Two recoveries are too few and are refused with their number; of three, the times replace the published ones, with their source."""
    with closing(History.open()) as history:
        author = Author(history, "trained", 1_000.0)
        for number in (1, 2):
            author.incident(number, "worker-sigkill", "rank 1 on n0", seconds=10.0 * number)
        done = here("simulate", written(tmp_path), "--from-history")
        assert done.returncode == OPERATOR_ERROR
        assert mentions(done.stderr, "--from-history", "2 by restart-workers")
        author.incident(3, "worker-sigkill", "rank 1 on n0", seconds=30.0)
    done = here("simulate", "small.yaml", "--from-history", "--json")
    assert mentions(done.stderr, "restart-workers (3)")
    groups, torchrun = json.loads(done.stdout)["systems"]
    actions = groups["figures"]["actions"]
    assert {one["phase"]: one["seconds"] for one in actions["restart-workers"]["phases"]} == {
        name: pytest.approx(PHASES[name]) for name in ("communication", "isolate", "load", "reschedule", "warm-up")
    }
    assert all("history" in one["source"] for one in actions["restart-workers"]["phases"])
    others = (*actions["replace-node"]["phases"], *torchrun["figures"]["actions"]["restart-workers"]["phases"])
    assert not any("history" in one["source"] for one in others)
