"""`holdfast node trust`: show the SSH host keys of machines, and trust them after confirmation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from holdfast.cli.arguments import known_nodes, named
from holdfast.cli.output import confirmed, echo, echo_json, echo_table, hint
from holdfast.cluster.ssh.known_hosts import HostKeyStatus
from holdfast.cluster.ssh.trust import ShownKey, Trust
from holdfast.errors import NoHostKeys
from holdfast.plurals import plural
from holdfast.spec import SshCluster, load_cluster

HEAD: Final = ("MACHINE", "NODE", "KEY", "FINGERPRINT", "")
ON_CONSOLE: Final = "`for key in /etc/ssh/ssh_host_*_key.pub; do ssh-keygen -lf $key; done` on a machine's console shows its true keys."


def trust(nodes: Sequence[str], cluster_file: Path | None, *, yes: bool, as_json: bool) -> int:
    """Show the keys of a cluster's machines and ask whether to trust unknown ones; return 0 when all are trusted."""
    cluster = load_cluster(named(cluster_file))
    if not isinstance(cluster, SshCluster):
        raise NoHostKeys(cluster.name, cluster.kind)
    known_nodes(nodes, cluster.name, cluster.names)
    keys: dict[str, ShownKey] = {}
    added: set[str] = set()
    with Trust(cluster) as trust:
        machines = trust.machines(nodes)
        while machines:
            found = trust.ask(machines)
            keys |= {one.name: one for one in found}
            if not as_json:
                _show(found)
            new = [one for one in found if one.status is HostKeyStatus.UNKNOWN]
            if not new or not _confirmed(new, trust.known.path, yes=yes, as_json=as_json):
                break
            trust.add(new)
            added |= {one.name for one in new}
            reachable = {one.machine.endpoint for one in new}
            machines = [one.machine for one in found if one.key is None and reachable & set(one.machine.jump_hosts)]
    untrusted = [one for one in keys.values() if one.status is not HostKeyStatus.TRUSTED and one.name not in added]
    if as_json:
        rows = [_record(one, added) for one in keys.values()]
        echo_json({"cluster": cluster.name, "known_hosts": str(trust.known.path), "machines": rows})
    else:
        echo()
        echo(_summary(len(keys), len(untrusted), len(added), trust.known.path))
    return int(bool(untrusted))


def _summary(machines: int, untrusted: int, added: int, path: Path) -> str:
    text = f"Added {plural(added, 'key')} to {path}.\n" if added else ""
    if untrusted:
        return f"{text}{machines - untrusted} of {plural(machines, 'machine')} are trusted."
    return text + (f"All {plural(machines, 'machine')} are trusted." if machines > 1 else "The machine is trusted.")


def _show(found: Sequence[ShownKey]) -> None:
    rows = []
    same = defaultdict(set)
    for one in found:
        node = one.machine.nodes[0] if one.machine.is_node else f"jump host of {plural(len(one.machine.nodes), 'node')}"
        key = one.key.get_name() if one.key is not None else "none"
        rows.append((one.name, node, key, one.key.fingerprint if one.key is not None else "", one.why or str(one.status)))
        if one.key is not None:
            same[one.key.fingerprint].add(one.machine.endpoint.address)
    echo_table(HEAD, rows, last="wrapped")
    for addresses in same.values():
        if len(addresses) > 1:
            echo(f"{', '.join(sorted(addresses))} have the same key (clones of one image?) and can impersonate each other: replace them.")


def _confirmed(new: Sequence[ShownKey], path: Path, *, yes: bool, as_json: bool) -> bool:
    """Ask the user, if there is one."""
    if yes:
        return True
    answer = confirmed(f"Trust {plural(len(new), 'new key')}, and add to {path}?", as_json=as_json, before=ON_CONSOLE)
    if answer is None:
        hint(f"{plural(len(new), 'key')} not added: there is no terminal to ask on. `--yes` adds them to {path}.")
    return bool(answer)


def _record(one: ShownKey, added: set[str]) -> dict[str, Any]:
    return {
        "machine": one.name,
        "nodes": list(one.machine.nodes),
        "is_node": one.machine.is_node,
        "key": one.key.get_name() if one.key is not None else None,
        "fingerprint": one.key.fingerprint if one.key is not None else None,
        "status": one.status,
        "trusted": one.status is HostKeyStatus.TRUSTED or one.name in added,
        "added": one.name in added,
        "reason": one.why or None,
    }
