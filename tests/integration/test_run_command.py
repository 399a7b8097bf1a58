"""`holdfast run` and `holdfast stop` with the real flow: whatever is pressed or killed, the job ends well and nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.changes import end_change
from holdfast.cli.job_view import view_job
from holdfast.cli.recovery_view import ALWAYS as PHASES
from holdfast.cli.watch import ONE_PRESS
from holdfast.control.supervisor.early_launch import NO_FLOW
from holdfast.history import History, holder_of, queries
from holdfast.policies.states import State
from holdfast.report.phases import label_of
from holdfast.testing.orphans import leftovers
from tests.cli.terminal import Terminal
from tests.integration.conftest import PrefectServer
from tests.mentions import mentions, one_line_mentions
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
PROGRAM = [sys.executable, "-m", "holdfast"]
SECONDS = 90
"""For a flow to start on a busy machine."""

NAP = """
import os, pathlib, time
pathlib.Path("pid").write_text(str(os.getpid()))
while not pathlib.Path("enough").exists():
    time.sleep(0.02)
"""
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + NAP


class Place:
    """A folder with job files, a Holdfast home of its own, and the commands run there."""

    def __init__(self, folder: Path, home: Path, server: PrefectServer) -> None:
        self.folder, self.home = folder, home
        self.history = f"sqlite:///{home / 'history.db'}"
        self.environment = {**server.environment, "HOLDFAST_HOME": str(home), "PYTHONPATH": str(ROOT), "PREFECT_LOGGING_LEVEL": "WARNING"}

    def job(self, name: str, script: str, more: str = "") -> str:
        """Write a job file and its script; return the file's name."""
        (self.folder / f"{name}.py").write_text(script)
        (self.folder / f"{name}.yaml").write_text(f"name: {name}\nscript: {name}.py\ncluster: {{nodes: 1}}\n{more}")
        return f"{name}.yaml"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `holdfast` with *arguments*."""
        return subprocess.Popen(
            [*PROGRAM, *arguments],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def done(self, *arguments: str) -> tuple[int, str]:
        """Run `holdfast` with *arguments*; return status and words."""
        child = self.start(*arguments)
        said, _ = child.communicate(timeout=SECONDS)
        assert "Traceback" not in re.sub(r"(│|\[rank \d+\]) Traceback", "", said), said
        return child.returncode, said

    def state(self, job: str) -> str:
        """Return the state of *job*, as the history has it."""
        with closing(History.open(self.history, create=False)) as history:
            found = queries.jobs(history, job, limit=1)
            move = queries.state_of(history, found[0].id) if found else None
            return move.after if move else ""

    def flow(self, job: str) -> int:
        """Return the pid of the flow that runs *job*, or 0."""
        with closing(History.open(self.history, create=False)) as history:
            holder = holder_of(history, queries.newest_job(history, job).id)
            return holder.pid if holder else 0

    def has_flow_run(self, job: str) -> bool:
        """Return whether a flow run of Prefect controls *job*."""
        with closing(History.open(self.history, create=False)) as history:
            holder = holder_of(history, queries.newest_job(history, job).id)
            return holder is not None and bool(holder.flow_run)

    def worker(self) -> int:
        """Return the pid of the worker, once it naps."""
        return int(wait_until(self.pid, seconds=SECONDS, explain=self.log))

    def pid(self) -> str:
        """Return what the worker wrote."""
        path = self.folder / "pid"
        return path.read_text() if path.exists() else ""

    def log(self) -> str:
        """Return all flows' logs."""
        return "\n".join(path.read_text(errors="replace") for path in self.home.glob("jobs/*/flow.log"))

    def is_clean(self) -> bool:
        """Return whether no process is left that carries this home."""
        return not leftovers(self.home)


@pytest.fixture
def place(tmp_path: Path, holdfast_home: Path, prefect_server: PrefectServer) -> Place:
    """Give a place for jobs, with a Prefect server at hand so that flows start fast."""
    return Place(tmp_path, holdfast_home, prefect_server)


SHOW = """
import json, os, pathlib, sys
ours = ("OMP_NUM_THREADS", "OWN")
environment = {name: value for name, value in os.environ.items() if name.endswith(("RANK", "WORLD_SIZE")) or name in ours}
seen = {"argv": sys.argv, "name": __name__, "folder": os.getcwd(), "path": os.path.realpath(sys.path[0] or "."), "environment": environment}
pathlib.Path("seen-" + os.environ["RANK"]).write_text(json.dumps(seen))
"""


def gone(place: Place) -> None:
    """Wait until no process is left."""
    wait_until(place.is_clean, seconds=60, explain=lambda: "\n".join(leftovers(place.home)) + place.log())


def running(place: Place, job: str) -> None:
    """Wait until the job trains and its flow, not its launcher, controls it."""
    wait_until(lambda: place.state(job) == "RUNNING" and place.has_flow_run(job), seconds=SECONDS, explain=place.log)


@pytest.mark.parametrize("program", [["train.py"], ["-m", "package.train"]], ids=["script", "module"])
@pytest.mark.long
def test_a_script_sees_what_it_sees_under_torchrun(place: Place, program: list[str]) -> None:
    """The same options, and the script unchanged: the same arguments, variables, folder and module search path in each rank."""
    (place.folder / "package").mkdir()
    for file in ("train.py", "package/train.py"):
        (place.folder / file).write_text(SHOW)
    options = ["--nnodes", "1", "--nproc_per_node=2", *program, "--lr", "1e-3", "--nnodes", "7"]
    place.environment |= {"OWN": "mine"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    subprocess.run(torchrun, cwd=place.folder, env=place.environment, capture_output=True, check=True, timeout=SECONDS)
    expected = seen_by_ranks(place.folder)
    assert [one["environment"]["RANK"] for one in expected] == ["0", "1"]
    status, said = place.done("run", *options)
    assert status == 0, said + place.log()
    assert seen_by_ranks(place.folder) == expected
    gone(place)


def seen_by_ranks(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank saw, in the order of the ranks, and forget it."""
    files = sorted(folder.glob("seen-*"))
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return found


def test_a_job_runs_to_its_end(place: Place) -> None:
    """Status 0, one line a change, its output (binary, too) in its log, no process left."""
    script = "import os, sys\nprint('I am', os.environ['RANK'], flush=True)\nsys.stdout.buffer.write(bytes(range(256)) * 100)\n"
    status, said = place.done("run", place.job("binary", script, "nproc_per_node: 2\n"))
    assert status == 0, said + place.log()
    assert "[rank 0] I am 0" in said
    assert "I am 1" not in said, "ranks that nobody asked for"
    lines = [line[10:] for line in said.splitlines() if not line.startswith("[rank 0]")]
    assert mentions(lines[0], "'binary'", "binary.py", "1 node", "(this machine)", "2 ranks")
    named = [line.partition(": ")[0] for line in lines if line.partition(": ")[0] in set(State)]
    assert [*named, "COMPLETED"] == states(place, "binary"), "its end has a line of its own"
    assert named in (["LAUNCHING", "RUNNING"], ["LAUNCHING"]), "so short a job may end before it is seen at work"
    assert any(line.startswith("job 'binary' COMPLETED after") for line in lines[-3:])
    assert lines[-1].split()[0] == "Prefect", "the page of the flow run"
    assert any(bytes(range(256)) in log.read_bytes() for log in place.home.glob("jobs/binary/logs/*"))
    gone(place)


def states(place: Place, job: str) -> list[str]:
    """Return the states that a job went through, as the history has them."""
    with closing(History.open(place.history, create=False)) as history:
        return [move.after for move in queries.transitions(history, queries.newest_job(history, job).id)]


SHOWN = """
import os, pathlib
pathlib.Path(f"shown-{os.environ['RANK']}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.mark.long
def test_local_nodes_share_no_gpu(place: Place) -> None:
    """Two GPUs for three nodes: two nodes train, each with its own; a job for three is refused before anything starts, with advice."""
    place.environment["CUDA_VISIBLE_DEVICES"] = "6,7"
    place.job("shows-gpus", SHOWN)
    job = "name: shown\nscript: shows-gpus.py\ncluster: {nodes: 3}\nnnodes: %d\n"
    (place.folder / "shown.yaml").write_text(job % 3)
    status, said = place.done("run", "shown.yaml")
    assert (status != 0, one_line_mentions(said, "GPU"), 'CUDA_VISIBLE_DEVICES: ""' in said) == (True, True, True), said
    assert not place.log()
    assert not list(place.folder.glob("shown-*"))
    (place.folder / "shown.yaml").write_text(job % 2)
    status, said = place.done("run", "shown.yaml")
    assert status == 0, said + place.log()
    assert [(place.folder / f"shown-{rank}").read_text() for rank in range(2)] == ["6", "7"]
    gone(place)


@pytest.mark.long
def test_a_program_reads_how_it_went(place: Place) -> None:
    """From the start to the end, one object a line."""
    status, said = place.done("run", place.job("quick", "print('trained')\n"), "--json")
    events = [json.loads(line) for line in said.splitlines()]
    assert status == 0
    assert events[0]["event"] == "start"
    assert events[-1]["event"] == "end"
    assert events[-1]["state"] == "COMPLETED"
    assert next(event["after"] for event in events if event["event"] == "transition") == "LAUNCHING"
    gone(place)


TRAINS = """
import sys, torch, holdfast
model = torch.nn.Linear(1, 1)
with holdfast.session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as session:
    for step in session.steps(until=int(sys.argv[1])):
        step.end(1.0)
"""


@pytest.mark.long
def test_a_complete_job_that_runs_again_says_so(place: Place) -> None:
    """Status 0, at which step it was complete, and what to do; with more steps it trains on from there."""
    name = place.job("done", TRAINS, 'args: ["3"]\n')
    assert ended(place, name)["complete_before"] is None
    again = ended(place, name)
    assert (again["state"], again["complete_before"], again["step"]) == ("COMPLETED", 3, None)
    assert one_line_mentions(again["text"], "'done'", "complete", "step 3", "args", "name", str(place.home / "jobs/done/checkpoints"))
    status, said = place.done("status", "done", "--json")
    assert (status, json.loads(said)["complete_before"]) == (0, 3)
    further = ended(place, place.job("done", TRAINS, 'args: ["5"]\n'))
    assert (further["complete_before"], further["step"]) == (None, 5)
    gone(place)


COUNTED = """
import time, torch, holdfast
from torch.utils.data import DataLoader
model = torch.nn.Linear(1, 1)
data = holdfast.Loader(DataLoader(torch.zeros(4096, 1), batch_size=8))
with holdfast.session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data=data) as session:
    batches = iter(data)
    for step in session.steps(until=40):
        next(batches), next(batches)
        time.sleep(0.01)
        step.end(1.0, tokens=4000)
"""


@pytest.mark.long
def test_the_size_of_steps_gets_from_the_worker_to_the_page(place: Place) -> None:
    """Tokens as the script reports them, samples as the Loader knows them: history, watching, `status` and report."""
    status, said = place.done("run", place.job("sized", COUNTED), "--json")
    assert status == 0, said + place.log()
    with closing(History.open(place.history, create=False)) as history:
        rows = queries.steps(history, queries.newest_job(history, "sized").id)
    assert {(row.samples, row.tokens) for row in rows} == {(16, 4000)}
    status, said = place.done("status", "sized", "--json")
    record = json.loads(said)
    assert record["tokens_per_s"] == pytest.approx(250 * record["samples_per_s"])
    assert record["tokens_per_s"] == pytest.approx(4000 * record["rate"])
    status, said = place.done("status", "sized")
    assert re.search(r"^ +rate .* tokens/s, [\d,.]+ samples/s$", said, re.MULTILINE), said
    status, said = place.done("report", "sized", "-o", "report.html")
    assert (status, "tokens per second</text>" in (place.folder / "report.html").read_text()) == (0, True)
    gone(place)


def ended(place: Place, job: str) -> dict[str, Any]:
    """Run a job to its successful end; return the last record, and as `text` what a person reads there."""
    status, said = place.done("run", job, "--json")
    assert status == 0, said + place.log()
    record: dict[str, Any] = json.loads(said.splitlines()[-1])
    with closing(History.open(place.history, create=False)) as history:
        record["text"] = end_change(history, view_job(history, queries.newest_job(history, "done"))).text
    return record


@pytest.mark.long
def test_the_users_own_error_ends_the_job_with_its_traceback(place: Place) -> None:
    """Status 1, the traceback, and where all of it stands."""
    status, said = place.done("run", place.job("wrong-division", "def train():\n    return 1 / 0\n\ntrain()\n"))
    assert status == 1
    assert "[rank 0] ZeroDivisionError: division by zero" in said
    assert one_line_mentions(said, "job 'wrong-division' FAILED", "ZeroDivisionError: division by zero")
    assert "/wrong-division.py:2)" in said
    assert len([line for line in said.splitlines() if "so the script is at fault" in line]) == 1, said
    assert "│" not in said, "the traceback is on the screen already"
    shown = re.search(r"`holdfast (incidents show [^`]+)` shows the last incident in full", said)
    assert shown, said
    status, incident = place.done(*shown[1].split())
    assert status == 0
    assert one_line_mentions(incident, "ZeroDivisionError")
    gone(place)


@pytest.mark.long
def test_ctrl_c_stops_the_job(place: Place) -> None:
    """Status 130, state CANCELLED, no process left."""
    child = place.start("run", place.job("nap", NAP))
    place.worker()
    running(place, "nap")
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=SECONDS)
    assert child.returncode == 130, said
    assert one_line_mentions(said, "stop of the job")
    assert place.state("nap") == "CANCELLED"
    gone(place)


@pytest.mark.long
def test_ctrl_c_before_the_job_began_leaves_nothing(place: Place) -> None:
    """While the flow still starts; its launcher may have submitted the job just before, which is cancelled then."""
    child = place.start("run", place.job("early", NAP))
    assert child.stdout
    assert "Job 'early'" in child.stdout.readline()
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=SECONDS)
    assert child.returncode == 130, said
    gone(place)
    assert place.state("early") in ({"CANCELLED"} if place.pid() else {"", "CANCELLED"})


@pytest.mark.long
def test_ctrl_c_while_the_agents_come_up_leaves_nothing(place: Place) -> None:
    """An agent that was begun and not yet spoken to ends as well."""
    child = place.start("run", place.job("begun", NAP))
    wait_until(lambda: list(place.home.glob("clusters/*/*/agent.log")), seconds=SECONDS, explain=place.log)
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=SECONDS)
    assert child.returncode == 130, said
    gone(place)


@pytest.mark.long
def test_a_second_ctrl_c_stops_a_stubborn_job_at_once(place: Place) -> None:
    """Its workers ignore SIGTERM, its grace is an hour; no process is left."""
    child = place.start("run", place.job("stubborn", STUBBORN, "timeouts: {termination_grace: 1h}\n"))
    worker = place.worker()
    running(place, "stubborn")
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGINT)  # of the same press: nobody has read yet what it would do
    wait_until(lambda: place.state("stubborn") == "CANCELLED", seconds=SECONDS, explain=place.log)
    time.sleep(ONE_PRESS)
    assert Path(f"/proc/{worker}").exists()
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=SECONDS)
    assert child.returncode == 130, said
    gone(place)


@pytest.mark.long
def test_a_terminal_that_goes_away_leaves_the_job_alone(place: Place) -> None:
    """What rank 0 writes scrolls away above the picture. SIGHUP ends the watcher only; the job trains to its end."""
    name = place.job("lonely", "print('good night')\n" + NAP)
    terminal = Terminal([*PROGRAM, "run", str(place.folder / name)], place.environment)
    with terminal:
        running(place, "lonely")
        wait_until(lambda: "[rank 0] good night" in terminal.text, seconds=SECONDS, explain=lambda: terminal.text)
        shown = terminal.text.partition("[rank 0] good night")[2]
        wait_until(lambda: "╭─" in terminal.text.partition(shown)[2], seconds=SECONDS, explain=lambda: terminal.text)
        terminal.hang_up()
        wait_until(lambda: terminal.status() is not None, seconds=SECONDS, explain=lambda: terminal.text)
    assert place.state("lonely") == "RUNNING"
    (place.folder / "enough").touch()
    wait_until(lambda: place.state("lonely") == "COMPLETED", seconds=SECONDS, explain=place.log)
    gone(place)


STEADY = """
import os, pathlib, time, holdfast
while os.environ["HOLDFAST_GENERATION"] == "2" and not pathlib.Path("seen").exists():  # a start that a person has time to see
    time.sleep(0.02)
for step in range(1, 100_000):
    if pathlib.Path("enough").exists():
        break
    time.sleep(0.05)
    holdfast.heartbeat(step, 1.0 / step, until=100_000)
    if step == 2:
        pathlib.Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
"""


def phase_on(terminal: Terminal) -> list[str]:
    """Return the phases of a recovery that were marked as running, in the order in which they were drawn."""
    return list(dict.fromkeys(re.findall(r"▶ (?:T[\dT-]+ )?([a-z]+)", terminal.text)))


def rows(terminal: Terminal) -> dict[str, str]:
    """Return the newest picture's rows by label; further lines of a row belong to it."""
    found, label = dict[str, str](), ""
    for line in terminal.newest_frame()[1:-1]:
        name, text = line[2:13].strip(), line[13:-2].strip()
        label = name or label
        found[label] = f"{found.get(label, '')} {text}".strip()
    return found


@pytest.mark.long
def test_a_recovery_is_visible_as_it_happens(place: Place) -> None:
    """The fault, the phase that runs, the action; then the times of all phases, as programs get them; and every value of a training job."""
    name = place.job("steady", STEADY, "nproc_per_node: 2\n")
    with Terminal([*PROGRAM, "run", str(place.folder / name)], place.environment) as terminal:
        wait_until(lambda: "steps/s" in rows(terminal).get("loss", ""), seconds=SECONDS, explain=lambda: terminal.text + place.log())
        wait_until(lambda: "spares" in rows(terminal), seconds=SECONDS, explain=lambda: terminal.text)
        assert {"step", "loss", "nodes", "spares", "checkpoint", "at risk"} <= rows(terminal).keys()
        assert "2 ranks on 1 node" in rows(terminal)["nodes"]
        wait_until(lambda: all((place.folder / f"pid-{rank}").exists() for rank in (0, 1)), seconds=SECONDS, explain=place.log)
        running(place, "steady")
        os.kill(int(wait_until((place.folder / "pid-1").read_text, seconds=SECONDS)), signal.SIGKILL)
        wait_until(lambda: "▶ T2-T4 resume" in rows(terminal).get("recovery", ""), seconds=SECONDS, explain=lambda: terminal.text)
        during = rows(terminal)
        assert during["incident"].startswith("1: worker-sigkill on rank 1")
        assert during["action"].startswith("restart-workers: ")
        (place.folder / "seen").touch()
        wait_until(lambda: "1 recovered by" in rows(terminal).get("incident", ""), seconds=SECONDS, explain=lambda: terminal.text)
        assert sorted(phase_on(terminal), key=PHASES.index) == phase_on(terminal), "in the order of the state machine"
        shown = re.sub(r" [\d.]+ m?s\b", "", rows(terminal)["recovery"]).replace("·", " ").split()
        assert shown == " ".join(map(label_of, PHASES)).split()
        (place.folder / "enough").touch()
        wait_until(lambda: terminal.status() is not None, seconds=SECONDS, explain=lambda: terminal.text)
    gone(place)


@pytest.mark.long
def test_a_killed_flow_is_named_reattached_and_stopped(place: Place) -> None:
    """Status 4 says that training goes on; the same command reattaches to the very worker; `stop` ends it."""
    name = place.job("kept", NAP)
    first = place.start("run", name)
    worker = place.worker()
    running(place, "kept")
    refused = place.done("run", name)
    os.kill(place.flow("kept"), signal.SIGKILL)
    said, _ = first.communicate(timeout=SECONDS)
    assert refused[0] == 2
    assert "already running" in refused[1]
    assert first.returncode == 4, said
    assert one_line_mentions(said, "continues under its agents")
    assert place.flow("kept") == 0
    status, said = place.done("run", name, "--detach")
    assert status == 0, said + place.log()
    assert one_line_mentions(said, "without a controller")
    assert not one_line_mentions(said, "differ")
    assert int(place.pid()) == worker
    assert Path(f"/proc/{worker}").exists()
    status, said = place.done("stop", "kept")
    assert status == 0
    assert "job 'kept' ended: CANCELLED" in said
    gone(place)


@pytest.mark.long
def test_a_command_that_detaches_passes_it_on_and_ends_without_its_job(place: Place) -> None:
    """Status 6, said in a sentence; the same command reattaches to the very worker."""
    name = place.job("let", NAP)
    first = place.start("run", name)
    worker = place.worker()
    running(place, "let")
    first.send_signal(signal.SIGUSR1)
    said, _ = first.communicate(timeout=SECONDS)
    assert first.returncode == 6, said
    assert one_line_mentions(said, "detached", "'let'", "continues")
    assert "Traceback" not in place.log()
    assert place.flow("let") == 0
    assert place.done("run", name, "--detach")[0] == 0, place.log()
    assert int(place.pid()) == worker
    assert Path(f"/proc/{worker}").exists()
    assert place.done("stop", "let")[0] == 0
    gone(place)


PREFECT_LATER = """
import importlib, pathlib, sys, time
here = pathlib.Path(__file__).parent
while not (here / "import-prefect").exists():
    time.sleep(0.02)
sys.path.remove(str(here))
del sys.modules["prefect"]
importlib.import_module("prefect")
"""
"""Stands in front of Prefect, which is imported once the test lets it be."""


@pytest.mark.long
def test_a_flow_detaches_even_before_it_has_imported_prefect(place: Place) -> None:
    """Its status says so, and it has begun no job."""
    spec = place.folder / "spec.json"
    job = {"name": "early", "command": ["true"], "workdir": str(place.folder)}
    spec.write_text(json.dumps({"job": job, "cluster": {"kind": "local", "name": "early", "nodes": 1}}))
    command = [sys.executable, "-P", "-m", "holdfast.flows.training_job", str(spec)]
    (place.folder / "prefect.py").write_text(PREFECT_LATER)
    environment = place.environment | {"PYTHONPATH": f"{place.folder}:{ROOT}"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as flow:
        wait_until(lambda: handles_signal(flow.pid, signal.SIGUSR1), seconds=SECONDS)
        flow.send_signal(signal.SIGUSR1)
        (place.folder / "import-prefect").touch()
        said, _ = flow.communicate(timeout=SECONDS)
    assert flow.returncode == 6, said
    assert "Traceback" not in said
    assert place.state("early") == ""


@pytest.mark.long
def test_a_command_that_detaches_at_once_ends_without_its_job(place: Place) -> None:
    """It passes that on to a flow that has not imported Prefect yet; the job continues if its launcher has submitted it already."""
    child = place.start("run", place.job("sooner", NAP))
    wait_until(lambda: handles_signal(child.pid, signal.SIGUSR1), seconds=SECONDS)
    child.send_signal(signal.SIGUSR1)
    said, _ = child.communicate(timeout=SECONDS)
    assert child.returncode == 6, said + place.log()
    assert one_line_mentions(said, "detached", "'sooner'", "continues" if place.state("sooner") else "not started")
    if place.state("sooner"):
        assert place.flow("sooner") == 0
        assert place.done("stop", "sooner")[0] == 0
    gone(place)


def handles_signal(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) & 1 << (number - 1))


@pytest.mark.long
def test_a_job_without_a_flow_is_stopped_all_the_same(place: Place) -> None:
    """`stop` takes the lease, ends the agents and records it."""
    child = place.start("run", place.job("orphan", NAP))
    place.worker()
    running(place, "orphan")
    os.kill(place.flow("orphan"), signal.SIGKILL)
    child.communicate(timeout=SECONDS)
    status, said = place.done("stop", "orphan")
    assert status == 0, said
    assert place.state("orphan") == "CANCELLED"
    gone(place)
    assert "had already ended" in place.done("stop", "orphan")[1]


@pytest.mark.long
def test_a_flow_that_cannot_start_is_named_with_its_output(place: Place) -> None:
    """Status 1: the job never began, or was ended where its ranks had started meanwhile."""
    broken = place.folder / "broken"
    broken.mkdir()
    (broken / "prefect.py").write_text("raise RuntimeError('no prefect here')\n")
    place.environment["PYTHONPATH"] = f"{broken}:{ROOT}"
    child = place.start("run", place.job("never", NAP))
    said, _ = child.communicate(timeout=SECONDS)
    assert child.returncode == 1
    assert "RuntimeError: no prefect here" in said
    if place.state("never"):
        assert place.state("never") == "CANCELLED"
        assert one_line_mentions(said, "'never'", "CANCELLED", NO_FLOW)
    else:
        assert one_line_mentions(said, "'never'", 1)
    gone(place)
