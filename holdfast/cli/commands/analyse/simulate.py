"""`holdfast simulate`: what faults cost a scenario under each system."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from holdfast.cli.output import echo, echo_facts, echo_json, echo_table, echo_wrapped, heading, hint, section
from holdfast.errors import BadFile, BadParameters, Problem
from holdfast.history.store import History
from holdfast.plurals import plural
from holdfast.report.text.wording import NOTHING, duration, share
from holdfast.simulator.history_times import ENOUGH, read_times
from holdfast.simulator.results import ResultFile, Spread, SystemResult
from holdfast.simulator.scenario import Scenario, load_scenario
from holdfast.simulator.sweep import simulate_all
from holdfast.simulator.systems import SYSTEMS, RecoverySystem
from holdfast.simulator.transfers import StateTransfers
from holdfast.simulator.validation import targets
from holdfast.spec.files.problems import shown

HEAD: Final = ("SYSTEM", "ETTR", "GOODPUT", "LOST", "WASTED", "DOWNTIME", "JOB FAILED")
WIDTH: Final = 100


def simulate(  # noqa: PLR0913 (the command's options)
    scenario: Path | None, runs: int | None, workers: int, results: Path | None, *, validate: bool, from_history: bool, as_json: bool
) -> int:
    """Simulate the scenario in a file and show what each system makes of it, or compute published figures."""
    if validate:
        return _validate(scenario, runs or 3, as_json=as_json)
    if scenario is None:
        raise click.UsageError("name a SCENARIO file, or use `--validate`; examples/simulation has scenarios")
    found = load_scenario(scenario)
    found = found if runs is None else found.model_copy(update={"runs": runs})
    systems = {name: SYSTEMS[name] for name in found.systems}
    if from_history:
        systems = _measured(systems)
    file = _result_file(results, found, systems)
    done = run_all(found, systems, workers=workers, file=file, quiet=as_json)
    if as_json:
        echo_json(record(found, done, systems))
    else:
        _show(found, done, systems)
    return 0


def _measured(systems: Mapping[str, RecoverySystem]) -> dict[str, RecoverySystem]:
    """Return *systems* with the phase times of the history; say which actions have some."""
    with closing(History.open(create=False)) as history:
        times = read_times(history)
    if not times.used:
        known = ", ".join(f"{number} by {action}" for action, number in times.recoveries.items()) or "none"
        reason = f"the history has fewer than {ENOUGH} recoveries by any action with a single decision ({known})"
        cure = "Leave out --from-history, or come back when jobs have recovered from more faults"
        raise BadParameters((Problem(field="--from-history", reason=reason, cure=cure),), "nothing was simulated")
    used = ", ".join(f"{action} ({number})" for action, number in times.used.items())
    hint(f"Phase times of the history for {used}; all other figures are published ones.")
    return {name: times.applied_to(system) for name, system in systems.items()}


def _validate(file: Path | None, runs: int, *, as_json: bool) -> int:
    """Show each published or measured figure and what the simulator makes of it, a line each, and write them to *file*."""
    lines = list[str]()
    for target in targets(runs=runs):
        fields = target.record()
        lines.append(json.dumps(fields))
        if as_json:
            echo(lines[-1])
            continue
        goal = NOTHING if target.goal is None else f"{target.goal:.4g}"
        computed = NOTHING if target.values is None else f"{target.values.median:.4g}"
        met = {None: "shown only", True: "met", False: "not met" if fields["reproducible"] else "cannot be reproduced"}[target.met]
        echo(f"{met}: {target.what}: {computed} {target.unit}, goal {goal}")
        if target.reason:
            echo_wrapped(target.reason, "    ", width=WIDTH)
    if file is not None:
        try:
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        except OSError as error:
            raise BadFile(
                shown(str(file)), (Problem(field="file", reason=error.strerror or str(error), cure="Name another one"),)
            ) from None
    return 0


def _result_file(path: Path | None, scenario: Scenario, systems: Mapping[str, RecoverySystem]) -> ResultFile | None:
    try:
        return None if path is None else ResultFile(path, scenario, systems)
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise BadFile(shown(str(path)), (Problem(field="file", reason=reason, cure="Name a file that you may write"),)) from None


def run_all(
    scenario: Scenario, systems: Mapping[str, RecoverySystem], *, workers: int, file: ResultFile | None = None, quiet: bool = False
) -> list[SystemResult]:
    """Simulate all runs, with a progress bar on a terminal."""
    runs = scenario.runs * len(set(scenario.systems))
    if quiet or not sys.stderr.isatty():
        return simulate_all(scenario, systems, workers=workers, file=file)
    with click.progressbar(length=runs, label="simulating", file=sys.stderr) as bar:
        return simulate_all(scenario, systems, workers=workers, file=file, on_done=lambda: bar.update(1))


def record(scenario: Scenario, results: Sequence[SystemResult], systems: Mapping[str, RecoverySystem]) -> dict[str, Any]:
    """Return the results for programs, with the phase times and their sources."""
    transfers = {name: None if one is None else asdict(one) for name, one in transfers_of(scenario).items()}
    return {
        "scenario": scenario.model_dump(mode="json"),
        "transfer_seconds": transfers,
        "systems": [one.record() | {"title": SYSTEMS[one.system].title, "figures": figures(systems[one.system])} for one in results],
    }


def transfers_of(scenario: Scenario) -> dict[str, StateTransfers | None]:
    """Return how long the state of each job takes to move; None of one without a stated size."""
    links, width = scenario.cluster.links, scenario.cluster.gpus_per_node
    return {job.name: StateTransfers.of(job, links, width) for job in scenario.jobs}


def figures(system: RecoverySystem) -> dict[str, Any]:
    """Return what the simulator knows about *system*: the mean of each phase at steps of ten seconds, and its source."""
    step = 10.0
    plans = {**{str(action): plan for action, plan in system.plans.items()}}
    plans |= {f"{action}, no hot spare": plan for action, plan in system.cold.items()}
    overhead = {"share": system.step_overhead, "source": system.step_overhead_source}
    return {
        "step_overhead": overhead,
        "detect": {str(symptom): {"seconds": time.mean(step), "source": time.source} for symptom, time in system.detect.items()},
        "actions": {
            name: {
                "phases": [{"phase": phase, "seconds": time.mean(step), "source": time.source} for phase, time in plan.phases],
                "continues_from": str(plan.restore),
            }
            for name, plan in plans.items()
        },
    }


def _show(scenario: Scenario, results: Sequence[SystemResult], systems: Mapping[str, RecoverySystem]) -> None:
    gpus = sum(job.nodes for job in scenario.jobs) * scenario.cluster.gpus_per_node
    events = Spread.of(run.events for run in results[0].runs)
    heading(f"{scenario.name}: {gpus:,} GPUs for {duration(scenario.duration.total_seconds())}, {plural(scenario.runs, 'run')}")
    faults = f"{events.median:,.0f}" + (f" ({events.low:,.0f} to {events.high:,.0f})" if events.low < events.high else "")
    spares = f"{plural(scenario.spares, 'spare node')}, {scenario.cluster.hot_spares} of them with hot spares under systems that use those"
    facts = [("faults", f"{faults} in the cluster, the same for every system"), ("nodes", spares), ("policy", scenario.policy)]
    for name, times in transfers_of(scenario).items():
        if times is not None:
            loads = [("storage", times.disk), ("another node", times.replica), ("its own node's memory", times.local)]
            loaded = ", ".join(f"{duration(seconds)} from {place}" for place, seconds in loads)
            facts.append((f"state of {name}", f"loaded in {loaded}; written in {duration(times.write)}"))
    echo_facts(facts)
    echo()
    echo_table(HEAD, [_row(one) for one in results])
    echo()
    echo_wrapped(
        "Median of the runs, with the range. LOST: GPU-hours of the jobs without progress, a week; WASTED: with idle nodes.", width=WIDTH
    )
    section("Where the jobs' time went")
    shares = [one.shares() for one in results]
    names = list(dict.fromkeys(name for one in shares for name in one))
    echo_table(["", *(one.system.upper() for one in results)], [[name, *(_part(one.get(name)) for one in shares)] for name in names])
    for one in results:
        _warn(one, systems[one.system])


def _row(result: SystemResult) -> list[str]:
    downtimes = [job.downtime_median for run in result.runs for job in run.jobs.values() if job.downtime_median is not None]
    failures = result.total(lambda job: job.failures)
    return [
        result.system,
        _ranged(result.spread(lambda one: one.ettr), share),
        _ranged(result.spread(lambda one: one.goodput), share),
        _ranged(result.spread(lambda one: one.lost_per_week), _hours),
        _ranged(result.spread(lambda one: one.wasted_per_week), _hours),
        duration(Spread.of(downtimes).median) if downtimes else NOTHING,
        plural(failures, "time") if failures else "never",
    ]


def _ranged(spread: Spread, text: Any) -> str:  # noqa: ANN401 (a function from a number to text)
    median, low, high = text(spread.median), text(spread.low), text(spread.high)
    return median if low == high else f"{median} ({low} to {high})"


def _hours(number: float) -> str:
    return f"{number:,.3g} h" if number < 1000 else f"{number:,.0f} h"  # noqa: PLR2004 (digits)


def _part(number: float | None) -> str:
    return NOTHING if number is None else f"{100 * number:.2f} %"


def _warn(result: SystemResult, system: RecoverySystem) -> None:
    """Say what a reader would otherwise take for a property of the system."""
    for action, number in result.timed_out.items():
        plan = next((plan for name, plan in system.plans.items() if name == action), None)
        takes = f" It takes about {duration(plan.seconds(10.0))} here." if plan is not None else ""
        hint(
            f"{result.system}: {plural(number, 'attempt')} at {action} ended at the policy's timeout.{takes} "
            f"Raise `timeouts: {{{action.replace('-', '_')}: ...}}` of the job, here and in the job file."
        )
    reasons = dict.fromkeys(job.failed_reason for run in result.runs for job in run.jobs.values() if job.failed_reason)
    for reason in list(reasons)[:1]:
        hint(f"{result.system}: the job failed and was started again by a person; first because: {reason}")
