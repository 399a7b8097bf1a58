"""The page of a plan: every plot in both sizes, every cause in a legend, every choice in a table."""

from __future__ import annotations

import re
from dataclasses import replace

from holdfast.report.pages.plan_page import IDLE, causes, page
from holdfast.simulator.engine import simulate
from holdfast.simulator.planning import JobPlan, PlanPoint, PlanRequest, PlanSweep
from holdfast.simulator.results import SystemResult
from tests.mentions import mentions


def a_plan(*, other_rate: float = 400.0) -> JobPlan:
    """Return a plan of two choices, each simulated once, and another system with faults at *other_rate*."""
    request = PlanRequest(gpus=64, rate=200.0, runs=1)
    points = []
    for spares in (1, 4):
        scenario = request.scenario(spares=spares, hot_spares=1)
        result = SystemResult(system="holdfast-groups", runs=[simulate(scenario, "holdfast-groups", 0)])
        points.append(PlanPoint(label=f"{spares} <b>", value=spares, result=result))
    names = ("spare nodes", "hot spares", "checkpoint interval", "policy", "system", "assumption")
    sweeps = [PlanSweep(name=name, points=points) for name in names]
    scenario = PlanRequest(gpus=64, rate=other_rate, runs=1).scenario(spares=1, hot_spares=1)
    other = SystemResult(system="torchrun", runs=[simulate(scenario, "torchrun", 0)])
    pair = [replace(points[0], label="holdfast-groups"), PlanPoint(label="torchrun", value=1, result=other)]
    sweeps[4] = PlanSweep(name="system", points=pair)
    fields = ("spares", "hot_spares", "interval", "policy", "systems", "sensitivity")
    return JobPlan(request=request, **dict(zip(fields, sweeps, strict=True)))


def test_a_plan_becomes_one_page_that_fetches_nothing() -> None:
    """Four plots, wide and narrow; a table for each sweep; labels are escaped."""
    plan = a_plan()
    text = page(plan, PlanSweep(name="GPUs", points=plan.spares.points)).decode()
    assert text.count('class="drawing"') == 8
    assert text.count("<table") == 7
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]+"', text)
    assert "NaN" not in text
    for cause in ("idle nodes", "T0 rollback", "snapshots"):
        assert f"</i>{cause}</li>" in text, cause
    assert "GPUs, with 3 %" in text


def test_a_system_that_wastes_less_is_named_with_what_ours_wastes_most_on() -> None:
    """A plan must not recommend without a word what its own table contradicts."""
    assert a_plan().caveat() == ""
    text = a_plan(other_rate=0.01).caveat()
    assert mentions(text, "torchrun wastes less", "than holdfast-groups", "of the time")


def test_the_causes_of_a_bar_add_up_to_what_is_wasted() -> None:
    """As a share of the job's time, with idle nodes last."""
    for point in a_plan().spares.points:
        run = point.result.runs[0]
        found = causes(point)
        assert list(found)[-1] == IDLE
        assert abs(sum(found.values()) - run.wasted_per_week * 3600 * run.seconds / (7 * 86_400) / run.held) < 1e-9
