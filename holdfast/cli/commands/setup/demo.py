"""`holdfast demo`: one real training job, undisturbed and then with three faults; both runs must end bit-equal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import holdfast
from holdfast.cli.flow_process import FlowProcess, StartLock, write_spec
from holdfast.cli.job_view import view_job
from holdfast.cli.output import echo, echo_json
from holdfast.cli.screens import screen_for
from holdfast.cli.watch import JobWatcher, counted_signals
from holdfast.cluster.local import LocalNodes
from holdfast.errors import HoldfastError, NotWritable, OperatorError
from holdfast.exit_codes import INTERRUPTED
from holdfast.history import History, Job, models, queries
from holdfast.host.gpu_assignment import VISIBLE
from holdfast.paths import home
from holdfast.plurals import plural
from holdfast.prefect.server import TemporaryServer, is_configured
from holdfast.report import memory, write_report
from holdfast.report.phases import label_of
from holdfast.report.text import wording
from holdfast.report.text.wording import duration
from holdfast.spec import LocalCluster, TrainingJob
from holdfast.testing.chaos import Chaos

STEPS: Final = 100
FAULTS: Final = 3
UNDISTURBED: Final = "demo-undisturbed"
FAULTY: Final = "demo-with-faults"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One fault that was injected."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the two runs have in common: parameters, losses, number of steps."""

    parameters: bool
    losses: bool
    unknown: int
    """Steps whose loss was lost with rank 0: its node was powered off before it could report it."""
    steps: int
    digest: str

    @property
    def bit_equal(self) -> bool:
        """Return whether both runs ended with equal parameters and had equal losses at every step where both are known."""
        return self.parameters and self.losses and self.steps == STEPS


def demo(output: Path | None, *, no_browser: bool, as_json: bool) -> int:
    """Run the demo, and write its result where requested; return 0 if both runs are bit-equal and every fault was recovered."""
    folder = _make_folder()
    try:
        with _interrupted_by_signals(), _prefect(folder) as server:
            echo(f"Prefect UI (while the demo runs): {server}" if server else "Prefect: the server that is configured.")
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                status, facts = _run_both(folder, browser=not no_browser)
            if as_json:
                echo_json(facts)
            if output is not None:
                _write(output, facts)
            return status
    except KeyboardInterrupt:
        echo("stopped; no process of the demo is left.")
        return INTERRUPTED
    finally:
        for node in _nodes().names():
            _nodes().clear(node)


def _make_folder() -> Path:
    """Create an empty home for the demo, separate from everything else."""
    folder = home() / "demo"
    os.environ["HOLDFAST_HOME"] = str(folder)
    os.environ.pop("HOLDFAST_HISTORY", None)
    try:
        for node in _nodes().names():  # of a demo that was killed
            _nodes().clear(node)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise NotWritable("the demo's folder", str(folder), error.strerror or str(error)) from error
    return folder


def _nodes() -> LocalNodes:
    return LocalNodes.of(_cluster())


def _cluster() -> LocalCluster:
    return LocalCluster(name="demo", nodes=3)


def _script() -> Path:
    """Return the training script: in ``examples`` of a checkout, or in the installed package."""
    package = Path(holdfast.__file__).parent
    found = package.parent / "examples" / "byte_gpt.py"
    return found if found.exists() else package / "examples" / "byte_gpt.py"


def _job(name: str, folder: Path) -> TrainingJob:
    return TrainingJob.model_validate(
        {
            "name": name,
            "script": str(_script()),
            "args": ["--steps", str(STEPS), "--result", str(folder / f"{name}.json")],
            "workdir": str(folder),
            "nnodes": 2,
            "spare_nodes": 1,
            "nproc_per_node": 2,
            "hot_spares": 2,
            "checkpoint": {
                "interval": 5,
                "memory": {"max_overhead": "25%"},
            },  # with more ranks than cores the default makes snapshots rarer
            "env": {VISIBLE: ""},  # it trains on the CPU, so that its nodes need no GPU
        }
    )


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Handle SIGHUP and SIGTERM like Ctrl-C: the demo ends all its processes."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- Prefect -----------------------------------------------------------------------------------------------------------


@contextmanager
def _prefect(folder: Path) -> Iterator[str | None]:
    """Start a Prefect server and give its description; None when one is configured."""
    if is_configured():
        yield None
        return
    echo("Starting a Prefect server for the demo ...")
    server = TemporaryServer(folder / "prefect", "server.log", {**os.environ, "PREFECT_LOGGING_LEVEL": "WARNING"})
    os.environ.update(server.environment)
    try:
        server.wait()
        yield server.ui_hint
    finally:
        server.close()


# -- the two runs ------------------------------------------------------------------------------------------------------


def _run_both(folder: Path, *, browser: bool) -> tuple[int, dict[str, Any]]:
    """Run both jobs; return the exit status and the result for programs."""
    with closing(History.open()) as history:
        echo(f"\n1. A byte-level GPT on the standard library's own text, 2 nodes of 2 ranks and 1 spare, {STEPS} steps, undisturbed.")
        calm = _run(history, UNDISTURBED, folder)
        echo("\n2. The same again, with a killed rank, a stopped rank and a lost node.")
        injected: list[Injection] = []
        broken = _run(history, FAULTY, folder, injected)
        proof = _prove(history, calm, broken, folder)
        report = write_report(history, broken, folder / "report.html")
        recoveries = [_recovery(history, row, one) for row, one in zip(queries.incidents(history, broken.id), injected, strict=False)]
        snapshots = [row for row in queries.snapshots(history, broken.id) if row.step is not None]
        _show(recoveries, snapshots, view_job(history, broken).no_snapshots, proof)
        _show_files(report, folder)
        if browser and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            webbrowser.open(report.as_uri())
        status = 0 if proof.bit_equal and len(recoveries) == len(injected) == FAULTS else 1
        return status, _facts(recoveries, snapshots, proof, report)


def _run(history: History, name: str, folder: Path, injected: list[Injection] | None = None) -> Job:
    """Run one job to its end and show its progress; with *injected*, inject faults and record them there."""
    job = _job(name, folder)
    spec = write_spec(name, {"job": job.model_dump(mode="json"), "cluster": _cluster().model_dump(mode="json")})
    with StartLock(name) as lock, counted_signals() as signals:
        flow = FlowProcess(name, spec, lock, frozenset())
        if injected is not None:
            threading.Thread(target=_inject, args=(name, injected), name="chaos", daemon=True).start()
        screen = screen_for(as_json=False, hint="Ctrl-C ends the demo")
        status = JobWatcher(history, screen, flow=flow, from_now=False).until_the_end(signals)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        raise DemoFailed(name, str(flow.log))
    return queries.newest_job(history, name)


class DemoFailed(OperatorError):
    """A run of the demo did not complete."""

    job: str
    log: str

    def __str__(self) -> str:
        return f"job '{self.job}' did not complete. The reason is above and in {self.log}."


def _inject(job: str, injected: list[Injection]) -> None:
    """Kill a rank, stop one, and power off the node of rank 0, each when the hot spares are ready again."""
    with closing(History.open()) as history:
        chaos = Chaos(_nodes(), history, job)

        def kill() -> None:
            injected.append(Injection(at=chaos.kill(3), text="SIGKILL to rank 3"))

        def stop() -> None:
            injected.append(Injection(at=chaos.stop(2), text="SIGSTOP to rank 2"))

        def power_off() -> None:
            at, node = chaos.power_off(0)
            injected.append(Injection(at=at, text=f"power off {node}, which holds rank 0"))

        try:
            for step, act in ((12, kill), (24, stop), (36, power_off)):
                chaos.at_step(step, act, parked=2, seconds=180.0)
        except (HoldfastError, OSError, LookupError, TimeoutError) as error:  # the job ended first: the number of incidents shows it
            echo(f"(a fault could not be injected: {error})")


# -- the proof ---------------------------------------------------------------------------------------------------------


def _prove(history: History, calm: Job, broken: Job, folder: Path) -> Proof:
    ends = [json.loads((folder / f"{job.name}.json").read_text()) for job in (calm, broken)]
    undisturbed, curve = ({row.step: row.loss for row in queries.curve(history, job.id)} for job in (calm, broken))
    known = {step: loss for step, loss in curve.items() if loss is not None}
    return Proof(
        parameters=ends[0]["parameters_sha256"] == ends[1]["parameters_sha256"],
        losses=curve.keys() == undisturbed.keys() and None not in undisturbed.values() and known.items() <= undisturbed.items(),
        unknown=len(curve) - len(known),
        steps=len(curve),
        digest=ends[1]["parameters_sha256"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The recovery from one fault. Times count from the injection."""

    injected: str
    kind: str
    action: str
    detect_s: float
    downtime_s: float
    steps_lost: int
    source: str
    """Where the state came from with which training continued."""
    snapshot_age: int | None
    """Staleness of the newest in-memory snapshot at the fault, in steps."""
    reason: str
    phases: dict[str, float]


def _recovery(history: History, row: models.Incident, act: Injection) -> Recovery:
    return Recovery(
        injected=act.text,
        kind=row.kind,
        action=row.action or "",
        detect_s=round(row.detected_at - act.at, 4),
        downtime_s=round(row.fault_at + (row.downtime_s or 0.0) - act.at, 4),
        steps_lost=row.steps_lost or 0,
        source=wording.source(row.facts),
        snapshot_age=(row.facts or {}).get("snapshot_age"),
        reason=row.reason,
        phases={phase.name: round(phase.seconds, 4) for phase in queries.phases(history, row.id)},
    )


def _show(recoveries: list[Recovery], snapshots: list[models.Snapshots], no_snapshots: str, proof: Proof) -> None:
    echo("\n3. What happened (times from the injection; the phases begin when the system has carried it out)")
    for number, one in enumerate(recoveries, 1):
        lost = f"{plural(one.steps_lost, 'step')} recomputed"
        if one.snapshot_age is not None:
            lost += f"; the newest snapshot was {plural(one.snapshot_age, 'step')} old"
        source = f" with state from {one.source}" if one.source else ""
        echo(f"   {number}. {one.injected}: {one.kind}, detected after {duration(one.detect_s)}, {one.action},")
        echo(f"      training again after {duration(one.downtime_s)}{source}, {lost}")
        echo(f"      because {one.reason}")
        echo("      " + ", ".join(f"{label_of(name)} {duration(seconds)}" for name, seconds in one.phases.items()))
    echo(f"   In-memory snapshots: {memory.overhead(snapshots) if snapshots else no_snapshots or 'none'}.")
    yes = {True: "equal", False: "NOT EQUAL"}
    echo("\n4. The proof")
    unknown = f" (lost with rank 0 before it was reported: {proof.unknown})" if proof.unknown else ""
    echo(f"   loss at each of {proof.steps} steps: {yes[proof.losses]}{unknown}")
    echo(f"   parameters at the end: {yes[proof.parameters]} (sha256 {proof.digest[:16]}...)")


def _show_files(report: Path, folder: Path) -> None:
    echo(f"\nReport: {report}")
    echo(f"History: HOLDFAST_HOME={folder} holdfast status {FAULTY} --events")
    if (folder / "prefect").exists():
        echo(f"Prefect UI of these runs: PREFECT_HOME={folder / 'prefect'} prefect server start, then open http://127.0.0.1:4200/runs")
    else:
        echo("Prefect UI: the flow runs are on the configured server.")


def _facts(recoveries: list[Recovery], snapshots: list[models.Snapshots], proof: Proof, report: Path) -> dict[str, Any]:
    total = memory.total(snapshots) if snapshots else None
    return {
        "bit_equal": proof.bit_equal,
        "incidents": [asdict(one) for one in recoveries],
        "snapshots": {"interval_steps": total.interval_steps, "overlapped": total.overlapped, "cost": total.cost} if total else None,
        "steps": proof.steps,
        "report": str(report),
        "parameters_sha256": proof.digest,
    }


def _write(path: Path, facts: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(facts, indent=2) + "\n")
    except OSError as error:
        raise NotWritable("the result file", str(path), error.strerror or str(error)) from error
