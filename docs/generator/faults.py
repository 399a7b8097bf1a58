"""The pages of the fault catalogue: one per component, and an index by symptom."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Final

from docs.generator.markdown import anchor, page, table
from holdfast.detectors.all_kinds import CATALOGUE, by_place, words_of
from holdfast.detectors.catalogue import FaultKind
from holdfast.detectors.confirmation import ActsOn, acts_on
from holdfast.detectors.evidence import LogLine
from holdfast.detectors.signatures import XIDS

FOLDER: Final = "reference/faults"

WORK: Final = ("job", "performance", "collectives", "communication", "nccl", "pytorch", "worker", "data loader", "user code")
DEVICES: Final = ("gpu", "accelerator", "cuda", "driver")

VISIBLE: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "Training hangs or makes no progress": (
        r"\bhang|\bhung(?! on)|frozen|deadlock|stuck|progress|never reaches|waits? (for|in)|desync|did not arrive",
        WORK,
    ),
    "Training is slow": (r"\bslow|longer than before|straggl|throttl|waits? for its data|compute bound", ()),
    "The loss or the results are wrong": (r"\bloss\b|gradient|\bNaN\b|parameters (of|are)|replicas? (of|differ)|wrong result", WORK),
    "Out of memory": (r"out of memory|memory than|out-of-memory|no room in shared memory|memory pressure", ()),
    "A GPU or accelerator is missing or cannot be used": (
        r"on its bus|disappear|no longer answer|cannot be (seen|init|used|opened)|missing|not loaded|not exist|as lost|-lost\b|-init\b",
        DEVICES,
    ),
}
"""Symptom, in the order in which they are tried, to a pattern of a kind's title or id, and the components that have it (none: all)."""

BY_COMPONENT: Final[Mapping[str, tuple[str, ...]]] = {
    "Training hangs or makes no progress": ("job",),
    "Training is slow": ("performance",),
    "Out of memory": ("host memory",),
    "A process or a script fails": ("worker", "user code", "pytorch", "data loader"),
    "A job, container or driver does not start": ("container", "scheduler", "driver"),
    "A GPU or accelerator reports an error": ("gpu", "accelerator", "cuda"),
    "Memory reports errors": ("gpu memory", "memory module", "memory"),
    "NVLink or an NVSwitch fails": ("nvlink", "nvswitch"),
    "A PCIe device fails": ("pcie",),
    "Ranks lose their connection, or a collective fails": ("collectives", "communication", "nccl"),
    "A network link is down or loses data": ("network", "infiniband", "ethernet", "rdma"),
    "A checkpoint cannot be written or read": ("checkpoint",),
    "A file or a disk cannot be read or written": ("storage", "disk", "raid", "file system", "network file system"),
    "A node is unreachable or its system is unhealthy": ("node", "host", "agent", "kernel", "service", "clock", "limits"),
    "Heat, power, CPU or board": ("cooling", "power", "cpu", "board"),
}
"""Symptom of the kinds of some components that show no symptom of their own."""

SYMPTOMS: Final = tuple(dict.fromkeys((*VISIBLE, *BY_COMPONENT)))


def symptom_of(kind: FaultKind) -> str:
    """Return the symptom under which the index lists *kind*."""
    for symptom, (pattern, components) in VISIBLE.items():
        if (not components or kind.component in components) and re.search(pattern, f"{kind.title} {kind.id}", re.IGNORECASE):
            return symptom
    return next(symptom for symptom, components in BY_COMPONENT.items() if kind.component in components)


NAMES: Final[Mapping[str, str]] = {
    "gpu": "GPU", "gpu memory": "GPU memory", "nvlink": "NVLink", "nvswitch": "NVSwitch", "pcie": "PCIe", "cpu": "CPU", "rdma": "RDMA",
    "infiniband": "InfiniBand", "raid": "RAID", "cuda": "CUDA", "nccl": "NCCL", "pytorch": "PyTorch",
}  # fmt: skip
"""Components that are not written in lowercase."""


def title_of(component: str) -> str:
    """Return the title of the page of *component*."""
    return NAMES.get(component, component.capitalize())


def file_of(component: str) -> str:
    """Return the name of the page of *component*."""
    return f"{component.replace(' ', '-')}.md"


def components() -> list[tuple[str, str, list[FaultKind]]]:
    """Return area, component and kinds of each page, in the order of the catalogue."""
    return [(area, component, list(kinds)) for (area, component), kinds in groupby(by_place(), key=lambda one: (one.area, one.component))]


def fault_pages() -> dict[str, Callable[[], str]]:
    """Return what draws each page of the catalogue, by its path below docs/."""
    pages: dict[str, Callable[[], str]] = {f"{FOLDER}/index.md": index_page}
    for area, component, kinds in components():
        pages[f"{FOLDER}/{file_of(component)}"] = partial(component_page, area, component, kinds)
    return pages


ACTS: Final[Mapping[ActsOn, str]] = {
    ActsOn.MEASURED: "measured", ActsOn.LINE: "one line", ActsOn.SECOND_SIGNAL: "line + signal", ActsOn.NEVER: "",
}  # fmt: skip
"""The column *Acts on*."""


def _acts(kind: FaultKind) -> str:
    return ", ".join(ACTS[one] for one in acts_on(kind))


def _linked(kind: FaultKind) -> str:
    return f"[`{kind.id}`]({file_of(kind.component)}#{anchor(kind.id)})"


def index_page() -> str:
    """Show how to find a kind: by component, by symptom and by Xid number."""
    by_symptom: dict[str, list[FaultKind]] = defaultdict(list)
    for kind in by_place():
        by_symptom[symptom_of(kind)].append(kind)
    parts = [
        "# Fault catalogue\n",
        f"Holdfast knows {len(CATALOGUE)} kinds of faults. To find the kinds in a log, run `holdfast faults find LOG`;",
        "`holdfast faults show KIND` prints an entry of this catalogue.\n",
        "- The *recommended action* is what a fault asks for. A [policy](../policy-file.md) decides what is done.",
        "- *Acts on* is what suffices to take a node out: a *measured* value, *one line* that proves the fault, or *line + signal*: a line",
        "  with a second, independent signal. Empty: it takes no node out. `holdfast faults ls --acts line` lists by it;",
        "  [why](../../explanation/diagnosis.md#shown-and-acted-on).",
        "- *Attributed to* is the part at fault: the GPU, the node, the network, storage, the process or your code.\n",
        "## By component\n",
        table(
            ("Area", "Component", "Kinds"),
            *((area, f"[{title_of(name)}]({file_of(name)})", str(len(kinds))) for area, name, kinds in components()),
        ),
        "## By symptom\n",
        "Each kind is listed once, under its most visible symptom.\n",
    ]
    for symptom in SYMPTOMS:
        if kinds := by_symptom.get(symptom):
            rows = [(kind.title, _linked(kind), f"`{kind.recommended_action}`") for kind in sorted(kinds, key=lambda one: one.title)]
            parts += [f"### {symptom}\n", table(("Symptom", "Kind", "Recommended action"), *rows)]
    parts += [
        "## By Xid number\n",
        "Error numbers of the NVIDIA driver in the kernel log, as in `NVRM: Xid (PCI:0000:3b:00): 79, ...`, after NVIDIA's catalogue of",
        "2025-10-29.\n",
        table(
            ("Xid", "Kind", "What it is", "Acts on"), *((numbers, _linked(kind), kind.title, _acts(kind)) for numbers, kind in _by_xid())
        ),
    ]
    return page(*parts)


def _by_xid() -> list[tuple[str, FaultKind]]:
    """Return each kind of Xid with its numbers; those without numbers of their own (144 to 150, 154) by their samples."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for signature in XIDS:
        for number, name in signature.keys.items():
            numbers[name].add(int(number))
    for kind in by_place():
        if kind.id not in numbers and (found := re.search(r"\bXid \([^)]*\): (\d+)", words_of(kind.unhealthy))):
            numbers[kind.id].add(int(found[1]))
    return [(_ranges(several), CATALOGUE[name]) for name, several in sorted(numbers.items(), key=lambda one: min(one[1]))]


def _ranges(numbers: Iterable[int]) -> str:
    """Write numbers shortly: ``39 to 41, 70, 71``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]} to {part[-1]}" if part[-1] > part[0] + 1 else ", ".join(map(str, part)) for part in parts)


def component_page(area: str, component: str, kinds: Sequence[FaultKind]) -> str:
    """Show the kinds of a component: a table of all, then each with its sample."""
    rows = [(f"[`{kind.id}`](#{anchor(kind.id)})", kind.title, f"`{kind.recommended_action}`", _acts(kind)) for kind in kinds]
    return page(
        f"# {title_of(component)} faults\n",
        f"{len(kinds)} kinds of the area *{area}*; [all faults](index.md).\n",
        table(("Kind", "What it is", "Recommended action", "Acts on"), *rows),
        *(part for kind in kinds for part in _entry(kind)),
    )


def _entry(kind: FaultKind) -> Iterator[str]:
    yield f"## `{kind.id}`\n"
    yield f"{kind.title}.\n"
    yield f"- **Recommended action:** `{kind.recommended_action}`"
    yield f"- **Attributed to:** {title_of(kind.attributed_to.replace('_', ' '))}"
    yield f"- **Detected from:** {kind.source}"
    yield f"- **What to do:** {kind.action}"
    if kind.confused_with:
        yield f"- **Often confused with:** {', '.join(_linked(CATALOGUE[other]) for other in kind.confused_with)}"
    if kind.reference.startswith("https:"):
        yield f"- **Reference:** <{kind.reference}>"
    yield ""
    if isinstance(kind.unhealthy.evidence, LogLine):
        yield f"```text\n{words_of(kind.unhealthy).strip()}\n```\n"
