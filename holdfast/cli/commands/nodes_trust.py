"""`holdfast nodes trust`: the keys that machines show, and a person's word that they are the right ones."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from holdfast.cli.output import hint, say, say_json, say_rows
from holdfast.cluster.ssh.known_hosts import HostKeyStatus
from holdfast.cluster.ssh.trust import ShownKey, Trust
from holdfast.errors import NoKeysThere, UnknownNode
from holdfast.report.wording import plural
from holdfast.spec import SshCluster, load_cluster

HEAD = ("MACHINE", "NODE", "KEY", "FINGERPRINT", "")
ON_CONSOLE = "`for key in /etc/ssh/ssh_host_*_key.pub; do ssh-keygen -lf $key; done` on a machine's console shows what it should be."


def trust(cluster_file: Path, nodes: Sequence[str], *, yes: bool, as_json: bool) -> int:
    """Show the keys of a cluster's machines and ask whether unknown ones are to be trusted; return 0 when all are."""
    cluster = load_cluster(cluster_file)
    if not isinstance(cluster, SshCluster):
        raise NoKeysThere(cluster.name, cluster.kind)
    for node in nodes:
        if node not in cluster.names:
            raise UnknownNode(node, cluster.name, tuple(cluster.names[:5]))
    told: dict[str, ShownKey] = {}
    added: set[str] = set()
    with Trust(cluster) as trust:
        machines = trust.machines(nodes)
        while machines:
            found = trust.ask(machines)
            told |= {one.name: one for one in found}
            if not as_json:
                _tell(found)
            new = [one for one in found if one.status is HostKeyStatus.UNKNOWN]
            if not new or not _agreed(new, trust.known.path, yes=yes, as_json=as_json):
                break
            trust.add(new)
            added |= {one.name for one in new}
            behind = {one.machine.endpoint for one in new}
            machines = [one.machine for one in found if one.key is None and behind & set(one.machine.jump_hosts)]
    left = [one for one in told.values() if one.status is not HostKeyStatus.TRUSTED and one.name not in added]
    if as_json:
        rows = [_record(one, added) for one in told.values()]
        say_json({"cluster": cluster.name, "known_hosts": str(trust.known.path), "machines": rows})
    else:
        _conclude(list(told.values()), left, added, trust.known.path)
    return int(bool(left))


def _tell(found: Sequence[ShownKey]) -> None:
    rows = []
    for one in found:
        node = one.machine.nodes[0] if one.machine.is_node else f"way to {plural(len(one.machine.nodes), 'node')}"
        key = one.key.get_name() if one.key is not None else "none"
        rows.append((one.name, node, key, one.key.fingerprint if one.key is not None else "", one.why or str(one.status)))
    say_rows(HEAD, rows, last="folded")
    same = defaultdict(set)
    for one in found:
        if one.key is not None:
            same[one.key.fingerprint].add(one.machine.endpoint.address)
    for addresses in same.values():
        if len(addresses) > 1:
            whose = ", ".join(sorted(addresses))
            say(f"{whose} show the same key: clones of one image? Each can pose as the others; give them keys of their own.")


def _agreed(new: Sequence[ShownKey], path: Path, *, yes: bool, as_json: bool) -> bool:
    """Ask a person, if one is there."""
    if yes:
        return True
    if as_json or not sys.stdin.isatty():
        hint(f"{plural(len(new), 'key')} not added: nobody could be asked. With `--yes` they are added to {path}.")
        return False
    say()
    say(ON_CONSOLE)
    return click.confirm(f"Trust {plural(len(new), 'new key')}, and add to {path}?", default=False)


def _conclude(told: Sequence[ShownKey], left: Sequence[ShownKey], added: set[str], path: Path) -> None:
    say()
    if added:
        say(f"Added {plural(len(added), 'key')} to {path}.")
    if left:
        say(f"{len(told) - len(left)} of {plural(len(told), 'machine')} are trusted.")
    else:
        say(f"All {plural(len(told), 'machine')} are trusted." if len(told) > 1 else "It is trusted.")


def _record(one: ShownKey, added: set[str]) -> dict[str, Any]:
    trusted = one.status is HostKeyStatus.TRUSTED or one.name in added
    return {
        "machine": one.name,
        "nodes": list(one.machine.nodes),
        "is_node": one.machine.is_node,
        "key": one.key.get_name() if one.key is not None else None,
        "fingerprint": one.key.fingerprint if one.key is not None else None,
        "status": one.status,
        "trusted": trusted,
        "added": one.name in added,
        "reason": one.why or None,
    }
