"""`holdfast plan`: how many spares, how often to checkpoint, which policy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import click

from holdfast.cli.output import echo, echo_facts, echo_json, echo_table, echo_wrapped, heading, section
from holdfast.errors import BadParameters, Problem
from holdfast.plurals import plural
from holdfast.report import write_plan
from holdfast.report.text.wording import duration, share
from holdfast.simulator.engine import policy_named
from holdfast.simulator.planning import SIZES, JobPlan, PlanPoint, PlanRequest, PlanSweep, by_size, cases, make_plan
from holdfast.simulator.results import Spread
from holdfast.simulator.systems import SYSTEMS

WIDTH: Final = 100
MAX_NODES: Final = 100_000
"""Nodes of a job that leave room for spares in a scenario."""
HEAD: Final = ("", "ETTR", "GOODPUT", "LOST", "WASTED", "JOB FAILED")


def plan(  # noqa: PLR0913, PLR0917 (the command's options)
    gpus: int,
    gpus_per_node: int,
    step: float,
    stall: float | None,
    state: int | None,
    network: float | None,
    storage: float | None,
    copies: int | None,
    rate: float | None,
    policy: str,
    price: float | None,
    runs: int,
    workers: int,
    output: Path | None,
    *,
    as_json: bool,
) -> int:
    """Simulate the choices for a job, and recommend the best ones."""
    request = PlanRequest(
        gpus=gpus, gpus_per_node=gpus_per_node, step=step, stall=stall, state=state, network=network, storage=storage, copies=copies,
        rate=rate, policy=policy, runs=runs,
    )  # fmt: skip
    _check(request)
    quiet = as_json or not sys.stderr.isatty()
    made, sizes = _made(request, workers, with_sizes=output is not None, quiet=quiet)
    page = write_plan(made, sizes, output) if output is not None and sizes is not None else None
    if as_json:
        echo_json({**record(made, price), "page": str(page) if page else None})
    else:
        _show(made, price)
    if page and not as_json:
        echo()
        echo(str(page))
    return 0


def _check(request: PlanRequest) -> None:
    """Refuse what no scenario can hold."""
    problems = list[Problem]()
    if request.gpus < request.gpus_per_node:
        reason = f"{request.gpus_per_node:,} GPUs of a node are more than the {request.gpus:,} of the job"
        problems.append(Problem(field="--gpus-per-node", reason=reason, cure=f"Write {request.gpus:,} or fewer"))
    elif request.gpus % request.gpus_per_node:
        lower = request.gpus // request.gpus_per_node * request.gpus_per_node
        reason = f"{request.gpus:,} GPUs do not fill nodes of {request.gpus_per_node}"
        problems.append(Problem(field="--gpus", reason=reason, cure=f"Write {lower:,} or {lower + request.gpus_per_node:,}"))
    if request.copies is not None and request.nodes % request.copies:
        reason = f"{plural(request.nodes, 'node')} cannot hold {request.copies:,} copies of the model of the same size"
        problems.append(Problem(field="--copies", reason=reason, cure=f"Write a divisor of {request.nodes:,}"))
    moved = {"--state": request.state, "--network": request.network, "--storage": request.storage}
    missing = [name for name, value in moved.items() if value is None]
    if 0 < len(missing) < len(moved):
        reason = f"{' and '.join(name for name in moved if name not in missing)} makes no difference without {' and '.join(missing)}"
        problems.append(Problem(field=missing[0], reason=reason, cure="Write all three, or none of them"))
    if request.nodes > MAX_NODES:
        reason = f"{request.nodes:,} nodes are more than the {MAX_NODES:,} that can be simulated"
        problems.append(Problem(field="--gpus", reason=reason, cure="Lower it"))
    if request.step <= 0:
        problems.append(Problem(field="--step", reason="a step takes no time", cure="Write its duration, e.g. `10s`"))
    if problems:
        raise BadParameters(tuple(problems), "nothing was planned")
    policy_named(request.policy)


def _made(request: PlanRequest, workers: int, *, with_sizes: bool, quiet: bool) -> tuple[JobPlan, PlanSweep | None]:
    """Return the plan and, for its page, what is wasted at other sizes; with a progress bar unless it is to be *quiet*."""
    if quiet:
        return make_plan(request, workers=workers), by_size(request, workers=workers) if with_sizes else None
    length = cases(request) + (len(SIZES) * min(2, request.runs) if with_sizes else 0)
    with click.progressbar(length=length, label="simulating", file=sys.stderr) as bar:
        made = make_plan(request, workers=workers, on_done=bar.update)
        return made, by_size(request, workers=workers, on_done=bar.update) if with_sizes else None


def _spread(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "low": spread.low, "high": spread.high}


def record(made: JobPlan, price: float | None) -> dict[str, Any]:
    """Return the plan for programs; GPU-hours are of a week."""

    def point(one: PlanPoint) -> dict[str, Any]:
        return {
            "choice": one.label,
            "value": one.value,
            "ettr": _spread(one.result.spread(lambda run: run.ettr)),
            "goodput": _spread(one.result.spread(lambda run: run.goodput)),
            "lost_gpu_hours_per_week": _spread(one.result.spread(lambda run: run.lost_per_week)),
            "wasted_gpu_hours_per_week": _spread(one.wasted),
            "shares": one.result.shares(),
            "failures": one.result.total(lambda job: job.failures),
        }

    sweeps = {
        "spare_nodes": made.spares,
        "hot_spares": made.hot_spares,
        "checkpoint_interval_s": made.interval,
        "policy": made.policy,
        "systems": made.systems,
        "assumptions": made.sensitivity,
    }
    return {
        "gpus": made.request.gpus,
        "nodes": made.request.nodes,
        "days": made.request.days,
        "runs": made.request.runs,
        "recommended": {
            "spare_nodes": int(made.spares.best.value),
            "hot_spares": int(made.hot_spares.best.value),
            "checkpoint_interval_s": made.interval.best.value,
            "policy": made.policy.best.label,
            **point(made.sensitivity.points[0]),
            "cost_per_week": None if price is None else made.sensitivity.points[0].wasted.median * price,
        },
        **{name: [point(one) for one in sweep.points] for name, sweep in sweeps.items()},
    }


def _show(made: JobPlan, price: float | None) -> None:
    request, best = made.request, made.sensitivity.points[0]
    source = "as in a trace of a real cluster" if request.rate is None else f"independent, {request.rate:g} in 1,000 node-days"
    heading(f"{request.gpus:,} GPUs on {request.nodes:,} nodes under {SYSTEMS[best.result.system].title}")
    echo(f"Faults {source}; {plural(request.runs, 'run')} of {duration(86_400 * request.days)}. Medians, with the range.")
    echo()
    facts = [
        ("spare nodes", made.spares.best.label),
        ("hot spares", f"{made.hot_spares.best.label} of them"),
        ("checkpoints", f"every {made.interval.best.label} of training, beside in-memory snapshots"),
        ("policy", made.policy.best.label),
        ("ETTR", _ranged(best.result.spread(lambda run: run.ettr), share)),
        ("goodput", _ranged(best.result.spread(lambda run: run.goodput), share)),
        ("wasted", f"{_ranged(best.wasted, _hours)} a week, idle nodes included"),
    ]
    if price is not None:
        facts.append(("costs", f"{best.wasted.median * price:,.0f} a week at {price:g} a GPU-hour"))
    echo_facts(facts)
    if caveat := made.caveat():
        echo()
        echo_wrapped(caveat, width=WIDTH)
    for sweep in (made.spares, made.hot_spares, made.interval, made.policy, made.systems, made.sensitivity):
        _show_sweep(sweep, marked=sweep.name not in {"system", "assumption"})
    echo()
    echo_wrapped(
        "LOST: GPU-hours of the job without progress, a week; WASTED: with idle nodes. These are projections, with phase times that were "
        "published for other systems: see the page about the simulator.",
        width=WIDTH,
    )


def _show_sweep(sweep: PlanSweep, *, marked: bool) -> None:
    section(sweep.name.capitalize())
    best = sweep.best
    rows = [
        [
            f"{'* ' if marked and one is best else '  '}{one.label}",
            share(one.result.spread(lambda run: run.ettr).median),
            share(one.result.spread(lambda run: run.goodput).median),
            _hours(one.result.spread(lambda run: run.lost_per_week).median),
            _ranged(one.wasted, _hours),
            str(one.result.total(lambda job: job.failures)),
        ]
        for one in sweep.points
    ]
    echo_table([sweep.name.upper(), *HEAD[1:]], rows)


def _ranged(spread: Spread, text: Any) -> str:  # noqa: ANN401 (a function from a number to text)
    median, low, high = text(spread.median), text(spread.low), text(spread.high)
    return median if low == high else f"{median} ({low} to {high})"


def _hours(number: float) -> str:
    return f"{number:,.3g} h" if number < 1000 else f"{number:,.0f} h"  # noqa: PLR2004 (digits)
