"""Clusters that are reached by SSH, as a user writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prefect.settings import get_current_settings

from holdfast.cluster.ssh.connection import Endpoint
from holdfast.cluster.ssh.connector import targets_of
from holdfast.errors import BadFile
from holdfast.spec import LocalCluster, SshCluster, SshHop, cluster_of, load_cluster, load_job


def cluster(tmp_path: Path, text: str) -> SshCluster:
    """Return the cluster that a file describes."""
    (tmp_path / "c.yaml").write_text("kind: ssh\n" + text)
    made = load_cluster(tmp_path / "c.yaml")
    assert isinstance(made, SshCluster)
    return made


def test_what_is_left_out_is_filled_in(tmp_path: Path) -> None:
    """From the cluster, or from the current user; files are relative to the cluster's folder."""
    text = "hosts: [a, {name: b, address: '::1', port: 2222, user: root, key: other, jump: []}]\nkey: id\njump: [gate, me@inner:22022]\n"
    a, b = targets_of(cluster(tmp_path, text), lambda: "runner")
    key = str(tmp_path / "id")
    assert a.endpoint == Endpoint(address="a", port=22, user="runner", key=key)
    assert a.jump_hosts == (
        Endpoint(address="gate", port=22, user="runner", key=key),
        Endpoint(address="inner", port=22022, user="me", key=key),
    )
    assert b.endpoint == Endpoint(address="::1", port=2222, user="root", key=str(tmp_path / "other"))
    assert b.jump_hosts == ()


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
        ("hosts: [{name: a, address: b}, b]\n", "hosts", "'a' and 'b' are one machine, b port 22"),
        ("hosts: [a b]\n", "hosts[0].name", "is not allowed here"),
        ("hosts: ['-oProxyCommand=x']\n", "hosts[0].name", "is not allowed here"),
        ("hosts: [{name: a, adress: b}]\n", "hosts[0].adress", "Did you mean 'address'?"),
        ("hosts: ['gpu[9-1]']\n", "hosts[0].name", "is not a range of nodes"),
        ("hosts: ['gpu[1-3]', gpu2]\n", "hosts", "2 hosts are called 'gpu2'"),
        ("hosts: ['gpu[1-3]', gpu2]\n", "hosts", "take it out of 'gpu[1-3]'"),
        ("hosts: 'gpu[1-2]'\n", "hosts", """["gpu[1-2]"]"""),
        ("hosts: ['r[1-101]-g[1-100]']\n", "hosts[0].name", "is not a range of nodes"),
        ("hosts: [a]\npython: ~/venv/bin/python\n", "python", "Over SSH leave `~/` out"),
        ("hosts: [a]\ninterface: 10.1.0.5/33\n", "interface", "is not a network"),
        ("hosts: ['-gpu[1-3]']\n", "hosts[0].name", "'-gpu1', which cannot name a node"),
        ("hosts: [{name: 'gpu[1-3]', address: '10.0.0.[1-2]'}]\n", "hosts[0].address", "2 addresses for 3 names"),
        ("hosts: [{name: 'gpu[1-3]', address: gate}]\n", "hosts", "are one machine, gate port 22"),
        ("hosts: ['gpu[1-3]', {name: a, adress: b}]\n", "hosts[1].adress", "Did you mean 'address'?"),
        (
            "hosts: [{name: a, failure_domain: r1}]\nmaintenance: [{failure_domains: [r2], start: 2026-12-01 22:00}]\n",
            "maintenance[0].failure_domains",
            "Name one of r1",
        ),
        ("hosts: [a]\nport: 0\n", "port", "not greater"),
        ("hosts: [a]\nuser: 'a b'\n", "user", "account"),
        ("hosts: [a]\npython: python3 -c x\n", "python", "a shell reads it"),
        ("hosts: [a]\npython: $(reboot)\n", "python", "a shell reads it"),
        ("hosts: [a]\njump: [{adress: b}]\n", "jump[0].adress", "Did you mean 'address'?"),
        ("hosts: [a]\nnodes: 3\n", "nodes", "unknown field"),
    ],
)
def test_an_error_is_reported_with_place_and_cure(tmp_path: Path, text: str, field: str, words: str) -> None:
    """Nothing of it reaches a shell or a name server."""
    with pytest.raises(BadFile) as refused:
        cluster(tmp_path, text)
    problems = {problem.field: str(problem) for problem in refused.value.problems}
    assert words in problems[field]


def test_a_range_expands_to_nodes(tmp_path: Path) -> None:
    """As Slurm writes them; each with its address, and all with the fields of the range."""
    text = """
hosts: ["gpu[008-010]", {name: "cpu-[1,3-4].lab", address: "10.0.3.[7-9]", port: 2222, failure_domain: rack-b}, alone]
maintenance: [{failure_domains: [rack-b], start: 2026-12-01 22:00}, {nodes: ["gpu[008-009]"], start: 2026-12-02 22:00}]
"""
    made = cluster(tmp_path, text)
    assert made.names == ["gpu008", "gpu009", "gpu010", "cpu-1.lab", "cpu-3.lab", "cpu-4.lab", "alone"]
    doors = {one.node: (one.endpoint.address, one.endpoint.port) for one in targets_of(made, lambda: "runner")}
    assert (doors["gpu010"], doors["cpu-3.lab"], doors["alone"]) == (("gpu010", 22), ("10.0.3.8", 2222), ("alone", 22))
    assert [sorted(one.nodes) for one in made.windows] == [["cpu-1.lab", "cpu-3.lab", "cpu-4.lab"], ["gpu008", "gpu009"]]
    assert cluster_of(made.model_dump(mode="json")) == made


def test_two_ranges_in_a_name_expand_to_their_product(tmp_path: Path) -> None:
    """As racks with hosts, and their addresses; the last range varies fastest."""
    made = cluster(tmp_path, "hosts: [{name: 'rack[1-2]-gpu[08-10].lab', address: '10.0.[1-2].[8-10]'}]\n")
    assert made.names == [f"rack{rack}-gpu{gpu}.lab" for rack in "12" for gpu in ("08", "09", "10")]
    assert [one.endpoint.address for one in targets_of(made, lambda: "me")] == [
        f"10.0.{rack}.{gpu}" for rack in (1, 2) for gpu in (8, 9, 10)
    ]


def test_a_network_may_be_written_by_any_address_in_it(tmp_path: Path) -> None:
    """As `ip addr` shows it; a name stays a name."""
    made = cluster(tmp_path, "hosts: [a, {name: b, interface: eth0}, {name: c, interface: 'fd00::7/64'}]\ninterface: 10.1.2.5/16\n")
    assert (made.interface, made.interfaces) == ("10.1.0.0/16", {"b": "eth0", "c": "fd00::/64"})


def test_kinds_are_distinguished(tmp_path: Path) -> None:
    """In files, in a job's file, and in the history; without `kind` a cluster is local."""
    assert isinstance(cluster_of({"nodes": 2}), LocalCluster)
    made = cluster_of({"kind": "ssh", "hosts": ["a"]})
    assert cluster_of(made.model_dump(mode="json")) == made
    (tmp_path / "job.yaml").write_text("name: j\nscript: x.py\ncluster: {kind: ssh, hosts: [a]}\n")
    assert load_job(tmp_path / "job.yaml")[1] == made.model_copy(update={"maintenance_file": str(tmp_path / "job.yaml")})
    (tmp_path / "c.py").write_text("from holdfast.spec import SshCluster\ncluster = SshCluster(kind='ssh', hosts=['a'])\n")
    assert load_cluster(tmp_path / "c.py") == made


def test_hosts_without_a_kind_are_those_of_ssh(tmp_path: Path) -> None:
    """The cure is to add `kind`, not to remove the hosts."""
    (tmp_path / "c.yaml").write_text("hosts: [a, b]\nkey: id\n")
    with pytest.raises(BadFile) as refused:
        load_cluster(tmp_path / "c.yaml")
    assert [(one.field, one.cure) for one in refused.value.problems] == [("kind", "Add `kind: ssh`")]


def test_one_address_behind_two_gates_is_two_machines(tmp_path: Path) -> None:
    """Sites reuse private addresses; and several servers on one machine have separate ports."""
    text = (
        "hosts: [{name: a, address: 10.0.0.1, jump: g1}, {name: b, address: 10.0.0.1, jump: g2}, {name: c, address: 10.0.0.1, port: 23}]\n"
    )
    assert [host.name for host in cluster(tmp_path, text).hosts] == ["a", "b", "c"]


def test_a_large_cluster_fits_into_the_parameters_of_a_flow() -> None:
    """Prefect accepts half a megabyte: of each host only the fields that are set are passed, empty ones included."""
    said = [{"name": f"gpu{n:04}", "address": f"n{n:04}.example.org", "failure_domain": "rack-a", "jump": []} for n in range(4096)]
    made = cluster_of({"kind": "ssh", "hosts": said})
    dumped = made.model_dump(mode="json")
    assert dumped["hosts"] == said
    assert len(json.dumps(dumped)) < get_current_settings().server.api.max_parameter_size
    assert cluster_of(dumped) == made
