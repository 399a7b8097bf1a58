"""Kubeconfig files, as kubectl, kubeadm and cloud providers write them, are read without a parser of YAML."""

from __future__ import annotations

import json

import pytest
import yaml

from holdfast.probe.readers.kubeconfig import NotUnderstood, parse
from tests.each import each_named

KUBEADM = """apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: LS0tLS1CRUdJTi==
    server: https://10.0.0.1:6443
  name: kubernetes
contexts:
- context:
    cluster: kubernetes
    namespace: default
    user: system:node:gpu-1
  name: system:node:gpu-1@kubernetes
current-context: system:node:gpu-1@kubernetes
kind: Config
preferences: {}
users:
- name: system:node:gpu-1
  user:
    client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem
    client-key: /var/lib/kubelet/pki/kubelet-client-current.pem
"""
EKS = """apiVersion: v1
kind: Config
clusters:
  - cluster:
      certificate-authority: /etc/kubernetes/pki/ca.crt
      server: "https://ABC.gr7.eu-west-1.eks.amazonaws.com"
    name: kubernetes
contexts:
  - context:
      cluster: kubernetes
      user: kubelet
    name: kubelet
current-context: kubelet
users:
  - name: kubelet
    user:
      exec:
        apiVersion: client.authentication.k8s.io/v1beta1
        command: aws
        args:
          - "eks"
          - get-token
        env: null
"""
BY_HAND = """# ours
---
apiVersion: v1
current-context: 'it''s mine'  # the only one
contexts:
-   name: 'it''s mine'
    context:
        cluster: "a: b"
        user: u

clusters: []
users:
-
  name: u
  user: {}
extensions:
"""


@each_named("text", {"kubeadm": KUBEADM, "eks": EKS, "by hand": BY_HAND})
def test_a_kubeconfig_is_read_as_a_parser_of_yaml_reads_it(text: str) -> None:
    """The same tables, lists and texts."""
    assert parse(text) == yaml.safe_load(text)


def test_json_is_read_too() -> None:
    """`kubectl config view -o json` writes it."""
    assert parse(json.dumps(yaml.safe_load(KUBEADM))) == yaml.safe_load(KUBEADM)


@each_named(
    "text",
    {
        "flow": "users: [{name: secret}]",
        "text block": "token: |\n  secret",
        "anchor": "a: &secret b",
        "no entry": "secret",
        "indented": "a: b\n    secret: d",
        "less": "  a: b\nsecret: d",
        "quote": "a: 'secret",
        "double quote": 'a: "secret',
        "list": "- secret",
        "json": '{"secret": ',
        "deep": "".join(f"{' ' * depth}secret:\n" for depth in range(60)) + " " * 60 + "secret: x",
        "deep json": '{"secret":' * 100_000,
        "empty": "",
    },
)
def test_what_no_program_writes_is_refused_and_not_quoted(text: str) -> None:
    """Half of it would be read wrong, and any line may hold a token."""
    with pytest.raises(NotUnderstood) as caught:
        parse(text)
    assert "secret" not in str(caught.value)
