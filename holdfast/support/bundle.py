"""Write a support bundle: one part after the other; a part that fails does not affect the others."""

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
from holdfast.plurals import plural
from holdfast.security.redaction import HIDDEN, is_secret, shown
from holdfast.spec import LocalCluster, cluster_of
from holdfast.support import facts
from holdfast.support.archive import Bundle
from holdfast.support.redactor import Redactor, is_distinct
from holdfast.support.remote_logs import RemoteLogs

MOST_ROWS: Final = 5000
"""Newest rows of each table; a job may have millions of steps."""
MOST_FILES: Final = 400
FAULTY: Final = 32
"""Nodes with the newest faults, whose logs are read first."""
LOGS: Final = ("*.log", "*.jsonl", "*.old", "*.before", "agent.json", "policy*.yaml", "*.refused")
OF_JOB: Final = (
    models.JobTransition, models.Generation, models.Incident, models.FaultRecord, models.IncidentDiagnosis,
    models.DecisionRecord, models.Phase, models.StepRecord,
    models.Checkpoint, models.Snapshots, models.Request, models.StragglerDecision, models.ApprovalRequest, models.JobEvent, models.Lease,
)  # fmt: skip
OF_CLUSTER: Final = (models.NodeStatusChange, models.NodeHealthChange, models.NodeCordon, models.ServiceTransition)

SECRET_COLUMNS: Final = {"outbox_key"}
"""Columns that are left out: with this key and a node of the job one could write rows of the job."""

README: Final = """\
A support bundle of Holdfast, made {at} by version {version}.

job:      {job}
home:     {home}
history:  {history}

versions.json, machine.json, environment.json, health.json, processes.json: this installation and this machine
history/  rows about the job and its cluster, one JSON object a line, the newest {rows} of each table
job/      the folder of the job: description, log of the flow, outbox of the history, logs of ranks on this machine
nodes/    ends of logs of ranks and agents from the nodes that held ranks (each file once), and of other files on this machine

Secrets are replaced by ***: tokens, keys, passwords, addresses of webhooks, values of the job's environment.
Logs are searched for what looks like a secret; check them before you send the bundle to somebody.
{problems}"""


def write(output: Path, job: str | None) -> list[str]:
    """Write the bundle about *job* (default: the newest one) to *output* and return what is missing in it; raise `NotWritable`."""
    redactor = Redactor()
    redactor.learn_environment(os.environ)
    if output.is_dir():
        raise NotWritable("the support bundle", str(output), os.strerror(errno.EISDIR))
    top = output.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz")
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            bundle = Bundle(tar, top, redactor)
            _fill(bundle, redactor, job)
        temporary.replace(output)
    except OSError as error:
        raise NotWritable("the support bundle", str(output), error.strerror or str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return bundle.problems


def _fill(bundle: Bundle, redactor: Redactor, name: str | None) -> None:
    rows, found = _open_history(bundle, name)
    job_name, cluster = (found.name, str(found.cluster.get("name", ""))) if found is not None else (name, None)
    folder = paths.job_directory(job_name) if job_name and JOB.fullmatch(job_name) else None  # any other name may lead anywhere
    if folder is not None:
        _learn_secrets(redactor, folder, found)
    bundle.part("versions", facts.versions)
    bundle.part("machine", facts.machine)
    bundle.part("environment", lambda: facts.variables(os.environ))
    bundle.part("health", facts.health)
    bundle.part("processes", facts.processes)
    if rows is not None and found is not None:
        _add_history(bundle, redactor, rows, found)
    taken: set[tuple[str, str]] = set()
    if folder is not None:
        logs = place_of(folder / "logs")
        taken = {(logs, path.name) for path in _add_folder(bundle, "job", folder) if path.parent == folder / "logs"}
        bundle.part("job/spec", lambda: _redacted_spec(redactor, _specification(folder, found)))
    for node in _node_folders(found, cluster):
        _add_folder(bundle, f"nodes/{node.name}", node)
    if rows is not None:
        if found is not None and found.cluster.get("kind", "local") != "local":
            _add_remote_logs(bundle, rows, found, taken)
        rows.close()
    problems = "\n".join(["", "Missing, and why:", *bundle.problems, ""]) if bundle.problems else ""
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    values = {"job": job_name or "none", "home": paths.home(), "history": shown(paths.history_url()), "rows": MOST_ROWS}
    bundle.add("README.txt", README.format(at=at, version=facts.versions()["holdfast"], problems=problems, **values))


def _open_history(bundle: Bundle, name: str | None) -> tuple[History | None, models.Job | None]:
    """Return the history and the job in it, if there are any."""
    history = None
    try:
        history = History.open(create=False)
        try:
            return history, _job(history, name)
        except RowCorrupt as error:
            bundle.record_failure("history/job", error)
            return history, _job_without_spec(history, name)
    except Exception as error:  # noqa: BLE001 (as above)
        bundle.record_failure("history", error)
    return history, None


def _job(history: History, name: str | None) -> models.Job | None:
    """Return the newest job of that name or with that id, or the newest of all; None if there is none."""
    with history.session() as session:
        found: models.Job | None = session.exec(_newest(select(models.Job), name)).first()
        return found


def _job_without_spec(history: History, name: str | None) -> models.Job | None:
    """Return that job without its specification, which is corrupt."""
    with history.session() as session:
        found = session.exec(_newest(select(models.Job.id, models.Job.name, models.Job.directory), name)).first()
    return None if found is None else models.Job(id=found[0], name=found[1], directory=found[2], spec={}, cluster={}, at=0.0)


def _newest(wanted: Any, name: str | None) -> Any:  # noqa: ANN401 (a statement of whatever is selected)
    if name is not None:
        wanted = wanted.where((col(models.Job.name) == name) | (col(models.Job.id).startswith(name)))
    return wanted.order_by(col(models.Job.id).desc()).limit(1)


def _learn_secrets(redactor: Redactor, folder: Path, found: models.Job | None) -> None:
    """Learn the job's token and the secrets in its specifications; the one on disk may be of an earlier job of that name."""
    with suppress(OSError, ValueError):
        redactor.learn(*(folder / "token").read_text().split()[1:])
    for job in (None, found):
        with suppress(OSError, ValueError, AttributeError):
            redactor.value(_redacted_spec(redactor, _specification(folder, job)))


def _specification(folder: Path, found: models.Job | None) -> Any:  # noqa: ANN401 (any JSON)
    """Return a job's specification: from the history if it has the job, else from the job's folder, where `holdfast run` wrote it."""
    return json.loads((folder / "spec.json").read_text()) if found is None else {"job": found.spec, "cluster": found.cluster}


def _redacted_spec(redactor: Redactor, spec: Any) -> Any:  # noqa: ANN401 (any JSON)
    """Return a job's specification with the values of its environment hidden."""
    if not isinstance(spec, dict):
        return spec
    found = {}
    for name, value in spec.items():
        if name == "env" and isinstance(value, dict):
            found[name] = redactor.environment({str(key): str(one) for key, one in value.items()}, facts.SHOWN)
            hidden = [(str(key), str(one)) for key, one in value.items() if found[name][str(key)] == HIDDEN]
            redactor.learn(*(one for key, one in hidden if is_secret(key) or is_distinct(one)))
        else:
            found[name] = _redacted_spec(redactor, value)
    return found


def _add_history(bundle: Bundle, redactor: Redactor, history: History, job: models.Job) -> None:
    """Add the rows of the history about the job and its cluster's nodes."""
    bundle.part(
        "history/job", lambda: {**job.model_dump(warnings=False), "spec": _redacted_spec(redactor, job.spec), "cluster": job.cluster}
    )
    for model in OF_JOB:
        _add_table(bundle, redactor, history, model, col(model.job_id) == job.id)
    cluster = str(job.cluster.get("name", ""))
    for one in OF_CLUSTER:
        _add_table(bundle, redactor, history, one, col(one.cluster) == cluster)


def _add_table(bundle: Bundle, redactor: Redactor, history: History, model: type[SQLModel], where: Any) -> None:  # noqa: ANN401 (a condition)
    name = str(model.__tablename__)
    try:
        order: Any = getattr(model, "at", None)
        wanted = select(model).where(where)
        with history.session() as session:
            rows = session.exec(wanted.order_by(col(order).desc()).limit(MOST_ROWS) if order is not None else wanted.limit(MOST_ROWS)).all()
        lines = [json.dumps(redactor.value(row.model_dump(exclude=SECRET_COLUMNS, warnings=False)), default=str) for row in reversed(rows)]
        bundle.add(f"history/{name}.jsonl", "".join(line + "\n" for line in lines))
    except Exception as error:  # noqa: BLE001 (as above)
        bundle.record_failure(f"history/{name}", error)


def _node_folders(job: models.Job | None, cluster: str | None) -> Iterator[Path]:
    """Yield the folders of nodes on this machine: of one cluster, or of all if the cluster is unknown."""
    clusters = [paths.cluster_directory(cluster)] if cluster else []
    with suppress(ValueError):  # a corrupt or outdated specification
        described = cluster_of(job.cluster) if job is not None else None
        clusters = [described.home] if isinstance(described, LocalCluster) else clusters
    with suppress(OSError):
        clusters = clusters or sorted(paths.cluster_directory("x").parent.iterdir())
    for one in clusters:
        with suppress(OSError):
            yield from sorted(node for node in one.iterdir() if node.is_dir() and not node.is_symlink())


def _add_remote_logs(bundle: Bundle, history: History, job: models.Job, taken: set[tuple[str, str]]) -> None:
    """Add the ends of the logs on other machines, except those *taken* from a folder that they share with this one."""
    try:
        held, faulty = queries.ranks_held(history, job.id), queries.faulty_nodes(history, job.id, limit=FAULTY)
        source = open_cluster(cluster_of(job.cluster))
    except Exception as error:  # noqa: BLE001 (as above)
        bundle.record_failure("nodes", error)
        return
    with closing(source):
        RemoteLogs(bundle, source, job.name, held).run(faulty, taken)


def _add_folder(bundle: Bundle, name: str, folder: Path) -> list[Path]:
    """Add the ends of a folder's logs and journals and a list of all its files; return the files that were added."""
    listed: list[str] = []
    taken: list[Path] = []
    omitted = 0
    try:
        for path in sorted(folder.rglob("*")):
            if len(listed) >= MOST_FILES * 10:
                break
            with suppress(OSError):
                status = path.lstat()
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(status.st_mtime))
                listed.append(f"{stat.filemode(status.st_mode)} {status.st_size:>12} {when} {path.relative_to(folder)}")
                if not stat.S_ISREG(status.st_mode) or not any(path.match(one) for one in LOGS):
                    continue
                if len(taken) < MOST_FILES:
                    taken.append(path)
                    bundle.tail(f"{name}/{path.relative_to(folder)}", path)
                else:
                    omitted += 1
    except OSError as error:
        bundle.record_failure(name, error)
    if omitted:
        bundle.record_missing(name, f"{plural(omitted, 'file')} beyond the first {MOST_FILES}: files.txt names them")
    bundle.add(f"{name}/files.txt", "\n".join(listed) + "\n")
    return taken
