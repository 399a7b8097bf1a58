"""``python -m holdfast.agent``: start a node's agent under its subreaper."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import Final

from holdfast.agent.monitor.kernel_log import KERNEL_LOG
from holdfast.agent.node.identity import Identity, take_node
from holdfast.agent.server import AgentServer
from holdfast.agent.workers.subreaper import guard
from holdfast.host.process import AGENT_MARK, NODE_MARK, mark_of, marked, reset_signals, sweep
from holdfast.log import set_up
from holdfast.probe.readers.kernel import ELSEWHERE
from holdfast.protocol import encode

ROOT: Final = "HOLDFAST_NODE_ROOT"
"""Variable with the folder that has the node's /proc and /sys, where that is not the root."""


def main() -> int:
    """Lock the node, end what an earlier agent left there, and serve."""
    args = _arguments()
    mark = mark_of(args.directory)
    if os.environ.get(NODE_MARK) != mark:  # others read the environment that a program began with: begin again with the mark in it
        os.environ[NODE_MARK] = mark
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 (this very program)
    reset_signals()
    me = Identity(directory=args.directory, node=args.node, cluster=args.cluster, id=secrets.token_hex(6))
    try:
        _take_over(me.directory, mark)
    except OSError as error:
        return _refuse(args.ready_fd, error)
    if args.detach and os.fork():
        os._exit(0)
    if args.detach:
        os.setsid()
    os.environ.update({NODE_MARK: mark, AGENT_MARK: me.id})
    set_up()

    def serve() -> int:
        try:
            service = AgentServer(me, kernel_log=args.kernel_log, root=args.root)
        except OSError as error:
            return _refuse(args.ready_fd, error)
        return service.run(args.ready_fd)

    return guard(serve, me.id)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m holdfast.agent", description="Run a node's agent: it starts and monitors workers.")
    parser.add_argument("--directory", type=Path, required=True, help="the node's own folder (socket, event log, logs)")
    parser.add_argument("--node", required=True, help="the node's name")
    parser.add_argument("--cluster", default="local", help="the cluster's name")
    parser.add_argument("--ready-fd", type=int, help="descriptor that gets one line of JSON once the agent listens")
    parser.add_argument("--detach", action="store_true", help="leave the caller's session at once and outlive it")
    kernel_log = Path(os.environ.get(ELSEWHERE) or KERNEL_LOG)
    parser.add_argument("--kernel-log", type=Path, default=kernel_log, help="where the kernel logs faults and out-of-memory kills")
    root = Path(os.environ.get(ROOT) or "/")
    parser.add_argument("--root", type=Path, default=root, help="the folder with the node's /proc and /sys, where that is not /")
    args = parser.parse_args()
    args.kernel_log = Path(str(args.kernel_log).replace("{node}", args.node))  # nodes that share a machine, each with a log of its own
    args.root = Path(str(args.root).replace("{node}", args.node))
    args.directory = args.directory.absolute()
    return args


def _take_over(directory: Path, mark: str) -> None:
    """Make the node's folder, lock it, and end what an earlier agent left; raise ``OSError`` when one of these fails."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    take_node(directory)
    killed = sweep(NODE_MARK, mark, spare=_is_agent)
    remaining = killed and [pid for pid in marked(NODE_MARK, mark) if not _is_agent(pid)]
    if remaining:
        raise OSError(f"processes of an earlier agent cannot be ended: {', '.join(map(str, remaining))}")


def _is_agent(pid: int) -> bool:
    """Return whether *pid* is another agent of this node: as this one has the lock, that one waits to be refused."""
    try:
        return b"holdfast.agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _refuse(ready: int | None, why: OSError) -> int:
    print(f"holdfast agent: {why}", file=sys.stderr)
    if ready is not None:
        os.write(ready, encode({"ready": False, "why": str(why)}))
    return 2


if __name__ == "__main__":
    sys.exit(main())
