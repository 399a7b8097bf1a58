"""A real Slurm of our own: munged, slurmctld and a few slurmd on this machine, in a temporary folder and on free ports."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from holdfast.host.ports import free_port
from holdfast.host.process import is_alive, kill, marked, parent_of
from tests.waiting import wait_until

MISSING: Final = "Slurm is not installed: scripts/system_packages.sh installs it (Debian's packages `slurmctld slurmd munge` and others)"
PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "srun")

CONF: Final = """\
ClusterName=holdfast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={silence}
InactiveLimit=0
KillWait=2
MinJobAge=300
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0,bf_interval=2
PropagateResourceLimits=NONE
TaskProlog={folder}/prolog
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=2 PreemptMode=OFF
"""


def is_installed() -> bool:
    """Return whether all programs are there."""
    return all(shutil.which(program, path=_PATH) for program in PROGRAMS)


_PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class SlurmServer:
    """One cluster of small nodes, `n1` and so on."""

    def __init__(self, count: int = 4, *, silence: int = 10, gpus: Sequence[int] = ()) -> None:
        """Prepare *count* nodes; *gpus* are the numbers of GPUs that Slurm believes in, on the first ones."""
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-slurm-"))  # short: a socket's path has 107 characters at most
        tag = secrets.token_hex(2)  # several may run beside one another, and a node's processes are found by its name
        self.names = [f"n{tag}-{number}" for number in range(1, count + 1)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._write(silence, [*gpus, *[0] * count][:count])

    def _write(self, silence: int, gpus: Sequence[int]) -> None:
        host, user = os.uname().nodename.partition(".")[0], "root" if os.geteuid() == 0 else os.environ.get("USER", "nobody")
        place = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 Feature=small"
        of_nodes = list(zip(self.names, gpus, strict=True))
        nodes = "\n".join(
            f"NodeName={name} {place} Port={free_port()}{f' Gres=gpu:{number}' if number else ''}" for name, number in of_nodes
        )
        if any(gpus):
            nodes = f"GresTypes=gpu\n{nodes}"
            rows = [f"NodeName={name} Name=gpu File={self.folder}/gpu-{name}-[0-{number - 1}]" for name, number in of_nodes if number]
            (self.folder / "gres.conf").write_text("\n".join([*rows, ""]))
            for name, number in of_nodes:
                for index in range(number):
                    (self.folder / f"gpu-{name}-{index}").symlink_to("/dev/null")  # a device, as Slurm demands
        text = CONF.format(host=host, port=free_port(), user=user, folder=self.folder, silence=silence, nodes=nodes)
        self.folder.chmod(0o755)  # commands of other users read it
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "prolog").write_text(f'#!/bin/sh\ncat "{self.folder}/exports-$SLURMD_NODENAME" 2>/dev/null\nexit 0\n')
        (self.folder / "prolog").chmod(0o755)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for name in ("state", *(f"spool-{name}" for name in self.names)):
            (self.folder / name).mkdir()

    @property
    def environment(self) -> dict[str, str]:
        """Return what makes Slurm's commands talk to this one."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start all, and wait until every node is idle."""
        f = self.folder
        files = [f"--{what}={f}/munge.{end}" for what, end in (("log-file", "log"), ("pid-file", "pid"), ("seed-file", "seed"))]
        self._start("munged", "munged", "--foreground", "--force", f"--key-file={f}/munge.key", f"--socket={f}/munge.socket", *files)
        wait_until((f / "munge.socket").exists, seconds=60, explain=self.logs)
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for name in self.names:
            self.start_node(name, wait=False)
        for name in self.names:
            wait_until(lambda name=name: self.state(name) == "idle", seconds=60, explain=self.logs)  # type: ignore[misc]

    def _start(self, name: str, *argv: str) -> None:
        path = shutil.which(argv[0], path=_PATH)
        assert path is not None, MISSING
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "HOLDFAST"))}
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [path, *argv[1:]], env=bare | self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def start_node(self, name: str, *, wait: bool = True) -> None:
        """Start the daemon of a node."""
        self._start(name, "slurmd", "-D", "-N", name)
        if wait:
            wait_until(lambda: self.state(name).startswith(("idle", "alloc", "drain", "mix")), seconds=60, explain=self.logs)

    @contextmanager
    def exports(self, name: str, variable: str, value: str) -> Iterator[None]:
        """Set a variable for every task on a node, as an administrator's prolog does."""
        file = self.folder / f"exports-{name}"
        file.write_text(f"export {variable}={value}\n")
        yield
        file.unlink()

    def kill_node(self, name: str) -> None:
        """Remove a node, as a power cut would: its daemon, and everything that runs under it."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()
        self._kill_steps(name)

    @staticmethod
    def _kill_steps(name: str) -> None:
        """Kill what runs on a node, and the daemons of the steps that it belongs to."""
        while pids := list(marked("SLURMD_NODENAME", name)):
            steps = {parent for pid in pids if (parent := parent_of(pid)) and _is_step(parent)}
            for pid in (*steps, *pids):
                kill(pid, signal.SIGKILL)
            wait_until(lambda pids=pids: not any(is_alive(pid, None) for pid in pids), seconds=60)  # type: ignore[misc]

    def mend(self) -> None:
        """Have all nodes back, undrained and idle."""
        self.run("scancel", "--quiet", "--partition=train")
        for name in self.names:
            if name not in self._daemons:
                self.start_node(name, wait=False)
        wait_until(lambda: all(self._is_idle(name) for name in self.names), seconds=60, explain=self.logs)

    def _is_idle(self, name: str) -> bool:
        state = self.state(name)
        if state.startswith(("drain", "down")):
            subprocess.run(["scontrol", "update", f"nodename={name}", "state=resume"], env=os.environ | self.environment, check=False)
        return state == "idle"

    def run(self, *argv: str) -> str:
        """Return what a command of Slurm's says."""
        done = subprocess.run(argv, env=os.environ | self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def state(self, name: str) -> str:
        """Return a node's state in a word, or nothing while Slurm does not report it."""
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "train", "-n", name, "-o", "%T"],
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def remove(self) -> None:
        """End everything, and remove the folder."""
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        for name in self.names:
            self._kill_steps(name)
        for pid in self._stay():
            kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _stay(self) -> Iterator[int]:
        """Yield the processes with open files in the folder: daemons of steps that go on trying to report their end to the controller."""
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                if place.name != str(os.getpid()) and any(file.readlink().is_relative_to(self.folder) for file in (place / "fd").iterdir()):
                    yield int(place.name)


def _is_step(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"slurmstepd")
    return False
