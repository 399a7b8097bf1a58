"""The bundle itself: one part after the other, each of which may fail without costing the others."""

from __future__ import annotations

import errno
import json
import os
import stat
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

from sqlmodel import SQLModel, col, select

from holdfast import paths
from holdfast.agent.workers.log_files import JOB, place_of
from holdfast.cluster import open_cluster
from holdfast.errors import NotWritable, RowCorrupt
from holdfast.history import models, queries
from holdfast.history.store import History
from holdfast.redaction import HIDDEN, is_secret, shown
from holdfast.report.wording import plural
from holdfast.spec import LocalCluster, cluster_of
from holdfast.support import facts
from holdfast.support.archive import Bundle
from holdfast.support.redactor import Redactor, is_distinct
from holdfast.support.remote_logs import RemoteLogs

MOST_ROWS: Final = 5000
"""Of each table, the newest; a job has millions of steps."""
MOST_FILES: Final = 400
FAULTY: Final = 32
"""Nodes with the newest faults, whose logs come first."""
LOGS: Final = ("*.log", "*.jsonl", "*.old", "*.before", "agent.json", "policy*.yaml", "*.refused")
OF_JOB: Final = (
    models.JobTransition, models.Generation, models.Incident, models.FaultRecord, models.IncidentDiagnosis, models.DecisionRecord,
    models.Phase, models.StepRecord, models.Checkpoint, models.Snapshots, models.Request, models.StragglerDecision,
    models.ApprovalRequest, models.JobEvent, models.Lease,
)  # fmt: skip
OF_CLUSTER: Final = (models.NodeStatusChange, models.NodeHealthChange, models.NodeCordon, models.ServiceTransition)

UNTOLD: Final = {"outbox_key"}
"""Columns that nobody who helps needs: who has that key and a node of the job could write rows of it."""

README: Final = """\
A support bundle of Holdfast, made {at} by version {version}.

job:      {job}
home:     {home}
history:  {history}

versions.json, machine.json, environment.json, health.json, processes.json: this installation and this machine
history/  rows about the job and its cluster, one JSON object a line, the newest {rows} of each table
job/      the folder of the job: description, log of the flow, what could not be written to the history, logs of ranks that write here
nodes/    ends of logs of ranks and agents from the nodes that held ranks (each file once), and of what else lies on this machine

Secrets are replaced by ***: tokens, keys, passwords, addresses of webhooks, values of the job's environment.
What a script printed into its logs is searched for what looks like a secret; have a look before you send it to somebody.
{problems}"""


def write(output: Path, job: str | None) -> list[str]:
    """Write the bundle about *job* (or the newest one) to *output*; return what is missing in it. Raise `NotWritable` when it cannot be."""
    redactor = Redactor()
    redactor.learn_environment(os.environ)
    if output.is_dir():
        raise NotWritable("the support bundle", str(output), os.strerror(errno.EISDIR))
    top = output.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz")
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            bundle = Bundle(tar, top, redactor)
            _fill(bundle, redactor, job)
        beside.replace(output)
    except OSError as error:
        raise NotWritable("the support bundle", str(output), error.strerror or str(error)) from error
    finally:
        beside.unlink(missing_ok=True)
    return bundle.problems


def _fill(bundle: Bundle, redactor: Redactor, name: str | None) -> None:
    rows, found = _opened(bundle, name)
    told = {"name": found.name, "cluster": str(found.cluster.get("name", ""))} if found is not None else {"name": name, "cluster": None}
    folder = paths.job_directory(told["name"]) if told["name"] and JOB.fullmatch(told["name"]) else None  # else it leads anywhere
    if folder is not None:
        _learn(redactor, folder, found)
    bundle.part("versions", facts.versions)
    bundle.part("machine", facts.machine)
    bundle.part("environment", lambda: facts.variables(os.environ))
    bundle.part("health", facts.health)
    bundle.part("processes", facts.processes)
    if rows is not None and found is not None:
        _history(bundle, redactor, rows, found)
    taken: set[tuple[str, str]] = set()
    if folder is not None:
        logs = place_of(folder / "logs")
        taken = {(logs, path.name) for path in _folder(bundle, "job", folder) if path.parent == folder / "logs"}
        bundle.part("job/spec", lambda: _spec(redactor, _description(folder, found)))
    for node in _nodes(found, told["cluster"]):
        _folder(bundle, f"nodes/{node.name}", node)
    if rows is not None:
        if found is not None and found.cluster.get("kind", "local") != "local":
            _elsewhere(bundle, rows, found, taken)
        rows.close()
    problems = "\n".join(["", "Not in it, and why:", *bundle.problems, ""]) if bundle.problems else ""
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    told_of = {"job": told["name"] or "none", "home": paths.home(), "history": shown(paths.history_url()), "rows": MOST_ROWS}
    bundle.add("README.txt", README.format(at=at, version=facts.versions()["holdfast"], problems=problems, **told_of))


def _opened(bundle: Bundle, name: str | None) -> tuple[History | None, models.Job | None]:
    """Return the history and the job in it, as far as there are any."""
    history = None
    try:
        history = History.open(create=False)
        try:
            return history, _job(history, name)
        except RowCorrupt as error:
            bundle.fail("history/job", error)
            return history, _bare_job(history, name)
    except Exception as error:  # noqa: BLE001 (as above)
        bundle.fail("history", error)
    return history, None


def _job(history: History, name: str | None) -> models.Job | None:
    """Return the newest job of that name or with that id, or the newest of all; nothing where the history knows none."""
    with history.session() as session:
        found: models.Job | None = session.exec(_newest(select(models.Job), name)).first()
        return found


def _bare_job(history: History, name: str | None) -> models.Job | None:
    """Return that job without its description, which nobody can read."""
    with history.session() as session:
        found = session.exec(_newest(select(models.Job.id, models.Job.name, models.Job.directory), name)).first()
    return None if found is None else models.Job(id=found[0], name=found[1], directory=found[2], spec={}, cluster={}, at=0.0)


def _newest(wanted: Any, name: str | None) -> Any:  # noqa: ANN401 (a statement of whatever is selected)
    if name is not None:
        wanted = wanted.where((col(models.Job.name) == name) | (col(models.Job.id).startswith(name)))
    return wanted.order_by(col(models.Job.id).desc()).limit(1)


def _learn(redactor: Redactor, folder: Path, found: models.Job | None) -> None:
    """Learn the job's token, and what its descriptions hold that is secret: the one here may be of an earlier job of that name."""
    with suppress(OSError, ValueError):
        redactor.learn(*(folder / "token").read_text().split()[1:])
    for job in (None, found):
        with suppress(OSError, ValueError, AttributeError):
            redactor.value(_spec(redactor, _description(folder, job)))


def _description(folder: Path, found: models.Job | None) -> Any:  # noqa: ANN401 (any JSON)
    """Return a job's description: as the history has it, whoever began the job, else as `holdfast run` left it in the job's folder."""
    return json.loads((folder / "spec.json").read_text()) if found is None else {"job": found.spec, "cluster": found.cluster}


def _spec(redactor: Redactor, told: Any) -> Any:  # noqa: ANN401 (any JSON)
    """Return a job's description with the values of its environment hidden."""
    if not isinstance(told, dict):
        return told
    found = {}
    for name, value in told.items():
        if name == "environment" and isinstance(value, dict):
            found[name] = redactor.environment({str(key): str(one) for key, one in value.items()}, facts.SHOWN)
            hidden = [(str(key), str(one)) for key, one in value.items() if found[name][str(key)] == HIDDEN]
            redactor.learn(*(one for key, one in hidden if is_secret(key) or is_distinct(one)))
        else:
            found[name] = _spec(redactor, value)
    return found


def _history(bundle: Bundle, redactor: Redactor, history: History, job: models.Job) -> None:
    """Add what the history knows of the job and of its cluster's nodes."""
    bundle.part("history/job", lambda: {**job.model_dump(warnings=False), "spec": _spec(redactor, job.spec), "cluster": job.cluster})
    for model in OF_JOB:
        _table(bundle, redactor, history, model, col(model.job_id) == job.id)
    cluster = str(job.cluster.get("name", ""))
    for one in OF_CLUSTER:
        _table(bundle, redactor, history, one, col(one.cluster) == cluster)


def _table(bundle: Bundle, redactor: Redactor, history: History, model: type[SQLModel], where: Any) -> None:  # noqa: ANN401 (a condition)
    name = str(model.__tablename__)
    try:
        order: Any = getattr(model, "at", None)
        wanted = select(model).where(where)
        with history.session() as session:
            rows = session.exec(wanted.order_by(col(order).desc()).limit(MOST_ROWS) if order is not None else wanted.limit(MOST_ROWS)).all()
        lines = [json.dumps(redactor.value(row.model_dump(exclude=UNTOLD, warnings=False)), default=str) for row in reversed(rows)]
        bundle.add(f"history/{name}.jsonl", "".join(line + "\n" for line in lines))
    except Exception as error:  # noqa: BLE001 (as above)
        bundle.fail(f"history/{name}", error)


def _nodes(job: models.Job | None, cluster: str | None) -> Iterator[Path]:
    """Yield the folders of nodes that lie on this machine: of one cluster, or of all where nobody knows which."""
    clusters = [paths.cluster_directory(cluster)] if cluster else []
    with suppress(ValueError):  # what nobody can read any more
        described = cluster_of(job.cluster) if job is not None else None
        clusters = [described.home] if isinstance(described, LocalCluster) else clusters
    with suppress(OSError):
        clusters = clusters or sorted(paths.cluster_directory("x").parent.iterdir())
    for one in clusters:
        with suppress(OSError):
            yield from sorted(node for node in one.iterdir() if node.is_dir() and not node.is_symlink())


def _elsewhere(bundle: Bundle, history: History, job: models.Job, taken: set[tuple[str, str]]) -> None:
    """Add the ends of the logs that lie on other machines, save those that were *taken* out of a folder that they share with this one."""
    try:
        held, faulty = queries.held(history, job.id), queries.faulty(history, job.id, most=FAULTY)
        source = open_cluster(cluster_of(job.cluster))
    except Exception as error:  # noqa: BLE001 (as above)
        bundle.fail("nodes", error)
        return
    with closing(source):
        RemoteLogs(bundle, source, job.name, held).run(faulty, taken)


def _folder(bundle: Bundle, name: str, folder: Path) -> list[Path]:
    """Add the ends of a folder's logs and journals, and a list of all that lies there; return the files whose ends were added."""
    listed: list[str] = []
    taken: list[Path] = []
    left = 0
    try:
        for path in sorted(folder.rglob("*")):
            if len(listed) >= MOST_FILES * 10:
                break
            with suppress(OSError):
                facts_of = path.lstat()
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(facts_of.st_mtime))
                listed.append(f"{stat.filemode(facts_of.st_mode)} {facts_of.st_size:>12} {when} {path.relative_to(folder)}")
                if not stat.S_ISREG(facts_of.st_mode) or not any(path.match(one) for one in LOGS):
                    continue
                if len(taken) < MOST_FILES:
                    taken.append(path)
                    bundle.tail(f"{name}/{path.relative_to(folder)}", path)
                else:
                    left += 1
    except OSError as error:
        bundle.fail(name, error)
    if left:
        bundle.lacks(name, f"{plural(left, 'file')} beyond the first {MOST_FILES}: files.txt names them")
    bundle.add(f"{name}/files.txt", "\n".join(listed) + "\n")
    return taken
