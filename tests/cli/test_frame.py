"""The picture of a job on terminals of any size. `python -m tests.cli.test_frame` writes the golden screens anew: look at them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest
from rich.cells import cell_len

from holdfast.cli.changes import JobChange
from holdfast.cli.job_view import JobView
from holdfast.cli.node_view import JobNode
from holdfast.cli.recovery_view import ALWAYS
from holdfast.history.models import JobTransition
from holdfast.policies.states import TERMINAL, State
from holdfast.report.phases import PHASE_OF_STATE
from tests.cli.fixed_views import a_recovering_job, a_training_job, drawn, event, transition
from tests.mentions import mentions

SCREENS: Final = Path(__file__).parent / "screens"


def events() -> list[JobChange]:
    """Return what has happened, today whenever that is: a run of the tests may go on past midnight."""
    return [
        event(
            "hot spare 1 on gpu-03 has warmed up after 1.49 s, holding 297 MB of memory; 8 of 8 calls were answered from the recording", 100
        ),
        event("gpu-01: the clock of GPU 3 is throttled", 200),
    ]


GOLDEN: Final[dict[str, Callable[[], list[str]]]] = {
    "training-80x24": lambda: drawn(a_training_job(), 80, 24, events=events()),
    "recovery-80x24": lambda: drawn(a_recovering_job(), 80, 24),
    "recovery-of-512-ranks-160x50": lambda: drawn(a_recovering_job(nodes=64, ranks=8, phase=4, name="llama"), 160, 50, events=events()),
    "recovery-40x10": lambda: drawn(a_recovering_job(), 40, 10),
}
STATES: Final[dict[str, Callable[[], JobView]]] = {
    "training": a_training_job,
    "recovering": a_recovering_job,
    "large": lambda: a_recovering_job(nodes=64, ranks=8, name="a-job-with-a-name-that-is-as-long-as-names-of-jobs-may-be"),
    "waiting": lambda: dataclasses.replace(a_recovering_job(), move=transition("WAITING", "1 node of 2 is there", 0)),
    "launching": lambda: JobView(job=a_training_job().job, at=a_training_job().job.at + 2),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_screen_is_the_golden_one(name: str) -> None:
    """Each line and each column."""
    assert GOLDEN[name]() == (SCREENS / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("lines", [5, 8, 10, 16, 24, 40, 50])
@pytest.mark.parametrize("columns", [24, 40, 60, 80, 120, 160])
def test_the_picture_fits_every_terminal(state: str, columns: int, lines: int) -> None:
    """No line is wider, no picture higher, no word cut without an ellipsis; the state shows on all but the narrowest."""
    shown = drawn(STATES[state](), columns, lines, events=events())
    assert max(map(cell_len, shown)) <= columns
    assert len(shown) < lines
    if columns >= 40:
        assert STATES[state]().state in shown[0]
        known = words([*drawn(STATES[state](), 2000, 200, events=events()), *drawn(STATES[state](), 2000, 39, events=events())])
        unknown = words(shown) - known - OTHERS
        assert not {word for word in unknown if any(word != one and one.startswith(word) for one in known)}


OTHERS: Final = {"1", "2", "4", "and", "node", "nodes", "gpu-0"}
"""Words that only a small terminal shows: how many nodes are not named."""


def words(lines: Sequence[str]) -> set[str]:
    """Return the words on a screen, without those of its frame and those that end with an ellipsis."""
    return {word.rstrip(",:;") for line in lines for word in re.split(r"[\s│]+", line) if word and not re.search(r"[…━─╭╮╰╯]", word)}


def test_a_recovery_shows_which_phase_runs_and_for_how_long() -> None:
    """The state machine's own times: they add up to the time since the fault."""
    for place, name in enumerate(("diagnose", "diagnose", "isolate", "reschedule", "resume")):
        recovery = a_recovering_job(phase=place).recovery
        assert recovery is not None
        assert [phase.name for phase in recovery.phases if phase.running] == [name]
        assert sum(phase.seconds or 0 for phase in recovery.phases) == pytest.approx(recovery.seconds) == pytest.approx(4.0)
        to_come = ["isolate", "reschedule", "resume"][max(0, place - 1) :]
        assert [phase.name for phase in recovery.phases if phase.seconds is None] == to_come


def test_a_wait_is_a_phase_of_its_own_and_repeated_phases_add_up() -> None:
    """A second fault during a recovery leads back to its first phase; what is waited for shows."""
    view = a_recovering_job(phase=3)
    moves: list[JobTransition] = [*view.transitions]
    fault = view.incidents[-1].fault_at
    moves += [transition("WAITING", "no node is free", fault + 2), transition("DIAGNOSING", "another fault", fault + 3)]
    view = dataclasses.replace(view, transitions=moves, move=moves[-2])
    assert view.recovery is not None
    times = {phase.name: phase.seconds for phase in view.recovery.phases}
    assert times == pytest.approx({"detect": 1.2, "diagnose": 1.16, "isolate": 0.24, "reschedule": 0.4, "wait": 1.0, "resume": None})
    assert any("no node is free" in line for line in drawn(view, 80, 24))


def test_a_recovery_that_is_over_shows_for_a_while() -> None:
    """Most take less than a second: nobody could read them."""
    view = a_recovering_job(phase=4)
    one = view.incidents[-1]
    one.closed_at, one.outcome, one.downtime_s, one.steps_lost = view.at, "recovered", 3.8, 2
    after = dataclasses.replace(view, move=transition("RUNNING", "", view.at), at=view.at + 5)
    assert after.recovery is not None
    assert after.recovery.phase is None
    assert sum(phase.seconds or 0 for phase in after.recovery.phases) == pytest.approx(3.8)
    assert dataclasses.replace(after, at=view.at + 60).recovery is None


def test_nodes_that_need_attention_show_among_any_number() -> None:
    """On small terminals by name alone, on large ones in a table, with their ranks and the reason."""
    view = a_recovering_job(nodes=64, ranks=8)
    for columns, lines in ((80, 24), (120, 30), (160, 50)):
        text = " ".join(" ".join(drawn(view, columns, lines)).replace("│", " ").split())
        assert "512 ranks on 64 nodes, 2 need attention" in text
        assert re.search(r"gpu-01 +\(?ranks 0–7\)? +lost: [^:]*unreachable", text)  # noqa: RUF001 (a range)
        assert re.search(r"gpu-42 +\(?ranks 328–335\)? +suspect: gpu-thermal", text)  # noqa: RUF001 (a range)


def test_nodes_of_one_condition_share_a_line() -> None:
    """A failed switch must not fill the screen."""
    view = a_recovering_job(nodes=64, ranks=8)
    members = [JobNode(name=one.name, ranks=one.ranks, condition="lost", reason="unreachable", is_bad=True) for one in view.nodes.members]
    view = dataclasses.replace(view, nodes=dataclasses.replace(view.nodes, members=members))
    lines = [line for line in drawn(view, 80, 24) if "! " in line]
    assert len(lines) == 1
    assert mentions(lines[0], "gpu-01, gpu-02, gpu-03", 61, "ranks 0–511", "lost")  # noqa: RUF001 (a range)


def test_what_a_failure_would_cost_is_known_to_people_and_programs() -> None:
    """A process: since the newest snapshot. A node: since the newest replica, or else the newest checkpoint. Neither: all steps."""
    view = a_training_job()
    record = view.as_record()
    assert record["at_risk"] == {"steps": 2, "seconds": pytest.approx(0.8)}
    assert record["at_risk_with_node"] == {"steps": 10, "seconds": pytest.approx(4.0)}
    assert view.snapshots is not None
    no_replica = dataclasses.replace(view, snapshots=view.snapshots.model_copy(update={"replica_step": None}))
    assert no_replica.as_record()["at_risk_with_node"]["steps"] == 100
    assert dataclasses.replace(no_replica, checkpoint=None).as_record()["at_risk_with_node"]["steps"] == 6000
    assert dataclasses.replace(view, snapshots=None, checkpoint=None).as_record()["at_risk"]["steps"] == 6000
    assert dataclasses.replace(view, steps=()).as_record()["at_risk"] is None
    assert "at risk" not in "\n".join(drawn(a_recovering_job(), 80, 24)), "the failure has happened"


def test_the_states_of_a_recovery_are_those_of_the_state_machine() -> None:
    """A state that is renamed must not lose its phase."""
    without = {State.LAUNCHING, State.RUNNING, State.MIGRATING, State.SUSPENDED}  # nothing is being recovered
    assert set(PHASE_OF_STATE) == set(State) - TERMINAL - without
    assert {row.after for row in a_recovering_job(phase=4).transitions} <= set(PHASE_OF_STATE)
    assert {"detect", *PHASE_OF_STATE.values()} == {*ALWAYS, "wait"}


if __name__ == "__main__":
    for golden, screen in GOLDEN.items():
        (SCREENS / f"{golden}.txt").write_text("\n".join(screen()) + "\n")
