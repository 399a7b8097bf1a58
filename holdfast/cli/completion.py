"""Values that a shell can complete: names of jobs, nodes, fault kinds and policies. Read without torch, Prefect and history migrations."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from holdfast import paths
from holdfast.errors import HoldfastError

MAX_NAMES: Final = 500
"""Names that are offered at most: a shell lists no more in a useful way."""
SQLITE: Final = "sqlite:///"


def complete(kind: str, context: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    """Return the values of *kind* that begin with *incomplete*; none where they cannot be read: a shell shows no errors."""
    with suppress(HoldfastError, OSError, sqlite3.Error, ValueError):
        return [CompletionItem(name) for name in KINDS[kind](context.params) if name.startswith(incomplete)][:MAX_NAMES]
    return []


def _rows(query: str, *values: str) -> list[tuple[Any, ...]]:
    """Return what *query* finds in the history, opened read-only; nothing where it is no SQLite file or does not exist."""
    url = paths.history_url()
    path = url.removeprefix(SQLITE)
    if path == url or not os.path.exists(path):  # noqa: PTH110 (pathlib would only add its import)
        return []
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=0.2)) as database:
        return database.execute(query, values).fetchall()


def _jobs(_given: Mapping[str, Any]) -> list[str]:
    """Return the names of jobs, newest first: from the history, else from the jobs' folders."""
    found = [str(name) for (name,) in _rows("SELECT name FROM job GROUP BY name ORDER BY max(id) DESC")]
    folder = paths.home() / "jobs"
    return found or (sorted(one.name for one in folder.iterdir()) if folder.is_dir() else [])


def _nodes(given: Mapping[str, Any]) -> list[str]:
    """Return the nodes of the cluster that is named, of the cluster of the job that is named, or of this machine."""
    from holdfast.cluster import names_of  # noqa: PLC0415 (pydantic, which other completions do not need)
    from holdfast.spec import LocalCluster, load_cluster  # noqa: PLC0415
    from holdfast.spec.files.load import parse_cluster  # noqa: PLC0415

    if given.get("cluster_file"):
        cluster = load_cluster(given["cluster_file"])
    elif rows := _rows("SELECT cluster FROM job WHERE name = ? ORDER BY id DESC LIMIT 1", str(given.get("job") or "")):
        cluster = parse_cluster(json.loads(rows[0][0]), "the history")
    else:
        cluster = load_cluster(given["default_cluster"]) if given.get("default_cluster") else LocalCluster()
    return [] if cluster.kind == "slurm" else list(names_of(cluster))  # Slurm would have to be asked


def _incidents(given: Mapping[str, Any]) -> list[str]:
    """Return the numbers of the incidents of the job that is named, or of the newest job."""
    job = given.get("job")
    where, values = ("WHERE name = ? ", (str(job),)) if job else ("", ())
    newest = f"(SELECT id FROM job {where}ORDER BY id DESC LIMIT 1)"  # noqa: S608 (no text of the user is in it)
    return [str(number) for (number,) in _rows(f"SELECT number FROM incident WHERE job_id = {newest} ORDER BY number", *values)]  # noqa: S608


def _faults(_given: Mapping[str, Any]) -> list[str]:
    from holdfast.detectors.all_kinds import CATALOGUE  # noqa: PLC0415 (it takes a tenth of a second)

    return sorted(CATALOGUE)


def _policies(_given: Mapping[str, Any]) -> list[str]:
    from holdfast.policies.recovery.policy import NAMED  # noqa: PLC0415 (as above)

    return list(NAMED)


KINDS: Final[Mapping[str, Callable[[Mapping[str, Any]], list[str]]]] = {
    "jobs": _jobs,
    "nodes": _nodes,
    "incidents": _incidents,
    "faults": _faults,
    "policies": _policies,
}
