"""Simulated nodes: one process that speaks SSH on as many addresses of this machine as are asked for, and returns recorded readings.

    python -m benchmarks.ssh_nodes FOLDER COUNT

Each node has an address of its own (127.10.x.y) and a host key of its own; each login is a whole key exchange and a check of a signature. A
command gets what a real shell would hand to `python3`, the collector's program, and answers questions with the recorded look after a delay
drawn anew for each (log-normal, median 0.3 s). FOLDER has `authorized` and `look.json`; `known_hosts` is written there when all listen.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from pathlib import Path
from typing import Any, Final

import asyncssh

PORT: Final = 22022
MEDIAN, SPREAD = 0.3, 0.25
"""Seconds that a look takes a node, and the spread of their logarithm."""


def address(number: int) -> str:
    """Return the address of a simulated node."""
    return f"127.10.{number // 250}.{number % 250 + 1}"


async def answer(process: asyncssh.SSHServerProcess[bytes], look: str) -> None:
    """Take the collector's program, then answer questions until there are none."""
    size = int(await process.stdin.readline())
    await process.stdin.readexactly(size)
    while question := await process.stdin.readline():
        asked = json.loads(question)
        await asyncio.sleep(random.lognormvariate(math.log(MEDIAN), SPREAD))
        process.stdout.write(f"{asked['mark']} {look}\n".encode())
    process.exit(0)


async def serve(folder: Path, count: int) -> None:
    """Listen on *count* addresses until the input ends."""
    look = (folder / "look.json").read_text()
    known = []

    async def answered(process: asyncssh.SSHServerProcess[bytes]) -> None:
        try:
            await answer(process, look)
        except (asyncssh.Error, asyncio.IncompleteReadError, BrokenPipeError, ConnectionError):
            process.close()

    for number in range(count):
        key = asyncssh.generate_private_key("ssh-ed25519")
        options: dict[str, Any] = {"server_host_keys": [key], "authorized_client_keys": str(folder / "authorized"), "encoding": None}
        await asyncssh.listen(address(number), PORT, process_factory=answered, **options)
        known.append(f"[{address(number)}]:{PORT} {key.export_public_key().decode().strip()}\n")
    (folder / "known_hosts.part").write_text("".join(known))
    (folder / "known_hosts.part").rename(folder / "known_hosts")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
