"""``python -m holdfast.agent.monitor DESCRIPTOR NODE KERNEL_LOG ROOT``: started by the agent, ends with it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from holdfast.agent.monitor.loop import MonitorLoop
from holdfast.host.process import survive_sigterm
from holdfast.log import set_up


def main(arguments: list[str]) -> None:
    """Monitor the node until the agent exits."""
    descriptor, node, kernel_log, root = arguments
    survive_sigterm()
    set_up()
    with socket.socket(fileno=int(descriptor)) as agent:
        agent.set_inheritable(False)
        try:
            MonitorLoop(agent, node, Path(kernel_log), Path(root)).run()
        except (EOFError, ConnectionError):
            return


if __name__ == "__main__":
    main(sys.argv[1:])
