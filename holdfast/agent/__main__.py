"""``python -m holdfast.agent``: start a node's agent under its guardian."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from holdfast.agent.guardian import guard
from holdfast.agent.service import Service
from holdfast.process import sweep
from holdfast.wire import encode


def main() -> int:
    """Parse the command line, take leftovers of an earlier agent away, and serve."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.agent", description="Run a node's agent: it starts and watches workers.")
    parser.add_argument("--directory", type=Path, required=True, help="the node's own folder (socket, journal, logs)")
    parser.add_argument("--node", required=True, help="the node's name")
    parser.add_argument("--cluster", default="local", help="the cluster's name")
    parser.add_argument("--ready-fd", type=int, help="descriptor that gets one line of JSON once the agent listens")
    parser.add_argument("--detach", action="store_true", help="leave the caller's session at once and outlive it")
    args = parser.parse_args()
    try:
        args.directory.mkdir(parents=True, exist_ok=True)
        os.chmod(args.directory, 0o700)
    except OSError as error:
        _refuse(args.ready_fd, f"{args.directory} cannot be made: {error.strerror}")
        return 2
    os.environ.pop("HOLDFAST_NODE_MARK", None)
    sweep("HOLDFAST_NODE_MARK", str(args.directory))
    os.environ["HOLDFAST_NODE_MARK"] = str(args.directory)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)

    if args.detach and os.fork():
        os._exit(0)
    if args.detach:
        os.setsid()

    def serve() -> int:
        return Service(args.directory, args.node, args.cluster).run(args.ready_fd)

    return guard(serve)


def _refuse(ready: int | None, why: str) -> None:
    print(f"holdfast agent: {why}", file=sys.stderr)
    if ready is not None:
        os.write(ready, encode({"ready": False, "why": why}))


if __name__ == "__main__":
    sys.exit(main())
