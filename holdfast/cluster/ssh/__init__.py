"""Nodes that one can log in to: strict host keys, jump hosts, deadlines that hold, and looks that cost a node little."""

from __future__ import annotations

from holdfast.cluster.ssh.burn_in import SshBurnInConnections
from holdfast.cluster.ssh.sweeper import SshSweeper

__all__ = ["SshBurnInConnections", "SshSweeper"]
