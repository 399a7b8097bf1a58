"""The demo: one real training job, first_sigterm_ignored and then broken in three ways; both must end the same, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.cli.flow_process import FlowProcess, FlowProcessStep, write_spec
from holdfast.cli.job_view import look
from holdfast.cli.output import say
from holdfast.cli.screens import screen_for
from holdfast.cli.watch import JobWatcher, counted_taps
from holdfast.cluster.local import LocalNodes
from holdfast.errors import HoldfastError, NotWritable, OperatorError
from holdfast.gpu_assignment import VISIBLE
from holdfast.history import History, Job, models, queries
from holdfast.paths import home
from holdfast.prefect.server import TemporaryServer, is_configured
from holdfast.report import memory, wording, write_report
from holdfast.report.wording import duration, plural
from holdfast.spec import LocalCluster, TrainingJob
from holdfast.testing.chaos import Chaos

STEPS: Final = 100
CALM: Final = "demo-first_sigterm_ignored"
BROKEN: Final = "demo-with-faults"


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One fault that was injected."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the two runs have in common."""

    parameters: bool
    losses: bool
    steps: int
    digest: str

    @property
    def bit_equal(self) -> bool:
        """Tell whether both runs ended the same and had the same loss at every step."""
        return self.parameters and self.losses and self.steps == STEPS


def run_demo(json_file: Path | None, browser: bool) -> int:  # noqa: FBT001 (the command's switch, passed on)
    """Run the demo; return 0 when everything was as promised."""
    stage = _set_stage()
    try:
        with _ends_tidily(), _prefect(stage) as server:
            say(f"Prefect UI (while the demo runs): {server}" if server else "Prefect: the server that is configured.")
            return _play(stage, json_file, browser=browser)
    except KeyboardInterrupt:
        say("stopped; nothing of the demo is left running.")
        return 130
    finally:
        for node in _nodes().names():
            _nodes().clear(node)


def _set_stage() -> Path:
    """Make an empty home for the demo, so that it neither meets nor leaves anything elsewhere."""
    stage = home() / "demo"
    os.environ["HOLDFAST_HOME"] = str(stage)
    os.environ.pop("HOLDFAST_HISTORY", None)
    try:
        for node in _nodes().names():  # of a demo that was killed
            _nodes().clear(node)
        if stage.exists():
            shutil.rmtree(stage)
        stage.mkdir(parents=True)
    except OSError as error:
        raise NotWritable("the demo's folder", str(stage), error.strerror or str(error)) from error
    return stage


def _nodes() -> LocalNodes:
    return LocalNodes.of(_cluster())


def _cluster() -> LocalCluster:
    return LocalCluster(name="demo", nodes=3)


def _script() -> Path:
    """Return the training script: in a checkout under ``examples``, in an installed Holdfast beside this module."""
    found = Path(__file__).resolve().parents[1] / "examples" / "byte_gpt.py"
    return found if found.exists() else Path(__file__).with_name("examples") / "byte_gpt.py"


def _job(name: str, stage: Path) -> TrainingJob:
    return TrainingJob.model_validate(
        {
            "name": name,
            "script": str(_script()),
            "args": ["--steps", str(STEPS), "--result", str(stage / f"{name}.json")],
            "directory": str(stage),
            "nodes": {"wanted": 2, "spare": 1, "ranks": 2, "standbys": 2},
            "checkpoint": {"every": 5, "memory": {"overhead": 0.25}},  # more ranks than cores: by default snapshots become rarer there
            "environment": {VISIBLE: ""},  # it trains on the processor, so that it needs no GPU for each of its nodes
        }
    )


@contextmanager
def _ends_tidily() -> Iterator[None]:
    """Turn a vanished terminal and a request to end into Ctrl-C: the demo takes everything along."""

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
def _prefect(stage: Path) -> Iterator[str | None]:
    """Give the words for a Prefect server of our own; none when one is configured."""
    if is_configured():
        yield None
        return
    say("Starting a Prefect server for the demo ...")
    server = TemporaryServer(stage / "prefect", "server.log", {**os.environ, "PREFECT_LOGGING_LEVEL": "WARNING"})
    os.environ.update(server.environment)
    try:
        server.wait()
        yield server.ui_hint
    finally:
        server.close()


# -- the two runs ------------------------------------------------------------------------------------------------------


def _play(stage: Path, json_file: Path | None, *, browser: bool) -> int:
    history = History.open()
    try:
        say(
            f"\n1. A byte-level GPT on the standard library's own text, 2 nodes of 2 ranks and 1 spare, {STEPS} steps, first_sigterm_ignored."
        )
        calm = _run(history, CALM, stage)
        say("\n2. The same again, with a killed rank, a stopped rank and a lost node.")
        acts: list[Act] = []
        broken = _run(history, BROKEN, stage, acts)
        proof = _prove(history, calm, broken, stage)
        report = write_report(history, broken, stage / "report.html")
        told = _told(history, broken, acts)
        snapshots = [row for row in queries.snapshots(history, broken.id) if row.step is not None]
        _tell(told, snapshots, look(history, broken).no_snapshots, proof)
        _tell_where(report, stage)
        if json_file:
            _write(json_file, told, snapshots, proof, report)
        if browser and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            webbrowser.open(report.as_uri())
        return 0 if proof.bit_equal and len(told) == len(acts) == 3 else 1  # noqa: PLR2004 (the three faults of the demo)
    finally:
        history.close()


def _run(history: History, name: str, stage: Path, acts: list[Act] | None = None) -> Job:
    """Run one job to its end with its progress shown; break it on the way if *acts* is there to note how."""
    job = _job(name, stage)
    spec = write_spec(name, {"job": job.model_dump(mode="json"), "cluster": _cluster().model_dump(mode="json")})
    with FlowProcessStep(name) as turn, counted_taps() as taps:
        flow = FlowProcess(name, spec, turn, frozenset())
        if acts is not None:
            threading.Thread(target=_break, args=(name, acts), name="chaos", daemon=True).start()
        screen = screen_for(as_json=False, hint="Ctrl-C ends the demo")
        status = JobWatcher(history, screen, flow=flow, from_now=False).until_the_end(taps)
    if status == 130:  # noqa: PLR2004 (Ctrl-C, as shells count it)
        raise KeyboardInterrupt
    if status:
        raise DemoFailed(name, str(flow.log))
    return queries.newest_job(history, name)


class DemoFailed(OperatorError):
    """A run of the demo did not complete."""

    def __init__(self, job: str, log: str) -> None:
        super().__init__(job, log)
        self.job, self.log = job, log

    def __str__(self) -> str:
        return f"job '{self.job}' did not complete. What happened stands above and in {self.log}."


def _break(job: str, acts: list[Act]) -> None:
    """Inject the three faults."""
    history = History.open()
    try:
        _inject(Chaos(_nodes(), history, job), acts)
    except (HoldfastError, OSError, KeyError, TimeoutError) as error:  # the job ended before it: the count of incidents tells
        say(f"(a fault could not be injected: {error})")
    finally:
        history.close()


def _inject(chaos: Chaos, acts: list[Act]) -> None:
    """Kill a rank, stop one, and take away the node of rank 0 with all its ranks, each when standbys are ready again."""

    def kill() -> None:
        acts.append(Act(at=chaos.kill(3), text="SIGKILL to rank 3"))

    def stop() -> None:
        acts.append(Act(at=chaos.stop(2), text="SIGSTOP to rank 2"))

    def power_off() -> None:
        at, node = chaos.power_off(0)
        acts.append(Act(at=at, text=f"power off {node}, which holds rank 0"))

    for step, act in ((12, kill), (24, stop), (36, power_off)):
        chaos.at_step(step, act, parked=2, seconds=180.0)


# -- the proof ---------------------------------------------------------------------------------------------------------


def _prove(history: History, calm: Job, broken: Job, stage: Path) -> Proof:
    ends = [json.loads((stage / f"{job.name}.json").read_text()) for job in (calm, broken)]
    curves = [{row.step: row.loss for row in queries.curve(history, job.id)} for job in (calm, broken)]
    return Proof(
        parameters=ends[0]["parameters_sha256"] == ends[1]["parameters_sha256"],
        losses=curves[0] == curves[1] and None not in curves[0].values(),
        steps=len(curves[1]),
        digest=ends[1]["parameters_sha256"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One incident as the demo tells it. Times count from the injection itself."""

    injected: str
    kind: str
    action: str
    detect_s: float
    downtime_s: float
    steps_lost: int
    source: str
    """Where the state came from that all went on with."""
    snapshot_age: int | None
    """Steps by which the newest snapshot in memory was older than the job at the fault."""
    reason: str
    phases: dict[str, float]


def _told(history: History, job: Job, acts: list[Act]) -> list[Told]:
    return [_one(history, row, act) for row, act in zip(queries.incidents(history, job.id), acts, strict=False)]


def _one(history: History, row: models.Incident, act: Act) -> Told:
    return Told(
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


def _in_steps(one: Told) -> str:
    lost = f"{plural(one.steps_lost, 'step')} computed again"
    return lost if one.snapshot_age is None else f"{lost}; the newest snapshot was {plural(one.snapshot_age, 'step')} old"


def _tell(told: list[Told], snapshots: list[models.Snapshots], no_snapshots: str, proof: Proof) -> None:
    say("\n3. What happened")
    for number, one in enumerate(told, 1):
        say(f"   {number}. {one.injected}: {one.kind}, found after {duration(one.detect_s)}, {one.action},")
        source = f" with state from {one.source}" if one.source else ""
        say(f"      training again after {duration(one.downtime_s)}{source}, {_in_steps(one)}")
        say(f"      because {one.reason}")
        say("      " + ", ".join(f"{name} {duration(seconds)}" for name, seconds in one.phases.items()))
    say(f"   Snapshots in memory: {memory.overhead(snapshots) if snapshots else no_snapshots or 'none'}.")
    yes = {True: "equal", False: "NOT EQUAL"}
    say("\n4. The proof")
    say(f"   loss at each of {proof.steps} steps: {yes[proof.losses]}")
    say(f"   parameters at the end: {yes[proof.parameters]} (sha256 {proof.digest[:16]}...)")


def _tell_where(report: Path, stage: Path) -> None:
    say(f"\nReport: {report}")
    say(f"History: HOLDFAST_HOME={stage} holdfast history {BROKEN}")
    if (stage / "prefect").exists():
        say(f"Prefect UI of these runs: PREFECT_HOME={stage / 'prefect'} prefect server start, then open http://127.0.0.1:4200/runs")
    else:
        say("Prefect UI: the flow runs are on the server you have configured.")


def _write(path: Path, told: list[Told], snapshots: list[models.Snapshots], proof: Proof, report: Path) -> None:
    whole = memory.total(snapshots) if snapshots else None
    facts: dict[str, Any] = {
        "bit_equal": proof.bit_equal,
        "incidents": [asdict(one) for one in told],
        "snapshots": {"interval_steps": whole.interval_steps, "overlapped": whole.overlapped, "cost": whole.cost} if whole else None,
        "steps": proof.steps,
        "report": str(report),
        "parameters_sha256": proof.digest,
    }
    try:
        path.write_text(json.dumps(facts, indent=2) + "\n")
    except OSError as error:
        raise NotWritable("the result file", str(path), error.strerror or str(error)) from error
