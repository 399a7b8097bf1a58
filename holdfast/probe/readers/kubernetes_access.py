"""Credentials for the API server of the Kubernetes cluster that this node is part of: a pod's, a kubeconfig's, or the kubelet's."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.probe.readers.kubeconfig import NotUnderstood, parse

NODE_NAME: Final = "NODE_NAME"
"""Variable with the name of this node in its cluster: in a pod, from the downward API (`spec.nodeName`)."""
HOST: Final = "KUBERNETES_SERVICE_HOST"
PORT: Final = "KUBERNETES_SERVICE_PORT"
SERVICE_ACCOUNT: Final = "var/run/secrets/kubernetes.io/serviceaccount"
SERVICE: Final = ("kubernetes.default.svc", "443")
"""Where a pod finds the API server if no variable says so."""
KUBELET_CONFIGS: Final = (
    "etc/kubernetes/kubelet.conf",
    "var/lib/kubelet/kubeconfig",
    "var/lib/rancher/rke2/agent/kubelet.kubeconfig",
    "var/lib/rancher/k3s/agent/kubelet.kubeconfig",
)
"""Where kubeadm, managed clusters and Rancher keep the credentials of a node's kubelet; only root can read them."""
SYSTEM_NODE: Final = "system:node:"
"""How the user name of a kubelet begins; its node's name follows."""
MAX_BYTES: Final = 1 << 20
"""Bytes that are read of a file."""
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class NotReadable(Exception):
    """The conditions cannot be read; *why* names no secret, and is the same on all nodes that have the same problem."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, kw_only=True)
class Access:
    """How to ask an API server for one node."""

    host: str
    port: int
    node: str
    named_by: str
    """Where the node's name is from."""
    path: str = ""
    """What comes before `/api` in its address."""
    ca: str = field(default="", repr=False)
    """Certificates of its authority (PEM); empty: those that this machine trusts."""
    ca_from: str = ""
    server_name: str = ""
    """The name that its certificate has, if that is not *host*."""
    token: str = field(default="", repr=False)
    identity: str = field(default="", repr=False)
    """Certificate and key of the client (PEM), if it has no token."""
    credentials_from: str = ""

    @property
    def url(self) -> str:
        """The address of the API server."""
        return f"https://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}{self.path}"


def environment_of(root: Path) -> dict[str, str]:
    """Return the variables of this process, after those of the container that it runs in: a login by SSH does not have these."""
    try:
        first = (root / "proc/1/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        first = []
    named = {name: value for name, found, value in (entry.partition("=") for entry in first) if found}
    wanted = {NODE_NAME, HOST, PORT} if HOST in named else set[str]()
    return {**{name: value for name, value in named.items() if name in wanted}, **os.environ}


def find_access(root: Path, environment: Mapping[str, str]) -> Access | None:
    """Return how to ask for this node: with the pod's service account, by `KUBECONFIG`, as the kubelet; None where nothing is meant to.

    Pods have a token, and people a `KUBECONFIG`, for other reasons: both count only with `NODE_NAME`. Raise `NotReadable` where what is
    there cannot be used.
    """
    if name := environment.get(NODE_NAME, "").strip():
        if not _NAME.fullmatch(name):
            raise NotReadable(f"{NODE_NAME} is no name of a Kubernetes node: {name[:80]!r}")
        if (folder := root / SERVICE_ACCOUNT).is_dir():
            return _of_service_account(folder, name, environment)
        if configs := environment.get("KUBECONFIG", ""):
            return _of_kubeconfig(next(filter(Path.exists, map(Path, configs.split(os.pathsep))), Path(configs)), root, name)
    for path in KUBELET_CONFIGS:
        if os.access(root / path, os.R_OK):
            with suppress(NotReadable):  # a kubelet's credentials may be a program's, for it alone
                return _of_kubeconfig(root / path, root, name)
    return None


def _of_service_account(folder: Path, node: str, environment: Mapping[str, str]) -> Access:
    host, port = environment.get(HOST, "").strip() or SERVICE[0], environment.get(PORT, "").strip() or SERVICE[1]
    if not port.isdecimal():
        raise NotReadable(f"{PORT} is no port: {port[:40]!r}")
    return Access(
        host=host,
        port=int(port),
        node=node,
        named_by=NODE_NAME,
        ca=_file(folder / "ca.crt"),
        ca_from=str(folder / "ca.crt"),
        token=_token(_file(folder / "token"), folder / "token"),
        credentials_from=str(folder / "token"),
    )


# -- kubeconfig --------------------------------------------------------------------------------------------------------


def _of_kubeconfig(path: Path, root: Path, node: str) -> Access:
    """Return how the current context of a kubeconfig asks."""
    user_name, cluster, user = _current(path)
    host, port, prefix = _server(path, cluster)
    token = str(user.get("token") or "") or _content(user, "tokenFile", path, root)
    identity = "" if token else "\n".join(dict.fromkeys(_content(user, f"client-{one}", path, root) for one in ("certificate", "key")))
    if not token and not identity.strip():
        raise NotReadable(f"{path}: its user has neither a token nor a certificate (programs that give one are not run)")
    if node:
        named_by = NODE_NAME
    elif user_name.startswith(SYSTEM_NODE):
        node, named_by = user_name.removeprefix(SYSTEM_NODE), str(path)
    else:
        node, named_by = os.uname().nodename.lower(), "this machine's name"
    return Access(
        host=host,
        port=port,
        node=node,
        named_by=named_by,
        path=prefix,
        ca=_content(cluster, "certificate-authority", path, root),
        ca_from=str(path),
        server_name=str(cluster.get("tls-server-name") or ""),
        token=_token(token, path) if token else "",
        identity=identity,
        credentials_from=str(path),
    )


def _current(path: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the user's name, the cluster and the user of the current context."""
    try:
        config = parse(_file(path))
        context = _entry(config, "context", str(config["current-context"]))
        user = str(context["user"])
        return user, _entry(config, "cluster", str(context["cluster"])), _entry(config, "user", user)
    except NotUnderstood as error:
        raise NotReadable(f"{path} is not understood: {error}") from None
    except (KeyError, TypeError):
        raise NotReadable(f"{path}: its current context does not name a cluster and a user") from None


def _entry(config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    """Return the *kind* with that *name*; raise an error of lookups where there is none."""
    for entry in config[f"{kind}s"]:
        if entry["name"] == name and isinstance(entry[kind], dict):
            return dict(entry[kind])
    raise KeyError(name)


def _server(path: Path, cluster: Mapping[str, Any]) -> tuple[str, int, str]:
    """Return host, port and path of the address of a cluster's API server."""
    if cluster.get("insecure-skip-tls-verify") in {"true", True}:
        raise NotReadable(f"{path} does not verify its server (insecure-skip-tls-verify): give the cluster its certificate-authority")
    try:
        address = urlsplit(str(cluster.get("server") or ""))
        host, port = address.hostname or "", address.port or 443
    except ValueError:
        raise NotReadable(f"{path}: the address of its server is none") from None
    if address.scheme != "https" or not host:
        raise NotReadable(f"{path}: its server has to be an https:// address")
    return host, port, address.path.rstrip("/")


def _content(table: Mapping[str, Any], name: str, path: Path, root: Path) -> str:
    """Return the text that `NAME-data` holds in base64, or that the file NAME has, relative to the kubeconfig; empty without either."""
    if data := table.get(f"{name}-data"):
        try:
            return base64.b64decode(str(data), validate=True).decode()
        except ValueError:
            raise NotReadable(f"{path}: its {name}-data is no text in base64") from None
    found = str(table.get(name) or "")
    return _file(root / found.lstrip("/") if found.startswith("/") else path.parent / found) if found else ""


def _token(text: str, path: Path) -> str:
    """Return the token in *text*; it is part of no message."""
    if not _TOKEN.fullmatch(text.strip()):
        raise NotReadable(f"{path} holds no token")
    return text.strip()


def _file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode()
    except OSError as error:
        raise NotReadable(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError:
        raise NotReadable(f"{path} is no text") from None
