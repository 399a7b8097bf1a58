"""`holdfast node bootstrap`: install agent and runtime on hosts that are reached by SSH."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from holdfast.bootstrap import HostOutcome, Hosts, NodeWheel, node_wheel
from holdfast.cli.arguments import known_nodes, named
from holdfast.cli.output import echo, echo_json, echo_table, on_terminal
from holdfast.errors import NothingToBootstrap, NotWritable
from holdfast.plurals import plural
from holdfast.report.text.wording import NOTHING, duration
from holdfast.spec import Cluster, SshCluster, load_cluster

HEAD: Final = ("NODE", "DONE", "PYTHON", "TOOK", "WHERE, OR WHY NOT")
ENDS: Final = frozenset({"kept", "installed", "repaired", "failed", "inspected"})
"""Stages after which a host is done."""


def bootstrap(nodes: Sequence[str], cluster_file: Path | None, *, wheel: Path | None, write_wheel: Path | None, as_json: bool) -> int:
    """Set up the hosts of a cluster, and show the outcome of each; return 1 when one failed."""
    cluster = ssh_cluster(cluster_file)
    nodes = known_nodes(nodes, cluster.name, cluster.names)
    ours = NodeWheel.read(wheel) if wheel else node_wheel()
    if write_wheel is not None:
        try:
            write_wheel.write_bytes(ours.data)
        except OSError as error:
            raise NotWritable("the wheel", str(write_wheel), error.strerror or str(error)) from error
    with Hosts(cluster, ours) as hosts, progress(nodes, quiet=as_json) as shown:
        outcomes = hosts.set_up(nodes, shown)
    if as_json:
        rows = [dataclasses.asdict(one) for one in outcomes]
        echo_json({"cluster": cluster.name, "version": ours.version, "digest": ours.digest, "nodes": rows})
    else:
        echo_table(HEAD, [_row(one) for one in outcomes], coloured=1, last="wrapped")
        done = sum(not one.failed for one in outcomes)
        kept = sum(one.done == "kept" for one in outcomes)
        unchanged = f", {kept} unchanged" if kept else ""
        echo(f"\n{done} of {plural(len(outcomes), 'host')} have Holdfast {ours.version} ({ours.digest[:12]}){unchanged}.")
    return int(any(one.failed for one in outcomes))


def ssh_cluster(path: Path | None) -> SshCluster:
    """Return the cluster in a file; refuse one that is not reached by SSH."""
    return over_ssh(load_cluster(named(path)))


def over_ssh(cluster: Cluster) -> SshCluster:
    """Return *cluster*; refuse one that is not reached by SSH."""
    if not isinstance(cluster, SshCluster):
        raise NothingToBootstrap(cluster.name, cluster.kind)
    return cluster


@contextmanager
def progress(nodes: Sequence[str], *, quiet: bool) -> Iterator[Callable[[str, str], None]]:
    """Give the function that takes each host and its stage: it draws a progress bar on a terminal."""
    columns = (TextColumn("hosts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}", markup=False))
    console = Console(file=sys.stderr)
    stages, lock = dict.fromkeys(nodes, "waiting"), threading.Lock()
    with Progress(*columns, console=console, disable=quiet or not on_terminal() or not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("", total=len(nodes), now="")

        def show(node: str, stage: str) -> None:
            with lock:
                stages[node] = stage
                unfinished = {name: one for name, one in stages.items() if one not in ENDS}
                active = [f"{name} {one}" for name, one in unfinished.items() if one != "waiting"]
                bar.update(task, completed=len(stages) - len(unfinished), now=", ".join(active[:3]))

        yield show


def _row(one: HostOutcome) -> list[str]:
    text = "\n".join([one.why, *([f"-> {one.cure}"] if one.cure else [])]) if one.failed else one.path
    return [one.node, one.done, one.python or NOTHING, duration(one.seconds), text]
