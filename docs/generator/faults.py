"""The pages of the fault catalogue: one per component, and an index by symptom."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Final

from detectors.all_kinds import CATALOGUE, by_place, words_of
from detectors.catalogue import FaultKind
from detectors.evidence import LogLine
from docs.generator.markdown import anchor, page, table

FOLDER: Final = "reference/faults"

SYMPTOMS: Final[Mapping[str, str]] = {
    "Training hangs or stops making progress": r"hang|hung|stuck|frozen|deadlock|stall|no progress|does not (arrive|end|come)|waits? (for|in)|timed? ?out|timeout",
    "Training is slow": r"slow|straggl|throttl|slower|bottleneck|latency|contention|degraded",
    "The loss is wrong, or results differ": r"\bloss\b|\bnan\b|non-finite|diverge|silent|differs?\b|checksum|corrupt",
    "Out of memory": r"out of memory|\boom\b|memory is (full|low)|not enough memory|lack of memory|memory pressure",
    "A process exits or is killed": r"\bexit|killed|signal|segmentation|sigbus|abort|crash|exception|traceback|ended",
    "A GPU or accelerator disappears or cannot be used": r"off (its|the) bus|disappear|no longer answers|cannot be (seen|initiali[sz]ed|used)|lost gpu|missing gpu|gpu is missing|is missing|\binit\b",
    "A GPU or accelerator reports an error": r"\bxid\b|ecc|row remap|page fault|mmu|\bgpu\b|npu\b|accelerator|cuda|hip\b|sxid",
    "A collective or a connection between ranks fails": r"nccl|gloo|collective|rendezvous|peer|all-?reduce|process group|store\b",
    "A network link is down or drops data": r"link|port|cable|infiniband|ethernet|rdma|packet|roce|network|nvlink|interface|address|dns|name",
    "A file or a disk cannot be read or written": r"disk|file|storage|i/o|read|write|mount|quota|space|raid|nvme|inode|checkpoint",
    "A node is unreachable, reboots, or is taken away": r"node|host|reboot|unreachable|preempt|shutdown|maintenance|kernel",
    "Heat, power or a board": r"temperature|thermal|hot\b|fan|cool|power|voltage|psu|board|watchdog",
    "A program or driver does not start": r"driver|version|librar|import|container|image|permission|limit|schedul|service|clock|config",
}  # fmt: skip
"""Symptom, in the order in which they are tried, to a pattern of the titles and names of its kinds."""

OTHER: Final = "Other"


def symptom_of(kind: FaultKind) -> str:
    """Return the symptom under which the index lists *kind*: the first that its title has, else the first that its name or component has."""
    for words in (kind.title, f"{kind.id.replace('-', ' ')} {kind.component}"):
        for symptom, pattern in SYMPTOMS.items():
            if re.search(pattern, words, re.IGNORECASE):
                return symptom
    return OTHER


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


def _linked(kind: FaultKind) -> str:
    return f"[`{kind.id}`]({file_of(kind.component)}#{anchor(kind.id)})"


def index_page() -> str:
    """Show how to find a kind: by component, by symptom and by Xid number."""
    by_symptom: dict[str, list[FaultKind]] = defaultdict(list)
    for kind in by_place():
        by_symptom[symptom_of(kind)].append(kind)
    parts = [
        "# Fault catalogue\n",
        f"Holdfast knows {len(CATALOGUE)} kinds of faults. To find the kinds in a log, run `holdfast classify LOG`;",
        "`holdfast faults show KIND` prints an entry of this catalogue.\n",
        "- The *recommended action* is what a fault asks for. A [policy](../policy-file.md) decides what is done.",
        "- *Attributed to* is the part at fault: the GPU, the node, the network, storage, the process or your code.\n",
        "## By component\n",
        table(("Area", "Component", "Kinds"), *((area, f"[{name}]({file_of(name)})", str(len(kinds))) for area, name, kinds in components())),
        "## By symptom\n",
        "Each kind is listed once, under its most visible symptom.\n",
    ]
    for symptom in (*SYMPTOMS, OTHER):
        if kinds := by_symptom.get(symptom):
            rows = [(kind.title, _linked(kind), f"`{kind.recommended_action}`") for kind in sorted(kinds, key=lambda one: one.title)]
            parts += [f"### {symptom}\n", table(("Symptom", "Kind", "Recommended action"), *rows)]
    parts += [
        "## By Xid number\n",
        "Error numbers of the NVIDIA driver in the kernel log, as in `NVRM: Xid (PCI:0000:3b:00): 79, ...`.\n",
        table(("Xid", "Kind", "What it is"), *((str(number), _linked(kind), kind.title) for number, kind in _by_xid())),
    ]
    return page(*parts)


def _by_xid() -> list[tuple[int, FaultKind]]:
    found = {}
    for kind in by_place():
        if number := re.search(r"\bXid \([^)]*\): (\d+)", words_of(kind.unhealthy)):
            found.setdefault(int(number[1]), kind)
    return sorted(found.items())


def component_page(area: str, component: str, kinds: Sequence[FaultKind]) -> str:
    """Show the kinds of a component: a table of all, then each with its sample."""
    rows = [(f"[`{kind.id}`](#{anchor(kind.id)})", kind.title, f"`{kind.recommended_action}`") for kind in kinds]
    return page(
        f"# Faults: {component}\n",
        f"{len(kinds)} kinds of the area *{area}*; [all faults](index.md).\n",
        table(("Kind", "What it is", "Recommended action"), *rows),
        *(part for kind in kinds for part in _entry(kind)),
    )


def _entry(kind: FaultKind) -> Iterator[str]:
    yield f"## `{kind.id}`\n"
    yield f"{kind.title}.\n"
    yield f"- **Recommended action:** `{kind.recommended_action}`"
    yield f"- **Attributed to:** {kind.blame.replace('_', ' ')}"
    yield f"- **Detected from:** {kind.source}"
    yield f"- **What to do:** {kind.action}"
    if kind.confused_with:
        yield f"- **Often confused with:** {', '.join(_linked(CATALOGUE[other]) for other in kind.confused_with)}"
    if kind.reference.startswith("https:"):
        yield f"- **Reference:** <{kind.reference}>"
    yield ""
    if isinstance(kind.unhealthy.evidence, LogLine):
        yield f"```text\n{words_of(kind.unhealthy).strip()}\n```\n"
