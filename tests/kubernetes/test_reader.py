"""What a node's reader makes of the answers of an API server, and of what can go wrong on the way to it."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from holdfast.detectors.codec import packed, unpacked
from holdfast.detectors.evidence import NOT_REQUESTED, Unknown
from holdfast.detectors.nodes.health import unknown_signals
from holdfast.detectors.nodes.readings import KubernetesReading, NodeEvent
from holdfast.probe.readers import kubernetes
from holdfast.probe.readers.kubernetes import read_kubernetes
from holdfast.probe.readers.kubernetes_access import environment_of, find_access
from tests.each import each_named
from tests.kubernetes.certificates import Authority
from tests.kubernetes.recorded import (
    ANSWERED,
    EVENTS_PATH,
    TOKEN,
    Answer,
    Pod,
    RecordedServer,
    answer,
    events_of,
    kubeconfig,
    node_with,
    silent_server,
)
from tests.mentions import mentions

JSON: Final = {"Content-Type": "application/json"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RecordedServer]:
    """Give a server that answers as a real one did."""
    (tmp_path / "server").mkdir()
    with RecordedServer(tmp_path / "server") as server:
        yield server


@pytest.fixture
def pod(tmp_path: Path, server: RecordedServer) -> Pod:
    """Give a pod whose service account the server knows."""
    return Pod(tmp_path / "pod", server.authority.certificate, server.port)


def read(pod: Pod, **changed: str) -> KubernetesReading:
    """Return what can be read from a pod."""
    found = read_kubernetes(pod.root, pod.environment | changed)
    assert isinstance(found, KubernetesReading), found
    return found


def why(pod: Pod, **changed: str) -> str:
    """Return why nothing can be read from a pod; that never has its token."""
    found = read_kubernetes(pod.root, pod.environment | changed)
    assert isinstance(found, Unknown), found
    assert not any(one and one in found.why for one in (TOKEN, *pod.token.read_text().split()))
    return found.why


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_pod_reads_the_conditions_of_its_node(server: RecordedServer, pod: Pod) -> None:
    """With its service account; the reading survives its encoding. The request is one that the server answers from its cache."""
    server.node = lambda: answer("faulty-node")
    found = read(pod)
    by_type = {one.type: one for one in found.conditions}
    assert by_type.keys() == {"Ready", "SysLogsXIDError", "KernelDeadlock"}
    assert by_type["SysLogsXIDError"].status == "True"
    assert "Xid (PCI:0000:18:00): 79" in by_type["SysLogsXIDError"].message
    assert by_type["KernelDeadlock"].status == "False"
    assert by_type["SysLogsXIDError"].since is not None
    assert found.unschedulable
    assert found.taints == ("node.kubernetes.io/not-ready:NoSchedule",)
    assert server.asked == [f"/api/v1/nodes/{ANSWERED}?resourceVersion=0", EVENTS_PATH]
    assert unpacked(KubernetesReading, json.loads(json.dumps(packed(found)))) == found


def test_labels_of_repair_services_are_read_and_no_others(server: RecordedServer, pod: Pod) -> None:
    """A node has dozens of labels, some of which nobody but its owner should see in a history."""
    status, headers, body = answer("node")
    node = json.loads(body)
    hyperpod = "sagemaker.amazonaws.com/node-health-status"
    node["metadata"]["labels"] = {hyperpod: "UnschedulablePendingReplacement", "team": "secret-project"}
    changed = json.dumps(node).encode()
    server.node = lambda: (status, {**headers, "Content-Length": str(len(changed))}, changed)
    assert read(pod).labels == {hyperpod: "UnschedulablePendingReplacement"}


def test_a_token_that_rotates_is_read_anew(server: RecordedServer, pod: Pod) -> None:
    """The kubelet replaces the file long before the old token ends."""
    read(pod)
    server.tokens = {"the-next-one"}
    assert mentions(why(pod), "401", str(pod.token))
    pod.token.write_text("the-next-one\n")
    read(pod)


def test_who_may_not_read_nodes_is_told_the_rule(server: RecordedServer, pod: Pod) -> None:
    """The rule that the shipped manifest has; the text is the same on all nodes."""
    server.allowed = False
    found = why(pod)
    assert mentions(found, "403", kubernetes.RULE)
    assert ANSWERED not in found


def test_a_name_that_no_node_has_is_said_with_where_it_is_from(pod: Pod) -> None:
    """A pod may have the name of another cluster's node, or its own."""
    assert mentions(why(pod, NODE_NAME="pod-7"), "404", "NODE_NAME")


@each_named(
    "given",
    {
        "too long": (200, JSON, b'{"kind": "Node", "metadata": {}, "x": "' + b"x" * (kubernetes.MAX_BYTES + 1) + b'"}'),
        "no JSON": (200, JSON, b"<html>sign in</html>"),
        "cut short": (200, {**JSON, "Content-Length": "99999"}, b'{"kind": "Node", "metadata": {}}'),
        "no object": (200, JSON, b"[1, 2]"),
        "another object": (200, JSON, b'{"kind": "Pod", "metadata": {"name": "x"}}'),
        "strange conditions": node_with({"type": 7, "status": None}),
        "conditions of texts": (200, JSON, b'{"kind": "Node", "metadata": {}, "status": {"conditions": ["Ready"]}}'),
        "deep": (200, JSON, b"[" * 100_000),
        "throttled": (429, {**JSON, "Retry-After": "1"}, b"slow down"),
        "out of order": (500, JSON, b"etcd is unavailable"),
        "moved": (302, {"Location": "https://example.org/"}, b""),
    },
)
def test_an_answer_that_is_no_node_is_a_reason_and_no_error(server: RecordedServer, pod: Pod, given: Answer) -> None:
    """Whatever stands between the node and the server."""
    server.node = lambda: given
    assert mentions(why(pod), f"https://127.0.0.1:{server.port}")


def test_a_node_without_conditions_is_one(server: RecordedServer, pod: Pod) -> None:
    """Its kubelet has not reported yet."""
    server.node = lambda: (200, JSON, b'{"kind": "Node", "metadata": {"name": "x"}}')
    assert read(pod) == KubernetesReading(conditions=(), labels={}, events=())


# -- events ------------------------------------------------------------------------------------------------------------


def stamp(ago: float = 0.0) -> str:
    """Return a time of the API."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - ago))


def events(pod: Pod) -> tuple[NodeEvent, ...]:
    """Return the events that can be read."""
    found = read(pod).events
    assert isinstance(found, tuple), found
    return found


def test_recent_events_of_the_node_are_read_in_their_order(server: RecordedServer, pod: Pod) -> None:
    """Written in either way: `count` and `lastTimestamp`, or `series`. One of hours ago, and a normal one, are left out."""
    server.events = lambda: events_of(
        {"reason": "Later", "lastTimestamp": stamp(5), "count": 7},
        {"reason": "Old", "lastTimestamp": stamp(2 * 3600)},
        {"reason": "Normal", "lastTimestamp": stamp(), "type": "Normal"},
        {
            "reason": "Series",
            "lastTimestamp": None,
            "count": None,
            "eventTime": stamp(3000).replace("Z", ".123456Z"),
            "series": {"count": 12, "lastObservedTime": stamp(60).replace("Z", ".123456Z")},
            "source": {},
            "reportingComponent": "health-checker",
        },
        {"reason": "Once", "lastTimestamp": None, "count": None, "eventTime": stamp(90).replace("Z", ".000001Z")},
    )
    assert [(one.reason, one.count, one.source) for one in events(pod)] == [
        ("Once", 1, "kernel-monitor"),
        ("Series", 12, "health-checker"),
        ("Later", 7, "kernel-monitor"),
    ]


def test_who_may_not_list_events_reads_the_node_and_is_told_the_rule(server: RecordedServer, pod: Pod) -> None:
    """As an account of an older manifest: nothing else is missing."""
    server.events = lambda: answer("events-forbidden")
    found = read(pod)
    assert {one.type for one in found.conditions} == {"Ready"}
    assert isinstance(found.events, Unknown)
    assert mentions(found.events.why, "403", kubernetes.EVENTS_RULE, "namespace default")
    assert TOKEN not in found.events.why
    assert [where for where, _ in unknown_signals(found)] == ["events"]


@each_named(
    "given",
    {
        "no JSON": (200, JSON, b"<html>"),
        "no list": (200, JSON, b'{"kind": "Node"}'),
        "a list of texts": (200, JSON, b'{"items": ["x"]}'),
        "strange fields": (200, JSON, b'{"items": [{"metadata": {}, "reason": 7}]}'),
        "a strange count": (200, JSON, b'{"items": [{"metadata": {}, "count": "many"}]}'),
        "deep": (200, JSON, b"[" * 100_000),
        "throttled": (429, JSON, b"slow down"),
    },
)
def test_an_answer_that_is_no_list_of_events_spoils_nothing(server: RecordedServer, pod: Pod, given: Answer) -> None:
    """The node is read."""
    server.events = lambda: given
    found = read(pod)
    assert found.conditions
    assert isinstance(found.events, Unknown)


# -- on the way --------------------------------------------------------------------------------------------------------


def test_a_server_that_is_gone_is_a_reason(server: RecordedServer, pod: Pod) -> None:
    """As long as it is: it is asked again with the next sample."""
    server.close()
    assert mentions(why(pod), f"https://127.0.0.1:{server.port}", "Connection refused")


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, server: RecordedServer, pod: Pod) -> None:
    """A check of the node goes on without it."""
    monkeypatch.setattr(kubernetes, "TIMEOUT", 0.2)
    with silent_server() as port:
        assert mentions(why(pod, KUBERNETES_SERVICE_PORT=str(port)), "timed out")


def test_the_server_has_to_be_that_of_the_cluster(tmp_path: Path, server: RecordedServer) -> None:
    """One that another authority vouches for gets no token."""
    (tmp_path / "other").mkdir()
    pod = Pod(tmp_path / "pod", Authority(tmp_path / "other", "other-ca").certificate, server.port)
    assert mentions(why(pod), "ca.crt")
    assert server.asked == []


def test_the_server_has_to_have_the_name_that_was_asked(server: RecordedServer, pod: Pod) -> None:
    """Its certificate says for which addresses it answers."""
    assert mentions(why(pod, KUBERNETES_SERVICE_HOST="localhost"), "not trusted", "localhost")
    assert server.asked == []


@each_named("token", {"empty": "", "two lines": "first\nsecond", "spaces": "first second", "no text": "tok\x00en"})
def test_what_is_no_token_is_not_sent(server: RecordedServer, pod: Pod, token: str) -> None:
    """And not shown: a header with a line break would be an error that quotes it."""
    pod.token.write_text(token)
    assert mentions(why(pod), str(pod.token))
    assert server.asked == []


def test_no_authority_in_its_file_is_a_reason(pod: Pod) -> None:
    """It may be mounted late."""
    (pod.token.parent / "ca.crt").write_text("")
    assert "not trusted" in why(pod), "then those authorities count that the machine trusts"
    (pod.token.parent / "ca.crt").write_text("-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----\n")
    assert mentions(why(pod), "ca.crt")


# -- credentials -------------------------------------------------------------------------------------------------------


def test_without_credentials_nothing_happens(tmp_path: Path, server: RecordedServer, pod: Pod) -> None:
    """Nor where a pod or a person has them for something else: without the name of the node nobody meant it."""
    assert read_kubernetes(tmp_path / "nothing", {}) is NOT_REQUESTED
    assert read_kubernetes(tmp_path / "nothing", {"NODE_NAME": ANSWERED}) is NOT_REQUESTED
    unnamed = {name: value for name, value in pod.environment.items() if name != "NODE_NAME"}
    assert read_kubernetes(pod.root, unnamed) is NOT_REQUESTED
    config = kubeconfig(tmp_path / "config", server.port, server.authority.certificate, token=TOKEN)
    assert read_kubernetes(tmp_path / "nothing", {"KUBECONFIG": str(config)}) is NOT_REQUESTED
    assert server.asked == []


def test_a_login_into_a_pod_has_the_variables_of_the_container(tmp_path: Path) -> None:
    """Sshd passes none on: those of its first process count, and only where that is in a pod."""
    (tmp_path / "proc/1").mkdir(parents=True)
    first = tmp_path / "proc/1/environ"
    first.write_bytes(b"KUBERNETES_SERVICE_HOST=10.0.0.1\0NODE_NAME=gpu-7\0SECRET=x\0")
    found = environment_of(tmp_path)
    assert (found["KUBERNETES_SERVICE_HOST"], found["NODE_NAME"]) == ("10.0.0.1", "gpu-7")
    assert "SECRET" not in found
    first.write_bytes(b"NODE_NAME=gpu-7\0")
    assert "NODE_NAME" not in environment_of(tmp_path)


@each_named("data", {"authority in it": True, "authority beside it": False})
def test_a_named_kubeconfig_is_used(tmp_path: Path, server: RecordedServer, *, data: bool) -> None:
    """The first that exists, with a token in it or in a file beside it."""
    (tmp_path / "token").write_text(TOKEN + "\n")
    for credentials in ({"token": TOKEN}, {"tokenFile": "token"}):
        config = kubeconfig(tmp_path / "config", server.port, server.authority.certificate, data=data, **credentials)
        environment = {"NODE_NAME": ANSWERED, "KUBECONFIG": f"{tmp_path / 'missing'}:{config}"}
        assert isinstance(read_kubernetes(Path("/"), environment), KubernetesReading)


def test_a_pods_account_goes_before_a_kubeconfig(tmp_path: Path, server: RecordedServer, pod: Pod) -> None:
    """It is what the cluster gave this pod."""
    config = kubeconfig(tmp_path / "config", server.port + 1, server.authority.certificate, token="other")
    found = find_access(pod.root, pod.environment | {"KUBECONFIG": str(config)})
    assert found is not None
    assert (found.port, found.token) == (server.port, TOKEN)
    assert TOKEN not in repr(found)


@each_named("rotated", {"two files": False, "one file": True})
def test_a_kubelets_certificate_reads_its_node(tmp_path: Path, server: RecordedServer, *, rotated: bool) -> None:
    """Its kubeconfig names the node; kubelets keep certificate and key in one file that rotates."""
    user = f"system:node:{ANSWERED}"
    certificate, key = server.authority.signs(user, group="system:nodes")
    if rotated:
        certificate.write_bytes(certificate.read_bytes() + key.read_bytes())
        key = certificate
    place = tmp_path / "root/etc/kubernetes/kubelet.conf"
    place.parent.mkdir(parents=True)
    for file in {certificate, key}:
        (place.parent / file.name).write_bytes(file.read_bytes())
    kubeconfig(
        place,
        server.port,
        server.authority.certificate,
        user=user,
        client_certificate=f"/etc/kubernetes/{certificate.name}",
        client_key=f"/etc/kubernetes/{key.name}",
    )
    assert isinstance(read_kubernetes(tmp_path / "root", {}), KubernetesReading)


def test_certificate_and_key_may_be_in_the_kubeconfig(tmp_path: Path, server: RecordedServer) -> None:
    """As kubeadm gives an administrator."""
    pair = [base64.b64encode(file.read_bytes()).decode() for file in server.authority.signs("admin")]
    config = kubeconfig(
        tmp_path / "config", server.port, server.authority.certificate, client_certificate_data=pair[0], client_key_data=pair[1]
    )
    assert isinstance(read_kubernetes(Path("/"), {"NODE_NAME": ANSWERED, "KUBECONFIG": str(config)}), KubernetesReading)


BAD_CONFIGS: Final = {
    "no user": ("    token: s3cr3t", "", "current context"),
    "a user with a password": ("    token: s3cr3t", "    username: ann\n    password: s3cr3t", "neither a token"),
    "a program's": ("    token: s3cr3t", "    exec:\n      command: aws", "neither a token"),
    "unverified": ("  name: gpus", "    insecure-skip-tls-verify: true\n  name: gpus", "insecure-skip-tls-verify"),
    "without TLS": ("server: https", "server: http", "https://"),
    "no context": ("current-context: agent@gpus\n", "", "current context"),
    "another context": ("current-context: agent@gpus", "current-context: x", "current context"),
    "no port": (":{port}\n  name: gpus", ":port\n  name: gpus", "address"),
    "no YAML": ("kind: Config", "kind", "line"),
    "no base64": ("certificate-authority-data: ", "certificate-authority-data: *", "line"),
    "not there": ("    token: s3cr3t", "    tokenFile: nowhere", "nowhere"),
}


@each_named("change", BAD_CONFIGS)
def test_a_kubeconfig_that_cannot_be_used_says_why(tmp_path: Path, server: RecordedServer, change: tuple[str, str, str]) -> None:
    """If it is named; a kubelet's is left alone, as it may be for the kubelet's own programs only."""
    before, after, part = change
    config = kubeconfig(tmp_path / "config", server.port, server.authority.certificate, token="s3cr3t")
    text = config.read_text()
    before = before.replace("{port}", str(server.port))
    assert before in text
    config.write_text(text.replace(before, after))
    found = read_kubernetes(tmp_path / "nothing", {"NODE_NAME": ANSWERED, "KUBECONFIG": str(config)})
    assert isinstance(found, Unknown)
    assert str(tmp_path) in found.why
    assert part in found.why
    assert "s3cr3t" not in found.why
    kubelets = tmp_path / "root/var/lib/kubelet/kubeconfig"
    kubelets.parent.mkdir(parents=True)
    kubelets.write_text(config.read_text())
    assert read_kubernetes(tmp_path / "root", {}) is NOT_REQUESTED
    assert server.asked == []
