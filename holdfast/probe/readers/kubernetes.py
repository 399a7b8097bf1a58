"""Read what a Kubernetes cluster has of this node: its conditions, events, whether it is cordoned, and the labels of repair services.

Each reading is one `GET` of the node, which the API server answers from its cache, and one list of the node's events. Credentials are read
anew each time: tokens rotate.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from holdfast.detectors.evidence import NOT_REQUESTED, Unknown
from holdfast.detectors.nodes.readings import KubernetesReading, NodeCondition, NodeEvent
from holdfast.probe.readers.kubernetes_access import NODE_NAME, Access, NotReadable, environment_of, find_access

LABELS: Final = frozenset({
    "sagemaker.amazonaws.com/node-health-status", "sagemaker.amazonaws.com/deep-health-check-status", "sagemaker.amazonaws.com/fault-type",
    "sagemaker.amazonaws.com/fault-reason", "dgxc.nvidia.com/nvsentinel-state",
})  # fmt: skip
"""Labels in which SageMaker HyperPod and NVSentinel write what they do with a node."""
TIMEOUT: Final = 2.0
"""Seconds that a request may take: a check of the node waits for it, and an API server answers in milliseconds."""
MAX_BYTES: Final = 4 << 20
"""Bytes of an answer: an object in a cluster has less than 2 MiB."""
MAX_ITEMS: Final = 128
"""Conditions, taints, and events, that are kept."""
MAX_LISTED: Final = 500
"""Events that are asked for, as `kubectl` does: a reporter may write some 30 an hour of one node, and an hour later they are gone."""
RECENT: Final = 3600.0
"""Seconds since an event was reported last, after which it is not read: as long as the API server keeps one by default."""
NAMESPACE: Final = "default"
"""Namespace of the events of objects that are in none, as nodes are."""
NORMAL: Final = "Normal"
MAX_TEXT: Final = 4096
"""Letters that are kept of a message."""
RULE: Final = '{apiGroups: [""], resources: [nodes], verbs: [get]}'
EVENTS_RULE: Final = '{apiGroups: [""], resources: [events], verbs: [list]}'


def read_kubernetes(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> KubernetesReading | Unknown:
    """Return what the API server has of this node; `NOT_REQUESTED` where there are no credentials to ask with."""
    try:
        access = find_access(root, environment_of(root) if environment is None else environment)
        return NOT_REQUESTED if access is None else _ask(access)
    except NotReadable as error:
        return Unknown(error.why)


# -- the request -------------------------------------------------------------------------------------------------------


def _ask(access: Access) -> KubernetesReading:
    """Return what the API server answers; raise `NotReadable`."""
    status, body = _get(access, f"{access.path}/api/v1/nodes/{quote(access.node, safe='')}?resourceVersion=0")
    if status == http.client.UNAUTHORIZED:
        raise NotReadable(f"{access.url} refuses the credentials in {access.credentials_from} (401): have they expired, or been revoked?")
    if status == http.client.FORBIDDEN:
        raise NotReadable(
            f"{access.url} forbids to read this node with the credentials in {access.credentials_from} (403): bind their account to a "
            f"ClusterRole with the rule {RULE}"
        )
    if status == http.client.NOT_FOUND:
        raise NotReadable(
            f"{access.url} has no node of the name that {access.named_by} gives (404): set {NODE_NAME} to that of `kubectl get nodes`"
        )
    if status != http.client.OK:
        raise NotReadable(f"{access.url} answered with status {status}")
    try:
        reading = _reading(json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotReadable(f"{access.url} did not answer with a Node: is it the API server of a Kubernetes cluster?") from None
    try:
        return replace(reading, events=_ask_events(access))
    except NotReadable as error:
        return replace(reading, events=Unknown(error.why))  # the node itself is read


def _ask_events(access: Access) -> tuple[NodeEvent, ...]:
    """Return the recent events of the node that are not normal, oldest first; raise `NotReadable`."""
    selected = f"involvedObject.kind=Node,involvedObject.name={access.node},type!={NORMAL}"
    query = urlencode({"fieldSelector": selected, "limit": MAX_LISTED, "resourceVersion": 0})
    status, body = _get(access, f"{access.path}/api/v1/namespaces/{NAMESPACE}/events?{query}")
    if status == http.client.FORBIDDEN:
        raise NotReadable(
            f"{access.url} forbids to list the events of this node with the credentials in {access.credentials_from} (403): bind their "
            f"account to a Role of the namespace {NAMESPACE} with the rule {EVENTS_RULE}"
        )
    if status != http.client.OK:
        raise NotReadable(f"{access.url} answered with status {status}, asked for the events of this node")
    try:
        events = [_event(one) for one in json.loads(body)["items"] or []]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotReadable(f"{access.url} did not answer with a list of events") from None
    since = time.time() - RECENT
    recent = [one for one in events if one.type != NORMAL and one.last is not None and one.last >= since]
    return tuple(sorted(recent, key=lambda one: one.last or 0.0)[-MAX_ITEMS:])


def _get(access: Access, path: str) -> tuple[int, bytes]:
    """Return the status and the body of an answer; the body is read only where it holds a node."""
    until = time.monotonic() + TIMEOUT
    headers = {"Accept": "application/json", "User-Agent": "holdfast"}
    if access.token:
        headers["Authorization"] = f"Bearer {access.token}"
    try:
        with (
            socket.create_connection((access.host, access.port), timeout=TIMEOUT) as plain,
            _tls(access).wrap_socket(plain, server_hostname=access.server_name or access.host) as secured,
        ):
            connection = http.client.HTTPConnection(access.host, access.port)
            connection.sock = secured
            connection.request("GET", path, headers=headers)
            answer, body = connection.getresponse(), bytearray()
            while answer.status == http.client.OK and (more := answer.read1(1 << 16)):
                body += more
                if len(body) > MAX_BYTES:
                    raise NotReadable(f"{access.url} answered with more than {MAX_BYTES >> 20} MiB")
                if time.monotonic() > until:
                    raise TimeoutError("its answer does not end")
            if answer.status == http.client.OK and answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
            return answer.status, bytes(body)
    except ssl.SSLCertVerificationError as error:
        raise NotReadable(
            f"{access.url} is not trusted: {error.verify_message}. Is the authority in {access.ca_from} that of the cluster?"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise NotReadable(f"{access.url} does not answer: {reason[:160]}") from error


def _tls(access: Access) -> ssl.SSLContext:
    """Return a context that verifies the server, by the cluster's authority alone where that is given.

    It is made without `create_default_context`, whose strict flags refuse the authorities that older clusters have.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if access.ca:
            context.load_verify_locations(cadata=access.ca)
        else:
            context.load_default_certs()
    except (ssl.SSLError, ValueError) as error:
        raise NotReadable(f"{access.ca_from} holds no certificate of an authority") from error
    if access.identity:
        descriptor = os.memfd_create("identity")  # a key is not written to a disk
        try:
            os.write(descriptor, access.identity.encode())
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        except (ssl.SSLError, ValueError) as error:
            raise NotReadable(f"{access.credentials_from} holds no certificate with its key") from error
        finally:
            os.close(descriptor)
    return context


# -- the answer --------------------------------------------------------------------------------------------------------


def _reading(node: Any) -> KubernetesReading:  # noqa: ANN401 (any JSON)
    """Return the reading in a Node object; raise an error of lookups and types where it is none."""
    if node["kind"] != "Node":
        raise ValueError(node["kind"])
    spec, labels = node.get("spec") or {}, node["metadata"].get("labels") or {}
    conditions = (node.get("status") or {}).get("conditions") or []
    return KubernetesReading(
        conditions=tuple(_condition(one) for one in conditions[:MAX_ITEMS]),
        unschedulable=spec.get("unschedulable") is True,
        taints=tuple(_taint(one) for one in (spec.get("taints") or [])[:MAX_ITEMS]),
        labels={name: _text(value) for name, value in labels.items() if name in LABELS},
    )


def _condition(found: Any) -> NodeCondition:  # noqa: ANN401 (any JSON)
    return NodeCondition(
        type=_text(found["type"]),
        status=_text(found["status"]),
        reason=_text(found.get("reason") or ""),
        message=_text(found.get("message") or ""),
        since=_seconds(found.get("lastTransitionTime")),
    )


def _event(found: Any) -> NodeEvent:  # noqa: ANN401 (any JSON)
    """Return an event; one that was reported again says so in `series`, or, written the older way, in `count` and `lastTimestamp`."""
    series, source = found.get("series") or {}, found.get("source") or {}
    times = (series.get("lastObservedTime"), found.get("lastTimestamp"), found.get("eventTime"), found["metadata"].get("creationTimestamp"))
    return NodeEvent(
        type=_text(found.get("type") or ""),
        reason=_text(found.get("reason") or ""),
        source=_text(source.get("component") or found.get("reportingComponent") or ""),
        message=_text(found.get("message") or ""),
        count=max(1, *(int(one) for one in (series.get("count"), found.get("count")) if one is not None), 1),
        last=next((at for one in times if one and (at := _seconds(one)) is not None), None),
    )


def _taint(found: Any) -> str:  # noqa: ANN401 (any JSON)
    value = found.get("value")
    return _text(f"{found['key']}{f'={value}' if value else ''}:{found['effect']}")


def _text(value: Any) -> str:  # noqa: ANN401 (any JSON)
    """Return *value* as one line; raise ``TypeError`` where it is no text."""
    if not isinstance(value, str):
        raise TypeError(value)
    return " ".join(value[:MAX_TEXT].split())


def _seconds(value: Any) -> float | None:  # noqa: ANN401 (any JSON)
    """Return a time of the API as seconds since 1970; None for what is none."""
    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp()  # noqa: FURB162 (Python 3.10 takes no Z)
    except (ValueError, OverflowError):
        return None
