"""Keep a server running for as long as a process has a shared lock on a file: `tests.shared` starts this, in the background.

python -m tests.kept_running USERS PID COMMAND...: locks end with their processes, so the server ends after the last user, however that
one ends. A server that dies is started again, unless it dies as soon as it is started. The file PID is removed at the end.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

STARTS: Final = 3
"""How often in a row a server is started that does not last."""
LASTING_SECONDS: Final = 20.0
"""A server that has run for so long had started."""


def main(users: Path, pid: Path, command: Sequence[str]) -> None:
    """Run *command* until nobody has a lock on *users*."""
    unused, server, starts = threading.Event(), [0], 0

    def end_when_unused() -> None:
        with users.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # kept until this process has ended: a new user waits for that
            unused.set()
            while True:  # also one that is being started just now
                if number := server[0]:
                    with suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
                time.sleep(0.05)

    threading.Thread(target=end_when_unused, daemon=True).start()
    while starts < STARTS and not unused.is_set():
        begin = time.monotonic()
        with subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command]) as child:
            server[0] = child.pid
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its number is nobody else's before it is forgotten here
            server[0] = 0
        starts = 0 if time.monotonic() - begin > LASTING_SECONDS else starts + 1
        if not unused.is_set():
            sys.stderr.write(f"tests.kept_running: the server ended with status {child.returncode}\n")
    pid.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
