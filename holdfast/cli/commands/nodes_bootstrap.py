"""`holdfast nodes bootstrap`."""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic_core import PydanticCustomError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from holdfast.bootstrap import HostOutcome, Hosts, NodeWheel, node_wheel
from holdfast.cli.output import on_terminal, say, say_json, say_rows
from holdfast.errors import NoLoginThere, NotWritable, UnknownNode
from holdfast.report.wording import NOTHING, duration, plural
from holdfast.spec import SshCluster, load_cluster
from holdfast.spec.ranges import names_in

PARTS: Final = re.compile(r",(?![^\[]*\])")
"""A comma between names; those within brackets belong to a range."""
HEAD: Final = ("NODE", "DONE", "PYTHON", "TOOK", "WHERE, OR WHY NOT")


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapRequest:
    """What a person asked for."""

    only: Sequence[str] = ()
    wheel: Path | None = None
    write: Path | None = None


def bootstrap(cluster_file: Path, wish: BootstrapRequest, *, as_json: bool) -> int:
    """Set up the hosts of a cluster, tell what came of each; return 1 when one is not as it should be."""
    cluster = ssh_cluster(cluster_file)
    nodes = nodes_meant(cluster, wish.only)
    wheel = NodeWheel.read(wish.wheel) if wish.wheel else node_wheel()
    if wish.write is not None:
        _write(wish.write, wheel)
    with Hosts(cluster, wheel) as hosts, progress(nodes, quiet=as_json) as shown:
        outcomes = hosts.set_up(nodes, shown)
    if as_json:
        rows = [dataclasses.asdict(one) for one in outcomes]
        say_json({"cluster": cluster.name, "version": wheel.version, "digest": wheel.digest, "nodes": rows})
    else:
        _tell(outcomes, wheel)
    return int(any(one.failed for one in outcomes))


def ssh_cluster(path: Path) -> SshCluster:
    """Return the cluster in a file; refuse one whose nodes nobody logs in to."""
    cluster = load_cluster(path)
    if not isinstance(cluster, SshCluster):
        raise NoLoginThere(cluster.name, cluster.kind)
    return cluster


def nodes_meant(cluster: SshCluster, only: Sequence[str]) -> list[str]:
    """Return the nodes that a person named, in the cluster's order; all where none was named."""
    known = cluster.names
    named = [name for text in only for part in PARTS.split(text) if part.strip() for name in _names(part.strip(), cluster)]
    for name in named:
        if name not in known:
            raise UnknownNode(name, cluster.name, tuple(known[:5]))
    return [name for name in known if name in set(named)] if named else known


def _names(text: str, cluster: SshCluster) -> list[str]:
    try:
        return names_in(text)
    except PydanticCustomError as error:  # a range that names too many, or runs downwards
        raise UnknownNode(text, cluster.name, tuple(cluster.names[:5])) from error


def _write(path: Path, wheel: NodeWheel) -> None:
    try:
        path.write_bytes(wheel.data)
    except OSError as error:
        raise NotWritable("the wheel", str(path), error.strerror or str(error)) from error


class _BootstrapProgress:
    """Shows on a terminal how far many hosts are."""

    def __init__(self, bar: Progress, task: TaskID, nodes: Collection[str]) -> None:
        self._bar, self._task, self._stages = bar, task, dict.fromkeys(nodes, "waiting")
        self._lock = threading.Lock()

    def __call__(self, node: str, stage: str) -> None:
        with self._lock:
            self._stages[node] = stage
            open_ones = {name: one for name, one in self._stages.items() if one not in ENDS}
            at_work = [f"{name} {one}" for name, one in open_ones.items() if one != "waiting"]
            self._bar.update(self._task, completed=len(self._stages) - len(open_ones), now=", ".join(at_work[:3]))


ENDS: Final = frozenset({"kept", "installed", "repaired", "failed", "inspected"})


@contextmanager
def progress(nodes: Sequence[str], *, quiet: bool) -> Iterator[_BootstrapProgress]:
    """Give what is to be told of each stage: it draws a bar where a person looks."""
    columns = (TextColumn("hosts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}", markup=False))
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=quiet or not on_terminal() or not sys.stderr.isatty(), transient=True) as bar:
        yield _BootstrapProgress(bar, bar.add_task("", total=len(nodes), now=""), nodes)


def _tell(outcomes: Sequence[HostOutcome], wheel: NodeWheel) -> None:
    say_rows(HEAD, [_row(one) for one in outcomes], coloured=1, last="folded")
    failed = sum(one.failed for one in outcomes)
    kept = sum(one.done == "kept" for one in outcomes)
    say()
    whole = f"{len(outcomes) - failed} of {plural(len(outcomes), 'host')} have Holdfast {wheel.version} ({wheel.digest[:12]})"
    say(f"{whole}, {kept} as before." if kept else f"{whole}.")


def _row(one: HostOutcome) -> list[str]:
    words = "\n".join([one.why, *([f"-> {one.cure}"] if one.cure else [])]) if one.failed else one.path
    return [one.node, one.done, one.python or NOTHING, duration(one.seconds), words]
