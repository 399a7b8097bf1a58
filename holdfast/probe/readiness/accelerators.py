"""Whether a node's GPUs, their driver and its torch go together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast.probe.readiness.baseline import Baseline, gpus_of
from holdfast.probe.readiness.finding import Facts, Found, ReadinessState, blind
from holdfast.report.wording import plural

INTERPRETER: Final = "the interpreter that `python` of the cluster or the job names"
GPUS_FIELD: Final = "`gpus` of the cluster file"


def torch_fits(one: Facts, usual: Baseline) -> Found:
    """Judge the torch that the job's interpreter imports: its version, and whether it is built for what the node has."""
    told = one.torch
    if (why := blind(told)) or (told is not None and "failed" in told):
        words = why or str((told or {})["failed"])
        yield ReadinessState.MISSING, f"torch cannot be imported: {words}", f"Install it for {INTERPRETER}"
        return
    assert told is not None
    wrong = list(_unfit(one, usual, told))
    yield from wrong
    if told["version"] != usual.torch:
        yield ReadinessState.MISSING, f"torch {told['version']}, most nodes have {usual.torch}", "Install one version on all nodes"
    elif not wrong:
        yield ReadinessState.OK, f"torch {told['version']}", ""


def _unfit(one: Facts, usual: Baseline, told: Mapping[str, Any]) -> Found:
    """Say what keeps this build of torch from training on that node, whatever other nodes have."""
    name, cuda, rocm = f"torch {told['version']}", told["cuda"], told["hip"]
    if not told["gloo"]:
        yield ReadinessState.MISSING, f"{name} is built without gloo, by which ranks talk", f"Install a build with it for {INTERPRETER}"
    nvidia, count = _nvidia(one), usual.declared(one.node)
    if count == 0:  # they are not to be used
        return
    count = nvidia or count or 0
    if count and cuda is None and (nvidia or rocm is None):
        what = "is built without CUDA" if rocm is None else "is built for ROCm"
        kind = "for CUDA" if nvidia else "for CUDA or ROCm"
        there = (
            f"the node has {plural(count, 'GPU')} of NVIDIA's" if nvidia else f"the cluster file says that it has {plural(count, 'GPU')}"
        )
        words = f"{name} {what}, and {there}: training would run on its CPU"
        yield ReadinessState.MISSING, words, f"Install a build {kind} for {INTERPRETER}, see https://pytorch.org/get-started/locally"
    elif cuda is not None and gpus_of(one) and not told["devices"]:
        words = f"{name} can use none of {plural(count, 'GPU')}: {told['why'] or 'CUDA does not say why'}"
        yield ReadinessState.MISSING, words, f"Install a driver that is new enough for CUDA {cuda}, or a build of torch for an older one"


def _nvidia(one: Facts) -> int:
    """Return how many GPUs of NVIDIA's are seen, by their driver or on the bus alone."""
    on_bus = (one.gpus or {}).get("on_bus")
    return len(gpus_of(one) or (on_bus if isinstance(on_bus, list) else ()))


def gpus_work(one: Facts, usual: Baseline) -> Found:
    """Judge a node's GPUs and their driver."""
    if why := blind(one.gpus):
        yield ReadinessState.UNSEEN, why, ""
        return
    assert one.gpus is not None
    gpus, driver = gpus_of(one), one.gpus.get("driver_version")
    if gpus is None and not _by_rocm(one):
        yield from _no_driver(one, usual)
        return
    yield from _each_gpu(gpus or ())
    found = _by_rocm(one) if gpus is None else len(gpus)
    yield from _too_few_or_many(found, one, usual)
    if gpus and driver != usual.driver:
        yield ReadinessState.DOUBTFUL, f"driver {driver}, most nodes have {usual.driver}", "Install one driver on all nodes"
    elif found:
        yield ReadinessState.OK, f"{plural(found, 'GPU')}{f', driver {driver}' if gpus else ' by ROCm'}", ""


def _by_rocm(one: Facts) -> int:
    """Return how many GPUs torch sees by ROCm: NVML knows NVIDIA's alone."""
    told = one.torch or {}
    return int(told.get("devices") or 0) if told.get("hip") else 0


def _too_few_or_many(found: int, one: Facts, usual: Baseline) -> Found:
    wanted, who = usual.gpus_for(one.node)
    fallen = "See `holdfast health CLUSTER_FILE`: one may have fallen off"
    words = f"{plural(found, 'GPU')}, {who} {wanted}"
    if found < wanted:
        yield (
            ReadinessState.MISSING,
            words,
            f"{fallen}; if not, {'mend' if usual.declared(one.node) is not None else 'declare'} {GPUS_FIELD}",
        )
    elif found > wanted and usual.declared(one.node) is not None:
        yield ReadinessState.DOUBTFUL, words, f"Mend {GPUS_FIELD}"


def _no_driver(one: Facts, usual: Baseline) -> Found:
    told = one.gpus or {}
    seen, (wanted, who) = _nvidia(one), usual.gpus_for(one.node)
    why = blind(told.get("gpus")) if isinstance(told.get("gpus"), dict) else ""
    if seen or wanted:
        what = f"{seen} on the bus" if seen else f"{who} {wanted}"
        yield (
            ReadinessState.MISSING,
            f"no GPU can be used, {what}: {why}",
            "Install the NVIDIA driver, or load its module (`modprobe nvidia`)",
        )
    else:
        yield ReadinessState.OK, "no GPU", ""


def _each_gpu(gpus: Sequence[Mapping[str, Any]]) -> Found:
    for gpu in gpus:
        if gpu.get("failed"):
            yield ReadinessState.MISSING, f"GPU {gpu.get('index')} fails (NVML code {gpu['failed']})", "See `holdfast health CLUSTER_FILE`"
