"""The flow is a state machine: each state of a job has its task, and each outcome of the task leads where the one table says."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import pytest
from prefect.utilities.collections import visit_collection

from holdfast.flows.training_job import MACHINE, training_job
from holdfast.policies.states import TERMINAL, TRANSITIONS, State
from holdfast.prefect_client.supervised_job import SupervisedJob
from holdfast.spec import TrainingJob

TASKS = sorted(Path(__file__).parents[2].glob("tasks/[!_]*.py"))


def test_every_state_in_which_a_flow_has_work_has_its_task() -> None:
    """Nothing runs for a job that has ended, or is suspended: whoever resumes that one launches it."""
    assert MACHINE.keys() == set(State) - TERMINAL - {State.SUSPENDED}
    assert {state: stage.outcomes for state, stage in MACHINE.items()} == {state: TRANSITIONS[state] for state in MACHINE}


def test_an_incident_reads_detect_decide_isolate_reschedule_resume() -> None:
    """Each state of an incident leads to the one whose task a reader expects next, and that back to `monitor`."""
    names = ["monitor", "detect", "decide", "isolate", "reschedule", "resume", "monitor"]
    way = [State.RUNNING, State.DIAGNOSING, State.DECIDING, State.ISOLATING, State.RESCHEDULING, State.RESUMING, State.RUNNING]
    assert [getattr(MACHINE[state].task, "__name__", "") for state in way] == names
    assert all(after in MACHINE[state].outcomes.values() for state, after in pairwise(way))


@pytest.mark.parametrize("module", TASKS, ids=lambda path: path.stem)
def test_every_module_of_tasks_defines_tasks(module: Path) -> None:
    """What tasks call lives in `holdfast`."""
    functions = [node for node in ast.parse(module.read_text()).body if isinstance(node, ast.FunctionDef)]
    names = [ast.unparse(call) for function in functions for call in function.decorator_list]
    assert any(name.startswith(("task(", "job_task(")) for name in names)


def test_prefect_does_not_look_behind_a_supervised_job_for_futures() -> None:
    """Its controller holds a fleet, a board of every rank, and threads: to walk through them would take seconds at each task."""
    run = SupervisedJob(TrainingJob(name="large", command=["true"]), standby=False)
    seen = list[object]()
    visit_collection({"run": run}, visit_fn=seen.append, return_data=False)
    assert run in seen
    assert not any(isinstance(one, TrainingJob) for one in seen)


def test_the_flow_is_a_loop_over_the_machine() -> None:
    """No try, no sleep, no branch: whoever reads it reads the life of a job."""
    tree = ast.parse(Path(__file__).parents[2].joinpath("flows/training_job.py").read_text())
    (body,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert body.name == training_job.fn.__name__
    assert not any(isinstance(node, ast.Try | ast.If) for node in ast.walk(body))
