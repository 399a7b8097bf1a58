"""Clusters that are reached by SSH, as a user writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import BadFile
from holdfast.spec import LocalCluster, SshCluster, SshHop, cluster_of, load_cluster, load_job
from holdfast.ssh.targets import Door, targets_of


def cluster(tmp_path: Path, text: str) -> SshCluster:
    """Return the cluster that a file describes."""
    (tmp_path / "c.yaml").write_text("kind: ssh\n" + text)
    made = load_cluster(tmp_path / "c.yaml")
    assert isinstance(made, SshCluster)
    return made


def test_what_is_left_out_is_filled_in(tmp_path: Path) -> None:
    """From the cluster, or from who runs this; files are seen from the cluster's own folder."""
    text = "hosts: [a, {name: b, address: '::1', port: 2222, user: root, key: other, jump: []}]\nkey: id\njump: [gate, me@inner:22022]\n"
    a, b = targets_of(cluster(tmp_path, text), lambda: "runner")
    key = str(tmp_path / "id")
    assert a.door == Door(address="a", port=22, user="runner", key=key)
    assert a.way == (Door(address="gate", port=22, user="runner", key=key), Door(address="inner", port=22022, user="me", key=key))
    assert b.door == Door(address="::1", port=2222, user="root", key=str(tmp_path / "other"))
    assert b.way == ()


@pytest.mark.parametrize(
    ("short", "hop"),
    [
        ("gate", {"address": "gate"}),
        ("me@gate", {"address": "gate", "user": "me"}),
        ("gate:2222", {"address": "gate", "port": 2222}),
        ("me@gate:2222", {"address": "gate", "port": 2222, "user": "me"}),
        ("'fe80::1'", {"address": "fe80::1"}),
        ("'[fe80::1]:2222'", {"address": "fe80::1", "port": 2222}),
        ("{address: gate, key: /k}", {"address": "gate", "key": "/k"}),
    ],
)
def test_a_jump_host_may_be_written_short(tmp_path: Path, short: str, hop: dict[str, object]) -> None:
    """As for OpenSSH's ProxyJump."""
    assert cluster(tmp_path, f"hosts: [a]\njump: {short}\n").jump == [SshHop.model_validate(hop)]


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("", "hosts", "is missing"),
        ("hosts: []\n", "hosts", "at least"),
        ("hosts: [a, b, a]\n", "hosts", "2 hosts are called 'a'"),
        ("hosts: [{name: a, address: b}, b]\n", "hosts", "'a' and 'b' are one machine, b port 22. Remove one"),
        ("hosts: [a b]\n", "hosts[0].name", "cannot stand here"),
        ("hosts: ['-oProxyCommand=x']\n", "hosts[0].name", "cannot stand here"),
        ("hosts: [{name: a, adress: b}]\n", "hosts[0].adress", "Did you mean 'address'?"),
        ("hosts: [a]\nport: 0\n", "port", "not greater"),
        ("hosts: [a]\nuser: 'a b'\n", "user", "account"),
        ("hosts: [a]\npython: python3 -c x\n", "python", "a shell reads it"),
        ("hosts: [a]\npython: $(reboot)\n", "python", "a shell reads it"),
        ("hosts: [a]\njump: [{adress: b}]\n", "jump[0].adress", "Did you mean 'address'?"),
        ("hosts: [a]\nnodes: 3\n", "nodes", "unknown field"),
    ],
)
def test_a_slip_is_told_with_its_place_and_cure(tmp_path: Path, text: str, field: str, words: str) -> None:
    """Nothing of it reaches a shell or a name server."""
    with pytest.raises(BadFile) as refused:
        cluster(tmp_path, text)
    told = {problem.field: str(problem) for problem in refused.value.problems}
    assert words in told[field]


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    """In files, in a job's file, and as the history has them; without a word of it a cluster is local."""
    assert isinstance(cluster_of({"nodes": 2}), LocalCluster)
    made = cluster_of({"kind": "ssh", "hosts": ["a"]})
    assert cluster_of(made.model_dump(mode="json")) == made
    (tmp_path / "job.yaml").write_text("name: j\nscript: x.py\ncluster: {kind: ssh, hosts: [a]}\n")
    assert load_job(tmp_path / "job.yaml")[1] == made
    (tmp_path / "c.py").write_text("from holdfast.spec import SshCluster\ncluster = SshCluster(kind='ssh', hosts=['a'])\n")
    assert load_cluster(tmp_path / "c.py") == made


def test_hosts_without_a_kind_are_those_of_ssh(tmp_path: Path) -> None:
    """Whoever forgets `kind` is told of it, and not to remove the hosts."""
    (tmp_path / "c.yaml").write_text("hosts: [a, b]\nkey: id\n")
    with pytest.raises(BadFile) as refused:
        load_cluster(tmp_path / "c.yaml")
    assert [(one.field, one.cure) for one in refused.value.problems] == [("kind", "Add `kind: ssh`")]


def test_one_address_behind_two_gates_is_two_machines(tmp_path: Path) -> None:
    """Sites use private addresses again; and several servers of one machine have ports of their own."""
    text = (
        "hosts: [{name: a, address: 10.0.0.1, jump: g1}, {name: b, address: 10.0.0.1, jump: g2}, {name: c, address: 10.0.0.1, port: 23}]\n"
    )
    assert [host.name for host in cluster(tmp_path, text).hosts] == ["a", "b", "c"]
