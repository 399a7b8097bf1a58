"""The monitor of a real agent reads the conditions of its Kubernetes node, over HTTPS, from the recorded answers of an API server."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.agent.rig import CLIENT, Node
from tests.kubernetes.recorded import TOKEN, Pod, RecordedServer, events_of, node_with
from tests.mentions import mentions

SLEEPER = CLIENT + "hello(); time.sleep(600)"


def test_a_new_condition_is_a_fault_of_the_node_and_an_old_one_is_none(new_node: Node, tmp_path: Path) -> None:
    """An account that may not read nodes is reported once, and the job goes on; what is read after that is judged by its time."""
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    writer = os.open(log, os.O_RDWR)
    (tmp_path / "server").mkdir()
    with RecordedServer(tmp_path / "server") as server:
        server.allowed = False
        pod = Pod(tmp_path / "root", server.authority.certificate, server.port)
        variables = ("env", *(f"{name}={value}" for name, value in pod.environment.items()))
        new_node.begin("--kernel-log", str(log), "--root", str(pod.root), through=variables)
        with new_node.flow().attach(0) as flow:
            flow.prepare(new_node, [sys.executable, new_node.script(SLEEPER)], watch=True)
            flow.start(1)
            assert mentions(flow.wait("node.conditions-unreadable")["why"], "403")
            server.allowed = True
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            gone = "ErrorCode:79 PCI:0000:3b:00 GPU_UUID:GPU-2 GPU has fallen off the bus Recommended Action=RESTART_BM;"
            old = {"type": "KernelDeadlock", "status": "True", "lastTransitionTime": "2025-11-06T10:00:00Z"}
            new = {"type": "SysLogsXIDError", "status": "True", "message": gone, "lastTransitionTime": at}
            server.node = lambda: node_with(old, new)
            hung = "task python3:20744 blocked for more than 120 seconds."
            server.events = lambda: events_of({"message": hung, "lastTimestamp": at, "count": 3})
            os.write(writer, b"3,1,1,-;nvme nvme0: I/O 12 QID 3 timeout, aborting\n")  # after a line like this one the node is sampled
            fault = flow.wait("node.fault", source="node conditions on node")
            assert (fault["kind"], fault["part"]) == ("gpu-off-bus", "GPU 0000:3b:00.0")
            assert fault["quote"].startswith("SysLogsXIDError: ")
            assert fault["at"] >= time.time() - 120
            event = flow.wait("node.fault", kind="task-hung")
            assert (event["source"], event["quote"]) == ("node events on node", f"event TaskHung of kernel-monitor (3 times): {hung}")
    os.close(writer)
    conditions = [
        one for one in flow.events if one["event"] == "node.fault" and one["source"].startswith(("node conditions ", "node events "))
    ]
    assert [one["kind"] for one in conditions] == ["gpu-off-bus", "task-hung"], "the other one is from before the job"
    assert TOKEN not in new_node.log.read_text()
