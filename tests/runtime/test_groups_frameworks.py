"""Frameworks that store their rank: after every recovery each process is the rank that it took over, everywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.runtime.chaos import fault
from tests.runtime.flow_double import FlowDouble, Job

LOST = (3, 0, 2, 1)
"""The ranks that are lost, one after the other."""
STEPS = (3, 6, 9, 12)
"""The steps in which they are lost."""


def seen(flow: FlowDouble) -> dict[int, list[dict[str, Any]]]:
    """Return what the ranks recorded of themselves, by step."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in (flow.folder / "seen.jsonl").read_text().splitlines():
        line_facts = json.loads(line)
        found.setdefault(line_facts["step"], []).append(line_facts)
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["any", pytest.param("again", marks=pytest.mark.long)])
def test_after_each_of_four_recoveries_there_is_one_main_process(job: Job, how: str) -> None:
    """In Accelerate and in the Trainer, with hot spares that warmed up as rank 0; also where they break a promise of the script."""
    gates = [f"gate={step}" for step in STEPS]
    options = [] if how == "any" else ["trainer"]  # which takes long to import
    chaos = [fault(rank, "forward", step) for rank, step in zip(LOST, STEPS, strict=True)]
    flow = job(how, *options, *gates, script="accelerated", chaos=chaos)
    flow.receive("roles")
    for hot_spare, (rank, step) in enumerate(zip(LOST, STEPS, strict=True)):
        flow.hot_spare(hot_spare)
        flow.receive("parked", f"s{hot_spare}")
        flow.pass_gate(f"gate={step}")
        flow.until_dead(rank)
        flow.regroup([rank], {rank: f"s{hot_spare}"})
        reports = flow.mended()
        assert "differs" not in reports[rank], reports[rank]["differs"]
    ended = flow.finish()
    assert ended.status == [0] * 4, flow.logs()
    assert ended.results[0] == ended.results[1] == ended.results[2] == ended.results[3]
    steps, number = seen(flow), 3 if options else 1
    assert len({one["pid"] for some in steps.values() for one in some}) == 8, "every rank was taken over by another process once"
    for step, ranks in steps.items():
        assert sorted({*map(tuple, (one["mains"] for one in ranks))}) == [(False,) * number, (True,) * number], (step, ranks)
        assert [all(one["mains"]) for one in ranks].count(True) == 1, (step, ranks)
        assert all(set(one["indices"].values()) == {one["indices"]["torch"]} for one in ranks), (step, ranks)
        assert sorted(one["indices"]["torch"] for one in ranks) == [0, 1, 2, 3], (step, ranks)
