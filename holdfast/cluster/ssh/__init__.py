"""Nodes reached over SSH by paramiko: strict host keys, jump hosts, deadlines that hold, sweeps over open connections.

Here: everything about an SSH connection. Not here: the programs that run on a node (`holdfast.probe`, `holdfast.agent`).
"""

from __future__ import annotations

from holdfast.cluster.ssh.burn_in import SshBurnInConnections
from holdfast.cluster.ssh.sweeper import SshSweeper

__all__ = ["SshBurnInConnections", "SshSweeper"]
