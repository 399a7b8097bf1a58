"""A real job on a machine that is a node of a real Kubernetes API server: its conditions become faults, and a reason to leave the node."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path

import pytest

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.readings import KubernetesReading
from holdfast.history import FaultRecord, queries
from holdfast.probe.readers.kubernetes import EVENTS_RULE, read_kubernetes
from tests.cli.conftest import PROGRAM
from tests.integration.stage import BOOTED, Play, Stage
from tests.kubernetes.__main__ import FALLEN_OFF, HUNG, record
from tests.kubernetes.api_server import ADMIN, NAMESPACE, VARIABLE, ApiServer, programs
from tests.kubernetes.recorded import ANSWERED, NAMES, Pod, answer, kubeconfig
from tests.mentions import mentions
from tests.monitors import is_read
from tests.waiting import wait_until

NODE = "gpu-node-2"
pytestmark = pytest.mark.skipif(programs() is None, reason=f"{VARIABLE} names no API server: `make kubernetes` runs these tests")


@dataclass(frozen=True)
class Cluster:
    """An API server with a node and an account that may read it, and its answers on the way there."""

    server: ApiServer
    answers: dict[str, tuple[int, dict[str, str], str]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Give the cluster from which answers are recorded."""
    binaries = programs()
    assert binaries is not None
    with ApiServer(tmp_path_factory.mktemp("kubernetes"), binaries) as server:
        yield Cluster(server, record(server))


def test_the_recorded_answers_are_those_of_the_server(cluster: Cluster) -> None:
    """Other tests use them in its place: the same status, headers and fields."""
    assert cluster.answers.keys() == set(NAMES)
    for name, (status, headers, body) in cluster.answers.items():
        kept_status, kept_headers, kept_body = answer(name)
        assert (status, headers.keys()) == (kept_status, kept_headers.keys())
        assert shape(json.loads(body)) == shape(json.loads(kept_body)), name


def shape(value: object) -> object:
    """Return *value* with the names and types of all fields, and the texts of none that differs from run to run."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items() if name != "managedFields"}
    return [shape(one) for one in value] if isinstance(value, list) else type(value).__name__


def test_the_shipped_manifest_lets_a_pod_read_its_node(cluster: Cluster, tmp_path: Path) -> None:
    """And nothing else; a token that the server does not know is refused, and a new one takes its place."""
    server = cluster.server
    pod = Pod(tmp_path / "pod", server.authority.certificate, server.port, token=server.token())
    reading = read_kubernetes(pod.root, pod.environment)
    assert isinstance(reading, KubernetesReading)
    assert {one.type for one in reading.conditions} == {"Ready", "SysLogsXIDError", "KernelDeadlock"}
    assert isinstance(reading.events, tuple)
    assert [(one.reason, one.source, one.count, one.message) for one in reading.events] == [("TaskHung", "kernel-monitor", 3, HUNG)]
    others = ("nodes", "secrets", "pods", "events", f"namespaces/{NAMESPACE}/events", "namespaces/default/pods")
    statuses = {server.request("GET", f"/api/v1/{objects}", token=server.token())[0] for objects in others}
    assert statuses == {HTTPStatus.FORBIDDEN}
    pod.token.write_text("of-another-cluster")
    refused = read_kubernetes(pod.root, pod.environment)
    assert isinstance(refused, Unknown)
    assert mentions(refused.why, "401")
    pod.token.write_text(server.token())
    assert isinstance(read_kubernetes(pod.root, pod.environment), KubernetesReading)


def test_a_kubelet_reads_its_own_node(cluster: Cluster, tmp_path: Path) -> None:
    """By its certificate, and by the name in its kubeconfig; that it may is built into the API server."""
    server, user = cluster.server, f"system:node:{ANSWERED}"
    place = tmp_path / "etc/kubernetes/kubelet.conf"
    place.parent.mkdir(parents=True)
    for name, file in zip(("kubelet.crt", "kubelet.key"), server.authority.signs(user, group="system:nodes"), strict=True):
        (place.parent / name).write_bytes(file.read_bytes())
    pair = {f"client_{kind}": f"/etc/kubernetes/kubelet.{ending}" for kind, ending in (("certificate", "crt"), ("key", "key"))}
    kubeconfig(place, server.port, server.authority.certificate, user=user, data=True, **pair)
    reading = read_kubernetes(tmp_path, {})
    assert isinstance(reading, KubernetesReading)
    assert isinstance(reading.events, Unknown), "a kubelet writes events, and lists none"
    assert mentions(reading.events.why, "403", EVENTS_RULE)


def test_a_condition_is_a_fault_of_a_running_job_and_a_reason_to_leave_the_node(cluster: Cluster, stage: Stage, tmp_path: Path) -> None:
    """What is True before the job is not its fault. An Xid 79 comes while it trains; then a rank dies, and the incident is the GPU's."""
    server = cluster.server
    server.add_node(NODE)
    server.report(NODE, "GpuMemWatch", status="True", reason="GpuMemWatchIsNotHealthy", message="old", at=time.time() - 3600)
    log = tmp_path / "kern.log"
    log.write_text(BOOTED)
    config = kubeconfig(tmp_path / "config", server.port, server.authority.certificate, token=ADMIN)
    stage.environment |= {"HOLDFAST_KERNEL_LOG": str(log), "NODE_NAME": NODE, "KUBECONFIG": str(config)}
    play = stage.play("kubernetes-condition", args=["--steps", "4000"], nnodes=1, nproc_per_node=1, spare_nodes=1)
    play.reaches("RUNNING")
    wait_until(lambda: is_read(log, "node-0"), seconds=60, explain=play.log)
    server.report(NODE, "SysLogsXIDError", status="True", reason="SysLogsXIDErrorIsNotHealthy", message=FALLEN_OFF)
    with log.open("a") as file:
        file.write("Nov 21 10:00:01 n0 kernel: nvme nvme0: I/O 12 QID 3 timeout, aborting\n")  # the node is sampled after it
    wait_until(partial(found, play), seconds=60, explain=play.log)
    (fault,) = {one.kind: one for one in found(play)}.values()
    assert (fault.kind, fault.recommended_action) == ("gpu-off-bus", "evict")
    assert fault.evidence["source"] == "node conditions on node-0"
    assert play.state() == "RUNNING"
    play.chaos.signal(0, signal.SIGKILL)
    wait_until(lambda: play.incidents() and play.incidents()[0].outcome, seconds=60, explain=play.log)
    play.process.send_signal(signal.SIGTERM)
    play.ends()
    incident = play.incidents()[0]
    assert (incident.kind, incident.target, incident.action) == ("gpu-off-bus", "node node-0", "replace-node")
    command = [*PROGRAM, "incidents", "show", "1"]
    shown = subprocess.run(command, env=stage.environment, capture_output=True, text=True, check=True).stdout
    assert "node conditions on node-0" in shown
    assert "SysLogsXIDError" in shown
    assert ADMIN not in shown + play.log()


def found(play: Play) -> list[FaultRecord]:
    """Return the faults of node-0 that are from its conditions."""
    faults = queries.faults(play.stage.history, play.job.id)
    return [one for one in faults if one.node == "node-0" and str(one.evidence.get("source", "")).startswith("node conditions")]
