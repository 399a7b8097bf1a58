"""A cluster of real SSH servers, and what a user needs to log in to them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.ssh import SshSweeper
from holdfast.spec import SshCluster, cluster_of
from tests.ssh.sshd import PROGRAM, Sshd, key_at


@dataclass
class Site:
    """Nodes, a key that they take, and a file that knows them."""

    place: Path
    nodes: dict[str, Sshd] = field(default_factory=dict)
    sweepers: list[SshSweeper] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.key = key_at(self.place / "id")
        self.python = self.place / "python3"
        self.python.symlink_to(sys.executable)

    @property
    def known_hosts(self) -> Path:
        """Return the file of known hosts."""
        return self.place / "known_hosts"

    def node(self, name: str, *more: str, known: bool = True) -> Sshd:
        """Start a node."""
        server = Sshd(self.place / name, f"127.0.0.{len(self.nodes) + 2}", self.key.with_suffix(".pub"), more=more)
        self.nodes[name] = server
        server.start()
        with self.known_hosts.open("a") as file:
            file.write(server.known if known else "")
        return server

    def cluster(self, **fields: Any) -> SshCluster:
        """Return the nodes as a user would describe them."""
        hosts = [{"name": name, "address": one.address, "port": one.port} for name, one in self.nodes.items()]
        given = {"kind": "ssh", "hosts": hosts, "key": str(self.key), "known_hosts": str(self.known_hosts), "python": str(self.python)}
        made = cluster_of({**given, **fields})
        assert isinstance(made, SshCluster)
        return made

    def sweeper(self, *, keep: bool = True, **fields: Any) -> SshSweeper:
        """Return a sweeper of the nodes that does not wait between rounds."""
        made = SshSweeper(self.cluster(**fields), keep=keep, pause=0.0)
        self.sweepers.append(made)
        return made

    def close(self) -> None:
        """End everything."""
        for sweeper in self.sweepers:
            sweeper.close()
        for node in self.nodes.values():
            node.stop()


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Give an empty site; end all its servers at last. The user of the tests has neither keys nor an SSH agent of their own."""
    if PROGRAM is None:
        pytest.skip("needs sshd (openssh-server)")
    place = tmp_path_factory.mktemp("site")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    made = Site(place)
    yield made
    made.close()
