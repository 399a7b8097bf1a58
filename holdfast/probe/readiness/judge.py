"""From what nodes told of themselves to what is missing, and the cure. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from holdfast.probe.readiness.accelerators import gpus_work, torch_fits
from holdfast.probe.readiness.baseline import Baseline, minor
from holdfast.probe.readiness.finding import Facts, Found, ReadinessFinding, ReadinessState, blind

MB, GB = 10**6, 10**9
DISK_LEAST, DISK_ENOUGH = 50 * MB, 1 * GB
SHM_LEAST: Final = 65 * MB
"""What a container is given that was not given more."""
SHM_SHARE: Final = 0.1
FILES_LEAST, FILES_ENOUGH = 1024, 4096
TASKS_LEAST, TASKS_ENOUGH = 512, 4096
CLOCK_ENOUGH, CLOCK_WRONG = 0.5, 10.0
"""Seconds that two clocks may be apart before times of faults can hardly be compared, and before they are nonsense."""
MEMORY: Final = "/dev/shm"  # noqa: S108 (the file system in memory itself)
UNLIMITED: Final = -1
ONE_USER: Final = (
    "Mount it for writing, and have the same user (by number: `id -u`) log in on all nodes: each writes its part of a save there"
)
BOOTSTRAP: Final = "`holdfast nodes bootstrap CLUSTER_FILE` puts it there"


def judge(facts: Sequence[Facts], *, gpus: Mapping[str, int] | None = None, snapshots: bool = False) -> list[ReadinessFinding]:
    """Return what is to be said of each node, check by check, in the order of *facts*; *gpus* are what the cluster file says each has."""
    usual = Baseline(facts, gpus or {})
    found = []
    for one in facts:
        if one.away:
            found.append(ReadinessFinding(node=one.node, check="login", state=ReadinessState.MISSING, words=one.away, cure=one.cure))
            continue
        checks: list[tuple[str, Found]] = [(name, check(one, usual)) for name, check in CHECKS.items()]
        checks.append(("memory", _memory(one, snapshots=snapshots)))
        found += [
            ReadinessFinding(node=one.node, check=name, state=state, words=words, cure=cure)
            for name, each in checks
            for state, words, cure in each
        ]
    return found


def _python(one: Facts, usual: Baseline) -> Found:
    if why := blind(one.probe):
        yield ReadinessState.UNSEEN, why, ""
        return
    assert one.probe is not None
    version = str(one.probe["python"])
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 11):
        yield ReadinessState.MISSING, f"Python {version}, jobs need 3.11 or newer", "Name a newer one in `python` of the cluster file"
    elif minor(version) != usual.python:
        yield ReadinessState.DOUBTFUL, f"Python {version}, most nodes have {usual.python}", "Have one version on all nodes"
    else:
        yield ReadinessState.OK, f"Python {version}", ""


def _holdfast(one: Facts, _usual: Baseline) -> Found:
    if why := blind(one.environment):
        yield ReadinessState.UNSEEN, why, ""
        return
    assert one.environment is not None
    environment = one.environment
    if "failed" in environment:
        yield ReadinessState.MISSING, str(environment["failed"]), "Name another interpreter in `python` of the cluster file"
    elif not environment["in_use"]:
        yield ReadinessState.MISSING, f"there is no Holdfast in {environment['path']}", BOOTSTRAP
    elif not environment["whole"]:
        words = f"its Holdfast ({environment['in_use']}) is damaged, another version's, or made for another interpreter"
        yield ReadinessState.MISSING, words, BOOTSTRAP.replace("puts it", "puts this one")
    elif why := blind(one.node_proxy):
        yield ReadinessState.MISSING, f"its gate does not answer: {why}", ""
    else:
        yield ReadinessState.OK, f"Holdfast {str(environment['in_use']).split('-')[0]}", ""


def _clock(one: Facts, _usual: Baseline) -> Found:
    if one.clock is None:
        yield ReadinessState.UNSEEN, "it did not tell the time", ""
        return
    off, doubt = one.clock
    apart = max(0.0, abs(off) - doubt)
    words = f"its clock is {abs(off):.3f} s {'ahead of' if off > 0 else 'behind'} this machine's (to {doubt:.3f} s)"
    cure = "Keep it in step: `chronyc makestep`, or `timedatectl set-ntp true`; or mend this machine's"
    state = ReadinessState.OK if apart <= CLOCK_ENOUGH else ReadinessState.DOUBTFUL if apart <= CLOCK_WRONG else ReadinessState.MISSING
    yield state, words, "" if state is ReadinessState.OK else cure


def _disk(one: Facts, _usual: Baseline) -> Found:
    if why := blind(one.probe):
        yield ReadinessState.UNSEEN, why, ""
        return
    disk = (one.probe or {})["disk"]
    words = f"{_size(disk['free'])} free in {disk['path']}"
    if not disk["writable"]:
        yield (
            ReadinessState.MISSING,
            f"{disk['path']} cannot be written",
            "Mend its permissions, or name another `directory` in the cluster file",
        )
    elif disk["free"] < DISK_ENOUGH:
        state = ReadinessState.MISSING if disk["free"] < DISK_LEAST else ReadinessState.DOUBTFUL
        yield state, words, "Free some, or name another `directory` in the cluster file"
    else:
        yield ReadinessState.OK, words, ""


def _memory(one: Facts, *, snapshots: bool) -> Found:
    if why := blind(one.probe):
        yield ReadinessState.UNSEEN, why, ""
        return
    shm = (one.probe or {})["shm"]
    worst = ReadinessState.MISSING if snapshots else ReadinessState.DOUBTFUL
    if shm is None:
        yield worst, f"{MEMORY} is no file system in memory: snapshots have no place", "Mount a tmpfs there"
    elif shm["total"] < SHM_LEAST:
        cure = f"Give the container more (`--shm-size`), or `mount -o remount,size=50% {MEMORY}`"
        yield worst, f"{MEMORY} has {_size(shm['total'])}: snapshots need the size of a rank's state several times", cure
    elif shm["free"] < SHM_SHARE * shm["total"]:
        yield (
            ReadinessState.DOUBTFUL,
            f"{_size(shm['free'])} free of {_size(shm['total'])} in {MEMORY}",
            f"See `ls -l {MEMORY}`, and remove what nobody uses",
        )
    else:
        yield ReadinessState.OK, f"{_size(shm['free'])} free in {MEMORY}", ""


def _limits(one: Facts, _usual: Baseline) -> Found:
    if why := blind(one.probe):
        yield ReadinessState.UNSEEN, why, ""
        return
    probe = one.probe or {}
    wrong = [*_least("nofile", probe, FILES_LEAST, FILES_ENOUGH), *_least("nproc", probe, TASKS_LEAST, TASKS_ENOUGH)]
    soft = probe["limits"]["memlock"][0]
    if probe["infiniband"] and soft != UNLIMITED:
        wrong.append((ReadinessState.DOUBTFUL, f"memlock is {_size(soft)}: InfiniBand needs it unlimited", _limit("memlock", "unlimited")))
    yield from wrong or [(ReadinessState.OK, f"nofile {_count(probe['limits']['nofile'][0])}", "")]


def _least(name: str, probe: Mapping[str, Any], least: int, enough: int) -> Found:
    soft = probe["limits"][name][0]
    if soft != UNLIMITED and soft < enough:
        state = ReadinessState.MISSING if soft < least else ReadinessState.DOUBTFUL
        yield state, f"{name} is {soft}, a job wants {enough}", _limit(name, str(enough))


def _limit(name: str, value: str) -> str:
    return f"Set `* - {name} {value}` in /etc/security/limits.conf there (and `UsePAM yes` for its sshd), or raise that of its sshd"


def _interface(one: Facts, _usual: Baseline) -> Found:
    if one.node_proxy is None or blind(one.node_proxy):
        yield ReadinessState.UNSEEN, "it can be looked at once Holdfast runs there", ""
        return
    name, address = one.node_proxy["interface"], one.node_proxy["address"]
    if name is None:
        cure = "Name one in `interface` of the cluster file: its name, or its network"
        yield ReadinessState.DOUBTFUL, f"no interface of it has the address {address} by which it is reached", cure
    else:
        yield ReadinessState.OK, f"{name} {address}", ""


def _links(one: Facts, _usual: Baseline) -> Found:
    link = one.link
    if link is None:
        return
    if "why" in link:
        cure = "Let nodes connect to each other on all TCP ports in their own network: workers listen on free ones"
        yield ReadinessState.MISSING, f"no way to {link['to']} ({link['address']}): {link['why']}", cure
    else:
        yield ReadinessState.OK, f"{_size(int(link['rate']))}/s to {link['to']}", ""


def _paths(one: Facts, _usual: Baseline) -> Found:
    if not one.paths:
        return
    if why := blind(one.paths):
        yield ReadinessState.MISSING, f"the job's files could not be looked for: {why}", "Mend the file system that they are on"
        return
    missing = [path for path, there in one.paths.items() if not there]
    if missing:
        yield ReadinessState.MISSING, f"it does not have {', '.join(missing)}", "Put it there, or mount what it lies on at the same path"
    else:
        yield ReadinessState.OK, "the job's files are there", ""


def _shared(one: Facts, _usual: Baseline) -> Found:
    if one.shared is None:
        return
    told, cure = one.shared, "Mount one file system there on all nodes, or name another folder in `checkpoint.directory` of the job"
    if why := blind(told):
        yield (
            ReadinessState.MISSING,
            f"the folder of the checkpoints cannot be used: {why}",
            f"{ONE_USER}; or name another `checkpoint.directory`",
        )
        return
    place = str(told["place"]).rpartition("/")[0]
    if not told["seen"]:
        yield (
            ReadinessState.MISSING,
            f"it does not see what {told['by']} wrote in {place}: the folder of the checkpoints is not shared",
            cure,
        )
    elif "unread" in told:
        yield ReadinessState.MISSING, f"it may not read what {told['by']} wrote in {place}: {told['unread']}", ONE_USER
    elif "unwritten" in told:
        yield ReadinessState.MISSING, f"it reads what {told['by']} wrote in {place}, and cannot write there: {told['unwritten']}", ONE_USER
    else:
        yield ReadinessState.OK, "checkpoints can be written" if told["alone"] else "checkpoints are shared", ""


CHECKS: Final[Mapping[str, Callable[[Facts, Baseline], Found]]] = {
    "python": _python,
    "holdfast": _holdfast,
    "torch": torch_fits,
    "gpus": gpus_work,
    "clock": _clock,
    "disk": _disk,
    "limits": _limits,
    "interface": _interface,
    "ports": _links,
    "files": _paths,
    "checkpoints": _shared,
}


def _count(number: int) -> str:
    return "unlimited" if number == UNLIMITED else str(number)


def _size(number: int) -> str:
    for unit, many in (("GB", GB), ("MB", MB)):
        if number >= many:
            return f"{number / many:.1f} {unit}"
    return f"{number / 1000:.0f} kB"
