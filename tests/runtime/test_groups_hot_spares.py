"""Hot spares under managed groups: offloaded, activated in place or by another run of the script, lost unnoticed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.chaos import fault
from tests.runtime.flow_double import Ended, FlowDouble, Job, assert_undisturbed


def start_hot_spare(flow: FlowDouble, number: int = 0) -> dict[str, Any]:
    """Start a hot spare when the recording has been written, and return its report when it is offloaded."""
    flow.receive("roles")
    flow.hot_spare(number)
    return flow.receive("parked", f"s{number}")


@pytest.mark.parametrize("how", ["any", "again"])
def test_a_hot_spare_takes_the_place_of_a_lost_rank(job: Job, undisturbed_run: Ended, how: str) -> None:
    """In place where the script promises that nothing depends on the rank; otherwise its successor does, where no script has run."""
    flow = job(how, "gate=8", chaos=[fault(2, "backward", 9)])
    parked = start_hot_spare(flow)
    assert parked["coverage"] == {"calls": parked["coverage"]["played"], "played": parked["coverage"]["played"]}
    hot_spare = flow.pids["s0"]
    flow.pass_gate()
    flow.until_dead(2)
    flow.regroup([2], {2: "s0"})
    flow.mended()
    assert (flow.pids[2] == hot_spare) == (how == "any")
    assert_undisturbed(flow, undisturbed_run)
    if how == "any":
        coverage = flow.receive("coverage", 2)
        assert (coverage["foreseen"], coverage["first_met"]) == (coverage["calls"], [])


def output_of(pid: int) -> str:
    """Return the name of the file that a process prints to; empty where it has exited: its successor, with another pid, may be the rank."""
    try:
        return Path(f"/proc/{pid}/fd/1").readlink().name
    except OSError:
        return ""


@pytest.mark.parametrize("how", ["any", "again"])
@pytest.mark.parametrize("when", ["together", "separate"])
def test_a_hot_spare_follows_the_newest_command_when_another_fault_comes_while_it_becomes_a_rank(
    job: Job, undisturbed_run: Ended, how: str, when: str
) -> None:
    """Its first command is out of date before it could be carried out, whether both come at once or one after the other."""
    flow = job(how, "gate=8", chaos=[fault(2, "backward", 9)])
    start_hot_spare(flow)
    flow.pass_gate()
    flow.until_dead(2)
    if when == "together":
        flow.kill("s0", signal.SIGSTOP)
    flow.regroup([2], {2: "s0"})
    if when == "together":
        flow.regroup()
        flow.kill(2, signal.SIGCONT)
    else:
        flow.until(lambda: output_of(flow.pids[2]) == "rank-2.log", "the hot spare, as a rank")
        flow.regroup()
    flow.mended()
    assert_undisturbed(flow, undisturbed_run)


def test_a_hot_spare_killed_while_offloaded_leaves_the_rank_to_a_new_process(job: Job, undisturbed_run: Ended) -> None:
    """No rank notices the hot spare's exit."""
    flow = job("any", "gate=8", chaos=[fault(1, "backward", 9)])
    start_hot_spare(flow)
    flow.kill("s0")
    flow.until_dead("s0")
    flow.pass_gate()
    flow.until_dead(1)
    flow.regroup([1])
    flow.mended()
    assert_undisturbed(flow, undisturbed_run)


def test_an_activated_hot_spare_that_dies_before_its_first_step_is_replaced(job: Job, undisturbed_run: Ended) -> None:
    """The first replacement is killed during the transfer of the state; the second takes the rank."""
    flow = job("any", "gate=8", chaos=[fault(3, "backward", 9), fault(3, "loading", generation=2)])
    start_hot_spare(flow)
    flow.pass_gate()
    flow.until_dead(3)
    flow.regroup([3], {3: "s0"})
    flow.until_dead(3)
    flow.regroup([3])
    flow.mended()
    assert_undisturbed(flow, undisturbed_run)


def test_an_offloaded_hot_spare_holds_less_memory_than_a_training_rank(job: Job) -> None:
    """It releases at least its parameters and the two moments of their optimizer."""
    width = 2200
    flow = job(f"width={width}", "gate=8", ranks=2, stride=1)
    parked = start_hot_spare(flow)
    pages = int(Path(f"/proc/{flow.pids[0]}/statm").read_text().split()[1])
    spared = pages * os.sysconf("SC_PAGE_SIZE") - int(parked["rss"])
    assert spared > 3 * 4 * width * width


def test_a_recording_prevents_nan_and_the_coverage_lists_what_it_lacks(job: Job) -> None:
    """A hot spare without a recording ends in the NaN of zero results; one with it is offloaded, and reports later which call was new."""
    flow = job(script="counted", ranks=2, stride=1, chaos=[fault(0, "forward", 9)])
    flow.receive("roles")
    flow.hot_spare(1, environment={"HOLDFAST_RECORDINGS": str(flow.folder / "none")})
    assert flow.receive("exception", "s1")["message"] == "the loss is nan"
    start_hot_spare(flow)
    flow.pass_gate()
    flow.until_dead(0)
    flow.regroup([0], {0: "s0"})
    flow.mended()
    coverage = flow.receive("coverage", 0)
    assert coverage["first_met"] == ["0/allreduce/(7,)float32"]
    assert coverage["calls"] == coverage["foreseen"] + 1
    assert flow.finish().status == [0, 0]
