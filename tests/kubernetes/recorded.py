"""An HTTPS server that gives recorded answers of a real API server, and what a node has to ask it with."""

from __future__ import annotations

import base64
import http.server
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from tests.kubernetes.certificates import Authority

ANSWERS: Final = Path(__file__).parent / "answers"
"""Recorded by `python -m tests.kubernetes`."""
NAMES: Final = ("node", "faulty-node", "unauthorized", "forbidden", "not-found", "events", "no-events", "events-forbidden")
TOKEN: Final = "s3cr3t-of-the-pod"
"""The token that the server takes, at first."""
ANSWERED: Final = "gpu-node-1"
"""The name of the node that it has."""

EVENTS_PATH: Final = (
    "/api/v1/namespaces/default/events?fieldSelector=involvedObject.kind%3DNode%2CinvolvedObject.name%3Dgpu-node-1%2Ctype%21%3DNormal"
    "&limit=500&resourceVersion=0"
)
"""Where the recent events of that node are."""

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""


def answer(name: str) -> Answer:
    """Return a recorded answer."""
    found = json.loads((ANSWERS / f"{name}.json").read_text())
    return found["status"], found["headers"], found["body"].encode()


class RecordedServer:
    """Answers as the API server did: by the token, the path, and what the test sets in `node`."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.authority = Authority(folder)
        self.node: Callable[[], Answer] = lambda: answer("node")
        self.events: Callable[[], Answer] = lambda: answer("no-events")
        self.tokens = {TOKEN}
        self.allowed = True
        """The account may read nodes."""
        self.asked: list[str] = []
        """The paths of all requests."""
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.asked.append(self.path)
                status, headers, body = server.answers(self.path, self.headers.get("Authorization"), self.connection)
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
                self.close_connection = True

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.authority.signs("kube-apiserver", "127.0.0.1", "kubernetes.default.svc"))
        context.load_verify_locations(self.authority.certificate)
        context.verify_mode = ssl.CERT_OPTIONAL
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def answers(self, path: str, authorization: str | None, connection: socket.socket) -> Answer:
        """Return the answer to a request, by its token or the certificate of who sends it."""
        certificate = connection.getpeercert() if isinstance(connection, ssl.SSLSocket) else None
        if (authorization or "").removeprefix("Bearer ") not in self.tokens and not certificate:
            return answer("unauthorized")
        if not self.allowed:
            return answer("forbidden")
        if path == EVENTS_PATH:
            return self.events()
        return self.node() if path == f"/api/v1/nodes/{ANSWERED}?resourceVersion=0" else answer("not-found")

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def silent_server() -> Iterator[int]:
    """Give the port of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


class Pod:
    """The folders and variables of a pod with a service account."""

    def __init__(self, root: Path, authority: Path, port: int, *, token: str = TOKEN) -> None:
        self.root = root
        folder = root / "var/run/secrets/kubernetes.io/serviceaccount"
        folder.mkdir(parents=True)
        (folder / "ca.crt").write_bytes(authority.read_bytes())
        self.token = folder / "token"
        self.token.write_text(token)
        self.environment = {"NODE_NAME": ANSWERED, "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}


def kubeconfig(path: Path, port: int, authority: Path, *, user: str = "agent", data: bool = True, **credentials: str) -> Path:
    """Write a kubeconfig as `kubectl config` does; *data*: with the authority in it, not only its path."""
    encoded = base64.b64encode(authority.read_bytes()).decode()
    cluster = f"certificate-authority-data: {encoded}" if data else f"certificate-authority: {authority}"
    lines = "\n".join(f"    {name.replace('_', '-') if name != 'tokenFile' else name}: {value}" for name, value in credentials.items())
    path.write_text(
        f"""apiVersion: v1
clusters:
- cluster:
    {cluster}
    server: https://127.0.0.1:{port}
  name: other
- cluster:
    {cluster}
    server: https://127.0.0.1:{port}
  name: gpus
contexts:
- context:
    cluster: gpus
    user: {user}
  name: {user}@gpus
current-context: {user}@gpus
kind: Config
preferences: {{}}
users:
- name: {user}
  user:
{lines}
"""
    )
    return path


def node_with(*conditions: dict[str, Any], **spec: Any) -> Answer:
    """Return the recorded answer for a healthy node, with these conditions and fields in addition."""
    status, headers, body = answer("node")
    node = json.loads(body)
    node["status"]["conditions"] += conditions
    node["spec"] |= spec
    changed = json.dumps(node).encode()
    return status, {**headers, "Content-Length": str(len(changed))}, changed


def events_of(*events: dict[str, Any]) -> Answer:
    """Return the recorded answer with these events in place of its own; fields that one does not have are those of the recorded one."""
    status, headers, body = answer("events")
    listed = json.loads(body)
    listed["items"] = [listed["items"][0] | one for one in events]
    changed = json.dumps(listed).encode()
    return status, {**headers, "Content-Length": str(len(changed))}, changed
