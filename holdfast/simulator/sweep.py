"""All runs of a scenario under all systems, in one process or several, going on from those that a file has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from holdfast.simulator.engine import simulate
from holdfast.simulator.results import ResultFile, RunResult, SystemResult
from holdfast.simulator.scenario import Scenario
from holdfast.simulator.systems import RecoverySystem


def simulate_all(
    scenario: Scenario,
    systems: Mapping[str, RecoverySystem],
    *,
    workers: int = 1,
    file: ResultFile | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> list[SystemResult]:
    """Return the results of the *systems* of *scenario* in all its runs; with *workers* above 1 in as many processes.

    What *file* has already is not simulated again; *on_done* is called for each run, known ones too.
    """
    known = dict(file.known) if file is not None else {}
    wanted = [(name, run) for run in range(scenario.runs) for name in systems]
    missing = [one for one in wanted if one not in known]
    for _ in range(len(wanted) - len(missing)):
        on_done()
    for result in _results(scenario, [(systems[name], run) for name, run in missing], workers):
        known[result.system, result.run] = result
        if file is not None:
            file.add(result)
        on_done()
    return [SystemResult(system=name, runs=[known[name, run] for run in range(scenario.runs)]) for name in systems]


def _results(scenario: Scenario, missing: Sequence[tuple[RecoverySystem, int]], workers: int) -> Iterator[RunResult]:
    """Yield the results that are *missing*, as they come."""
    if workers <= 1 or len(missing) <= 1:
        for system, run in missing:
            yield simulate(scenario, system, run)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:  # a fork would copy threads of the caller
        futures = [pool.submit(simulate, scenario, system, run) for system, run in missing]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
