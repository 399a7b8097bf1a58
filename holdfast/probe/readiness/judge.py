"""Judge what nodes reported: what is missing on each, and the cure. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from holdfast.plurals import plural
from holdfast.probe.readiness.findings import Baseline, Facts, Found, ReadinessFinding, ReadinessState, blind, gpus_of, minor
from holdfast.torch_versions import untested

MB, GB = 10**6, 10**9
DISK_MIN, DISK_ENOUGH = 50 * MB, 1 * GB
SHM_MIN: Final = 65 * MB
"""The default of a container."""
SHM_FREE_SHARE: Final = 0.1
FILES_MIN, FILES_ENOUGH = 1024, 4096
TASKS_MIN, TASKS_ENOUGH = 512, 4096
CLOCK_OK, CLOCK_WRONG = 0.5, 10.0
"""Seconds that two clocks may differ before times of faults can hardly be compared, and before they are meaningless."""
MEMORY: Final = "/dev/shm"  # noqa: S108 (the file system in memory itself)
UNLIMITED: Final = -1
ONE_USER: Final = (
    "Mount it for writing, and log in as the same user (by number: `id -u`) on all nodes: each writes its part of a checkpoint there"
)
BOOTSTRAP: Final = "`holdfast node bootstrap --cluster CLUSTER_FILE` installs it"
INTERPRETER: Final = "the interpreter that `python` of the cluster or the job names"
GPUS_FIELD: Final = "`gpus` of the cluster file"

Check = Callable[[Facts, Baseline], Found]


def judge(facts: Sequence[Facts], *, gpus: Mapping[str, int] | None = None, snapshots: bool = False) -> list[ReadinessFinding]:
    """Return the findings of each node, check by check, in the order of *facts*; *gpus* are the numbers in the cluster file."""
    usual = Baseline(facts, gpus or {})
    checks: dict[str, tuple[str, Check]] = {**CHECKS, "memory": ("probe", partial(_memory, snapshots=snapshots))}
    found = []
    for one in facts:
        if one.unreachable:
            state, text, cure = ReadinessState.MISSING, one.unreachable, one.cure
            found.append(ReadinessFinding(node=one.node, check="login", state=state, message=text, cure=cure))
            continue
        for name, (source, check) in checks.items():
            why = blind(getattr(one, source)) if source else ""
            for state, text, cure in [(ReadinessState.UNKNOWN, why, "")] if why else check(one, usual):
                found.append(ReadinessFinding(node=one.node, check=name, state=state, message=text, cure=cure))
    return found


def _python(one: Facts, usual: Baseline) -> Found:
    assert one.probe is not None
    version = str(one.probe["python"])
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 11):
        yield ReadinessState.MISSING, f"Python {version}, jobs need 3.11 or newer", "Name a newer one in `python` of the cluster file"
    elif minor(version) != usual.python:
        yield ReadinessState.DEGRADED, f"Python {version}, most nodes have {usual.python}", "Use one version on all nodes"
    else:
        yield ReadinessState.OK, f"Python {version}", ""


def _holdfast(one: Facts, _usual: Baseline) -> Found:
    environment = one.environment
    assert environment is not None
    if "failed" in environment:
        yield ReadinessState.MISSING, str(environment["failed"]), "Name another interpreter in `python` of the cluster file"
    elif not environment["in_use"]:
        yield ReadinessState.MISSING, f"there is no Holdfast in {environment['path']}", BOOTSTRAP
    elif not environment["complete"]:
        text = f"its Holdfast ({environment['in_use']}) is damaged, of another version, or made for another interpreter"
        yield ReadinessState.MISSING, text, BOOTSTRAP.replace("installs it", "installs this one")
    elif why := blind(one.node_proxy):
        yield ReadinessState.MISSING, f"its proxy does not answer: {why}", ""
    else:
        yield ReadinessState.OK, f"Holdfast {str(environment['in_use']).split('-')[0]}", ""


def _clock(one: Facts, _usual: Baseline) -> Found:
    if one.clock is None:
        yield ReadinessState.UNKNOWN, "it did not report its time", ""
        return
    off, uncertain = one.clock
    certain = max(0.0, abs(off) - uncertain)
    text = f"its clock is {abs(off):.3f} s {'ahead of' if off > 0 else 'behind'} this machine's (±{uncertain:.3f} s)"
    cure = "Synchronize it: `chronyc makestep`, or `timedatectl set-ntp true`; or correct this machine's"
    state = ReadinessState.OK if certain <= CLOCK_OK else ReadinessState.DEGRADED if certain <= CLOCK_WRONG else ReadinessState.MISSING
    yield state, text, "" if state is ReadinessState.OK else cure


def _disk(one: Facts, _usual: Baseline) -> Found:
    disk = (one.probe or {})["disk"]
    text, cure = f"{_size(disk['free'])} free in {disk['path']}", "name another `directory` in the cluster file"
    if not disk["writable"]:
        yield ReadinessState.MISSING, f"{disk['path']} is not writable", f"Fix its permissions, or {cure}"
    elif disk["free"] < DISK_ENOUGH:
        yield ReadinessState.MISSING if disk["free"] < DISK_MIN else ReadinessState.DEGRADED, text, f"Free some space, or {cure}"
    else:
        yield ReadinessState.OK, text, ""


def _memory(one: Facts, _usual: Baseline, *, snapshots: bool) -> Found:
    shm, worst = (one.probe or {})["shm"], ReadinessState.MISSING if snapshots else ReadinessState.DEGRADED
    if shm is None:
        yield worst, f"{MEMORY} is no file system in memory: snapshots cannot be stored", "Mount a tmpfs there"
    elif shm["total"] < SHM_MIN:
        cure = f"Give the container more (`--shm-size`), or `mount -o remount,size=50% {MEMORY}`"
        yield worst, f"{MEMORY} has {_size(shm['total'])}: snapshots need several times the size of a rank's state", cure
    elif shm["free"] < SHM_FREE_SHARE * shm["total"]:
        text = f"{_size(shm['free'])} free of {_size(shm['total'])} in {MEMORY}"
        yield ReadinessState.DEGRADED, text, f"See `ls -l {MEMORY}`, and remove what is not used"
    else:
        yield ReadinessState.OK, f"{_size(shm['free'])} free in {MEMORY}", ""


def _limits(one: Facts, _usual: Baseline) -> Found:
    probe = one.probe or {}
    is_fine = True
    for name, minimum, enough in (("nofile", FILES_MIN, FILES_ENOUGH), ("nproc", TASKS_MIN, TASKS_ENOUGH)):
        soft = probe["limits"][name][0]
        if soft != UNLIMITED and soft < enough:
            state = ReadinessState.MISSING if soft < minimum else ReadinessState.DEGRADED
            yield state, f"{name} is {soft}, a job needs {enough}", _raise_limit(name, str(enough))
            is_fine = False
    soft = probe["limits"]["memlock"][0]
    if probe["infiniband"] and soft != UNLIMITED:
        text = f"memlock is {_size(soft)}: InfiniBand needs it unlimited"
        yield ReadinessState.DEGRADED, text, _raise_limit("memlock", "unlimited")
        is_fine = False
    if is_fine:
        files = probe["limits"]["nofile"][0]
        yield ReadinessState.OK, f"nofile {'unlimited' if files == UNLIMITED else files}", ""


def _raise_limit(name: str, value: str) -> str:
    return f"Set `* - {name} {value}` in /etc/security/limits.conf there (and `UsePAM yes` for its sshd), or raise that of its sshd"


def _interface(one: Facts, _usual: Baseline) -> Found:
    if one.node_proxy is None or blind(one.node_proxy):
        yield ReadinessState.UNKNOWN, "it can be examined once Holdfast is installed there", ""
        return
    name, address = one.node_proxy["interface"], one.node_proxy["address"]
    if name is None:
        cure = "Name one in `interface` of the cluster file: its name, or its network"
        yield ReadinessState.DEGRADED, f"none of its interfaces has the address {address} at which it is reached", cure
    else:
        yield ReadinessState.OK, f"{name} {address}", ""


def _links(one: Facts, _usual: Baseline) -> Found:
    link = one.link
    if link is not None and "why" in link:
        cure = "Let nodes connect to each other on all TCP ports in their own network: workers listen on free ones"
        yield ReadinessState.MISSING, f"it cannot connect to {link['to']} ({link['address']}): {link['why']}", cure
    elif link is not None:
        yield ReadinessState.OK, f"{_size(int(link['rate']))}/s to {link['to']}", ""


def _paths(one: Facts, _usual: Baseline) -> Found:
    if not one.paths:
        return
    if why := blind(one.paths):
        yield ReadinessState.MISSING, f"the job's files could not be looked for: {why}", "Fix the file system that they are on"
    elif missing := [path for path, exists in one.paths.items() if not exists]:
        yield ReadinessState.MISSING, f"it does not have {', '.join(missing)}", "Copy it there, or mount its file system at the same path"
    else:
        yield ReadinessState.OK, "it has the job's files", ""


def _shared(one: Facts, _usual: Baseline) -> Found:
    if one.shared is None:
        return
    found = one.shared
    if why := blind(found):
        yield ReadinessState.MISSING, f"the checkpoint folder cannot be used: {why}", f"{ONE_USER}; or name another `checkpoint.directory`"
        return
    place = str(found["place"]).rpartition("/")[0]
    written = f"what {found['by']} wrote in {place}"
    if not found["seen"]:
        cure = "Mount one file system there on all nodes, or name another folder in `checkpoint.directory` of the job"
        yield ReadinessState.MISSING, f"it does not see {written}: the checkpoint folder is not shared", cure
    elif "unread" in found:
        yield ReadinessState.MISSING, f"it may not read {written}: {found['unread']}", ONE_USER
    elif "unwritten" in found:
        yield ReadinessState.MISSING, f"it reads {written}, and cannot write there: {found['unwritten']}", ONE_USER
    else:
        yield ReadinessState.OK, "checkpoints can be written" if found["alone"] else "checkpoints are shared", ""


# -- GPUs and torch ---------------------------------------------------------------------------------------------------


def _torch(one: Facts, usual: Baseline) -> Found:
    """Judge the torch that the job's interpreter imports: its version, and whether it is built for the node's hardware."""
    torch = one.torch
    if (why := blind(torch)) or (torch is not None and "failed" in torch):
        text = why or str((torch or {})["failed"])
        yield ReadinessState.MISSING, f"torch cannot be imported: {text}", f"Install it for {INTERPRETER}"
        return
    assert torch is not None
    wrong = list(_wrong_build(one, usual, torch))
    yield from wrong
    if torch["version"] != usual.torch:
        yield ReadinessState.MISSING, f"torch {torch['version']}, most nodes have {usual.torch}", "Install one version on all nodes"
    elif not wrong and (text := untested(torch["version"])):
        yield ReadinessState.DEGRADED, text, f"Install one of these for {INTERPRETER}, or try it with a short job first"
    elif not wrong:
        yield ReadinessState.OK, f"torch {torch['version']}", ""


def _wrong_build(one: Facts, usual: Baseline, torch: Mapping[str, Any]) -> Found:
    """Yield what keeps this build of torch from training on that node, whatever other nodes have."""
    name, cuda, rocm = f"torch {torch['version']}", torch["cuda"], torch["hip"]
    if not torch["gloo"]:
        yield (
            ReadinessState.MISSING,
            f"{name} is built without gloo, over which ranks communicate",
            f"Install one with it for {INTERPRETER}",
        )
    nvidia, count = _nvidia_gpus(one), usual.declared(one.node)
    if count == 0:  # its GPUs are not to be used
        return
    count = nvidia or count or 0
    if count and cuda is None and (nvidia or rocm is None):
        what = "is built without CUDA" if rocm is None else "is built for ROCm"
        kind = "for CUDA" if nvidia else "for CUDA or ROCm"
        gpus = plural(count, "NVIDIA GPU" if nvidia else "GPU")
        node = f"the node has {gpus}" if nvidia else f"the cluster file says that it has {gpus}"
        cure = f"Install a build {kind} for {INTERPRETER}, see https://pytorch.org/get-started/locally"
        yield ReadinessState.MISSING, f"{name} {what}, and {node}: training would run on its CPU", cure
    elif cuda is not None and gpus_of(one) and not torch["devices"]:
        text = f"{name} can use none of {plural(count, 'GPU')}: {torch['why'] or 'CUDA does not say why'}"
        yield ReadinessState.MISSING, text, f"Install a driver that is new enough for CUDA {cuda}, or a build of torch for an older one"


def _nvidia_gpus(one: Facts) -> int:
    """Return how many NVIDIA GPUs the driver or the PCI bus shows."""
    on_bus = (one.gpus or {}).get("on_bus")
    return len(gpus_of(one) or (on_bus if isinstance(on_bus, list) else ()))


def _gpus(one: Facts, usual: Baseline) -> Found:
    """Judge a node's GPUs and their driver."""
    answer, gpus = one.gpus or {}, gpus_of(one)
    torch, (wanted, source) = one.torch or {}, usual.gpus_for(one.node)
    rocm = int(torch.get("devices") or 0) if torch.get("hip") else 0  # NVML knows only NVIDIA's
    if gpus is None and not rocm:
        yield _no_usable_gpu(one, wanted, source)
        return
    for gpu in gpus or ():
        if gpu.get("failed"):
            yield (
                ReadinessState.MISSING,
                f"GPU {gpu.get('index')} fails (NVML code {gpu['failed']})",
                "See `holdfast node check --cluster CLUSTER_FILE`",
            )
    count, is_declared = rocm if gpus is None else len(gpus), usual.declared(one.node) is not None
    text = f"{plural(count, 'GPU')}, {source} {wanted}"
    if count < wanted:
        mend = "correct" if is_declared else "declare"
        cure = f"See `holdfast node check --cluster CLUSTER_FILE`: one may have fallen off; if not, {mend} {GPUS_FIELD}"
        yield ReadinessState.MISSING, text, cure
    elif count > wanted and is_declared:
        yield ReadinessState.DEGRADED, text, f"Correct {GPUS_FIELD}"
    driver = answer.get("driver_version")
    if gpus and driver != usual.driver:
        yield ReadinessState.DEGRADED, f"driver {driver}, most nodes have {usual.driver}", "Install one driver on all nodes"
    elif count:
        yield ReadinessState.OK, f"{plural(count, 'GPU')}{f', driver {driver}' if gpus else ' by ROCm'}", ""


def _no_usable_gpu(one: Facts, wanted: int, source: str) -> tuple[ReadinessState, str, str]:
    on_bus, answer = _nvidia_gpus(one), (one.gpus or {}).get("gpus")
    if not on_bus and not wanted:
        return ReadinessState.OK, "no GPU", ""
    what = f"{on_bus} on the bus" if on_bus else f"{source} {wanted}"
    why = blind(answer) if isinstance(answer, dict) else ""
    cure = "Install the NVIDIA driver, or load its module (`modprobe nvidia`)"
    return ReadinessState.MISSING, f"no GPU can be used, {what}: {why}", cure


CHECKS: Final[Mapping[str, tuple[str, Check]]] = {
    "python": ("probe", _python),
    "holdfast": ("environment", _holdfast),
    "torch": ("", _torch),
    "gpus": ("gpus", _gpus),
    "clock": ("", _clock),
    "disk": ("probe", _disk),
    "limits": ("probe", _limits),
    "interface": ("", _interface),
    "ports": ("", _links),
    "files": ("", _paths),
    "checkpoints": ("", _shared),
}
"""Check to the fact without which it is unknown (empty: it decides itself), and its function."""


def _size(number: int) -> str:
    for unit, many in (("GB", GB), ("MB", MB)):
        if number >= many:
            return f"{number / many:.1f} {unit}"
    return f"{number / 1000:.0f} kB"
