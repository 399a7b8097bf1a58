"""A real API server of Kubernetes with its etcd, in a folder of its own: `scripts/kube_apiserver.sh` builds both."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any, Final, Self

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from holdfast.host.ports import free_port
from tests.kubernetes.certificates import Authority
from tests.waiting import wait_until

VARIABLE: Final = "KUBERNETES_BIN"
"""Variable with the folder that has `kube-apiserver` and `etcd`."""
ADMIN: Final = "token-of-the-administrator"
NAMESPACE: Final = "training"
ACCOUNT: Final = "holdfast"
JSON: Final = "application/json"
PATCH: Final = "application/strategic-merge-patch+json"
START_SECONDS: Final = 120.0


def programs() -> Path | None:
    """Return the folder with the programs; none where the variable names none."""
    folder = os.environ.get(VARIABLE)
    return Path(folder).absolute() if folder else None


class ApiServer:
    """Runs both programs while a test uses them. Objects are made through the API, as other programs of a cluster make them."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.authority, self.port = folder, Authority(folder), free_port()
        self._binaries = binaries
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        etcd, peers = free_port(), free_port()
        client = f"http://127.0.0.1:{etcd}"
        peer = f"http://127.0.0.1:{peers}"
        self._begin(
            "etcd", "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", "--unsafe-no-fsync",
        )  # fmt: skip
        certificate, key = self.authority.signs("kube-apiserver", "127.0.0.1", "localhost", "kubernetes.default.svc")
        accounts = self.folder / "accounts.key"
        accounts.write_bytes(
            rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
            )
        )
        tokens = self.folder / "tokens.csv"
        tokens.write_text(f'{ADMIN},admin,1,"system:masters"\n')
        self._begin(
            "kube-apiserver", "--etcd-servers", client, "--bind-address", "127.0.0.1", "--secure-port", str(self.port),
            "--tls-cert-file", str(certificate), "--tls-private-key-file", str(key), "--client-ca-file", str(self.authority.certificate),
            "--token-auth-file", str(tokens), "--authorization-mode", "Node,RBAC", "--service-cluster-ip-range", "10.0.0.0/24",
            "--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", str(accounts),
            "--service-account-signing-key-file", str(accounts), "--cert-dir", str(self.folder / "certs"),
        )  # fmt: skip
        try:
            wait_until(self._is_ready, seconds=START_SECONDS, explain=self.log)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}.log").open("wb") as log:
            self._children.append(subprocess.Popen([self._binaries / program, *arguments], stdout=log, stderr=log, cwd=self.folder))

    def _is_ready(self) -> bool:
        assert all(child.poll() is None for child in self._children), self.log()
        try:
            return self.request("GET", "/readyz")[0] == http.client.OK
        except OSError:
            return False

    def log(self) -> str:
        """Return the ends of both logs."""
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        """End both programs."""
        for child in reversed(self._children):
            child.kill()
            child.wait()
        self._children.clear()

    def request(self, method: str, path: str, body: Any = None, *, token: str = ADMIN, kind: str = JSON) -> tuple[int, dict[str, str], str]:
        """Return status, headers and body of an answer."""
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=30)
        try:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind, "Accept": JSON}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            found = connection.getresponse()
            return found.status, dict(found.getheaders()), found.read().decode()
        finally:
            connection.close()

    def make(self, method: str, path: str, body: Any = None, *, kind: str = JSON) -> Any:
        """Return the object that a request which has to succeed is answered with."""
        status, _, text = self.request(method, path, body, kind=kind)
        assert status in {http.client.OK, http.client.CREATED}, text
        return json.loads(text)

    # -- what a cluster does ----------------------------------------------------------------------------------------------

    def add_node(self, name: str) -> None:
        """Register a node, as its kubelet does."""
        self.make("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        self.report(name, "Ready", status="True", reason="KubeletReady", message="kubelet is posting ready status")

    def report(self, node: str, type_: str, *, status: str, reason: str, message: str, at: float | None = None) -> None:
        """Set a condition of a node through its status, as the kubelet and monitors do."""
        now = _written(time.time() if at is None else at)
        one = {"type": type_, "status": status, "reason": reason, "message": message, "lastHeartbeatTime": now, "lastTransitionTime": now}
        self.make("PATCH", f"/api/v1/nodes/{node}/status", {"status": {"conditions": [one]}}, kind=PATCH)

    def report_event(self, node: str, reason: str, *, source: str, message: str, count: int = 1, type_: str = "Warning") -> None:
        """Write an event of a node, as node-problem-detector and the node controller do."""
        now = _written(time.time())
        event = {
            "apiVersion": "v1", "kind": "Event", "metadata": {"generateName": f"{node}.", "namespace": "default"}, "type": type_,
            "involvedObject": {"kind": "Node", "name": node, "uid": node}, "reason": reason, "message": message, "count": count,
            "source": {"component": source, "host": node}, "firstTimestamp": now, "lastTimestamp": now,
        }  # fmt: skip
        self.make("POST", "/api/v1/namespaces/default/events", event)

    def cordon(self, node: str) -> None:
        """Do as `kubectl cordon` does."""
        self.make("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}}, kind=PATCH)

    def add_account(self) -> str:
        """Make a namespace with a service account, and return a token of it as the kubelet gets one for a pod."""
        self.make("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
        self.make("POST", path, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, "namespace": NAMESPACE}})
        return self.token()

    def token(self) -> str:
        """Return a new token of the service account."""
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        made = self.make("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}/token", asked)
        return str(made["status"]["token"])

    def apply(self, manifest: Any) -> None:
        """Create the object of a manifest of RBAC."""
        group, kind = manifest["apiVersion"], manifest["kind"].lower() + "s"
        namespace = manifest["metadata"].get("namespace")
        self.make("POST", f"/apis/{group}/{f'namespaces/{namespace}/' if namespace else ''}{kind}", manifest)


def _written(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
