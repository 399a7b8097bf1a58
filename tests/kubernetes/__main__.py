"""``KUBERNETES_BIN=FOLDER python -m tests.kubernetes``: record the answers of a real API server that `recorded` gives."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.kubernetes.api_server import ACCOUNT, NAMESPACE, VARIABLE, ApiServer, programs
from tests.kubernetes.manifests import node_reader
from tests.kubernetes.recorded import ANSWERED, ANSWERS, EVENTS_PATH
from tests.waiting import wait_until

PATH: Final = f"/api/v1/nodes/{ANSWERED}?resourceVersion=0"
FALLEN_OFF: Final = (
    "ErrorCode:79 PCI:0000:18:00 GPU_UUID:GPU-b5f21324-f1f9-f1a4-1a37-1166234f6e4f kernel: [16450076.435595] NVRM: Xid (PCI:0000:18:00): "
    "79, pid=123456, name=python3, GPU has fallen off the bus. Recommended Action=RESTART_BM;"
)
"""The message of NVSentinel's condition `SysLogsXIDError`, as its tests expect it."""
HUNG: Final = "task python3:20744 blocked for more than 120 seconds."
"""The message of node-problem-detector's event `TaskHung`, by its pattern of the kernel log."""


def record(server: ApiServer) -> dict[str, tuple[int, dict[str, str], str]]:
    """Return an answer of each kind, by its name: status, headers and body."""
    server.add_node(ANSWERED)
    token = server.add_account()
    found = {"unauthorized": server.request("GET", PATH, token="none"), "forbidden": server.request("GET", PATH, token=token)}
    found["events-forbidden"] = server.request("GET", EVENTS_PATH, token=token)
    for manifest in node_reader():
        if manifest["kind"] != "ServiceAccount":
            server.apply(manifest)
    no_events = _until(server, token, '"EventList"', EVENTS_PATH)
    server.report_event(ANSWERED, "TaskHung", source="kernel-monitor", message=HUNG, count=3)
    server.report_event(ANSWERED, "RegisteredNode", source="node-controller", message="Node is registered", type_="Normal")
    server.report_event("another", "TaskHung", source="kernel-monitor", message=HUNG)
    return found | {
        "no-events": no_events,
        "events": _until(server, token, '"TaskHung"', EVENTS_PATH),
        "not-found": server.request("GET", PATH.replace(ANSWERED, "another"), token=token),
        "node": _until(server, token, '"Ready"'),
        "faulty-node": _faulty(server, token),
    }


def _until(server: ApiServer, token: str, part: str, path: str = PATH) -> tuple[int, dict[str, str], str]:
    """Return the answer for *path* once it has *part*: the server's cache may be a moment old, and so may its rules of access."""

    def found() -> tuple[int, dict[str, str], str] | None:
        answer = server.request("GET", path, token=token)
        return answer if part in answer[2] else None

    answer = wait_until(found, seconds=30)
    assert answer is not None
    return answer


def _faulty(server: ApiServer, token: str) -> tuple[int, dict[str, str], str]:
    server.report(ANSWERED, "SysLogsXIDError", status="True", reason="SysLogsXIDErrorIsNotHealthy", message=FALLEN_OFF)
    server.report(ANSWERED, "KernelDeadlock", status="False", reason="KernelHasNoDeadlock", message="kernel has no deadlock")
    server.cordon(ANSWERED)
    return _until(server, token, '"unschedulable"')


def main() -> int:
    """Record all answers; return the exit status."""
    binaries = programs()
    if binaries is None:
        print(f"Set {VARIABLE} to the folder that scripts/kube_apiserver.sh prints", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, ApiServer(Path(folder), binaries) as server:
        for name, (status, headers, body) in record(server).items():
            text = json.dumps({"status": status, "headers": headers, "body": body}, indent=1)
            (ANSWERS / f"{name}.json").write_text(text + "\n")
    print(f"recorded for {ACCOUNT} in {NAMESPACE}: {', '.join(sorted(path.stem for path in ANSWERS.glob('*.json')))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
