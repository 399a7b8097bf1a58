"""Tables in logs: a value means nothing without the header that names what it counts.

`Tables` reads lines in their order and puts each value into words, as ``what printed it > section or row > name: value``. Signatures judge
these words as they judge a line. A header counts only within its table, which a blank line or a line of another shape ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

LONGEST: Final = 4096
"""Characters of a line of a table; a longer one ends it."""
MOST_OPEN: Final = 64
"""Tables that are read at once, of different programs or ranks: the oldest is dropped when there are more."""
MOST_BETWEEN: Final = 30
"""Lines of others between two lines of a table."""
DEEPEST: Final = 8
"""Sections within sections that are remembered, and lines of a row."""
NAME: Final = 80
"""Characters of a name that are repeated with each value."""
WITHIN: Final = " > "
"""Stands between a header and what it is the header of."""

_PREFIX: Final = re.compile(
    r"(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S* (?:(?P<program>[\w.-]+ [\w./-]+\[\d+\]): )?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?P<service>[\w.-]+ [\w./\[\]-]+): )?(?P<rank>\[[\w:.-]+\]:? ?)?",
    re.ASCII,
)
"""What a log puts before a line: whose it is tells tables apart."""
_TASK: Final = re.compile(r"\d+: ", re.ASCII)
"""What `srun --label` puts there; in a table of interrupts, it is their number."""
_QUIET: Final = re.compile(
    r"(?:0+|0x0+|0\.0+|-|\[?n/?a\]?|ns|no|none|ok|off|on|pass|skip|not active|enabled|disabled|supported|not supported)"
    r"(?: (?:us|ms|bytes|bank\(s\)|c|w|%|- .{0,200}))?",
    re.IGNORECASE | re.ASCII,
)
"""Values that no header makes a fault."""
_NUMBERS: Final = r"\s*(?:[A-Za-z]\S* )?\d+(?:\s+(?:[\d.,:/-]+|N/A))+\s*$|#|\s*I[Dd]\s*$"
"""Rows of numbers, and the lines of units below their header."""


class Shape(Enum):
    """How a table is laid out."""

    SECTIONS = auto()
    """Lines ``name: value`` that are indented deeper than the line that names them."""
    LIST = auto()
    """Lines ``name: value`` below a title, not indented."""
    COLUMNS = auto()
    """A line of names, and lines of values with blanks between them."""
    BARS = auto()
    """The same with ``|`` between them; a row may have several lines, as its header has."""
    COMMAS = auto()
    """The same with commas between them."""
    PAIRS = auto()
    """One line: names and values in turn."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """What a program prints."""

    name: str
    """The program, as the words begin."""
    opens: str
    """Expression for the line that begins a table, without its prefix and indentation; a group ``title`` names what it is about."""
    found_by: str
    """Expression that any such line contains, whatever stands before it: the prefilter."""
    shape: Shape
    row: str = ""
    """Expression that a row must match; empty: its shape is enough."""
    label: tuple[str, ...] = ()
    """Columns that name a row, the best one first; without them, the first column does."""
    wide: int = 0
    """The column that may have several words: the first one (0) or the last one (-1)."""


_OF_NVSMI: Final = "(?:ECC|Ecc) Errors|Retired Pages|Remapped Rows|Clocks (?:Event|Throttle) Reasons(?: Counters)?"
_OF_CSV: Final = r"(?:ecc\.errors|retired_pages|remapped_rows|clocks_(?:throttle|event)_reasons)\.[\w.]+"
FORMATS: Final = (
    Format(
        name="nvidia-smi -q",
        opens=rf"(?P<title>GPU [0-9A-Fa-f]{{4,8}}:[0-9A-Fa-f]{{2}}:[0-9A-Fa-f]{{2}}\.[0-7]|{_OF_NVSMI})$",
        found_by=rf"GPU [0-9A-Fa-f]{{4,8}}:[0-9A-Fa-f]{{2}}:[0-9A-Fa-f]{{2}}\.[0-7][ \t]*$|(?:{_OF_NVSMI})[ \t]*$",
        shape=Shape.SECTIONS,
    ),
    Format(
        name="nvidia-smi nvlink", opens=r"(?P<title>GPU \d+): .+ \(UUID: \S+\)$", found_by=r"\(UUID: [\w-]+\)[ \t]*$", shape=Shape.SECTIONS
    ),
    Format(
        name="nvidia-smi",
        opens=r"\| GPU +Name .*\| Bus-Id .*\|",
        found_by=r"\| GPU +Name ",
        shape=Shape.BARS,
    ),
    Format(
        name="nvidia-smi --query-gpu",
        opens=rf"(?=.*\b{_OF_CSV})\w[\w.]*(?: \[[\w%/ ]+\])?(?:, ?\w[\w.]*(?: \[[\w%/ ]+\])?)+$",
        found_by=rf"{_OF_CSV}(?: \[[\w%/ ]+\])?(?:,|[ \t]*$)",
        shape=Shape.COMMAS,
        label=("index", "gpu_bus_id", "pci.bus_id", "gpu_uuid", "uuid"),
    ),
    Format(name="nvidia-smi dmon", opens=r"# ?gpu(?: +\w+)+$", found_by=r"# ?gpu +\w", shape=Shape.COLUMNS, row=_NUMBERS),
    Format(name="dcgmi dmon", opens=r"# ?Entity(?: +\w+)+$", found_by=r"# ?Entity +\w", shape=Shape.COLUMNS, row=_NUMBERS),
    Format(name="dcgmi diag", opens=r"\| Diagnostic +\| Result +\|", found_by=r"\| Diagnostic +\| Result", shape=Shape.BARS),
    Format(name="ethtool -S", opens=r"NIC statistics:$", found_by=r"NIC statistics:[ \t]*$", shape=Shape.SECTIONS),
    Format(
        name="ip -s link",
        opens=r"(?:\d+: )?(?P<title>[\w.@-]+): <[A-Z_,-]+> mtu \d",
        found_by=r": <[A-Z_,-]+> mtu \d",
        shape=Shape.SECTIONS,
    ),
    Format(name="ibstat", opens=r"(?P<title>CA '\w+')$", found_by=r"\bCA '\w+'[ \t]*$", shape=Shape.SECTIONS),
    Format(
        name="perfquery",
        opens=r"# (?P<title>Port (?:extended )?counters: Lid .*)",
        found_by=r"# Port (?:extended )?counters: Lid",
        shape=Shape.LIST,
        row=r"\w+:\.+\S+$",
    ),
    Format(
        name="rdma statistic",
        opens=r"link (?P<title>[\w-]+/\d+)(?: [a-z_]+ \d+){2,}\s*$",
        found_by=r"\blink [\w-]+/\d+ [a-z_]+ \d+ [a-z_]+ \d",
        shape=Shape.PAIRS,
    ),
    Format(
        name="smartctl -A",
        opens=r"ID# ATTRIBUTE_NAME +FLAGS? ",
        found_by=r"ID# ATTRIBUTE_NAME ",
        shape=Shape.COLUMNS,
        row=r"\s*\d{1,3} \S+ +(?:0x[0-9a-f]{4}|[POSRCK-]{6}) ",
        label=("ATTRIBUTE_NAME",),
        wide=-1,
    ),
    Format(
        name="SMART",
        opens=r"(?:Smart Log for NVME device:(?P<title>\S+)|SMART/Health Information)",
        found_by=r"Smart Log for NVME device:|SMART/Health Information",
        shape=Shape.LIST,
        row=r"[A-Za-z]\w*(?: \w+)*\s*: *(?:0x[\da-fA-F]+|\d[\d.,]*)(?:%| .{0,30})?\s*$",
    ),
    Format(
        name="ras-mc-ctl", opens=r"(?P<title>\w[\w ]+ (?:events|records)) summary:$", found_by=r" summary:[ \t]*$", shape=Shape.SECTIONS
    ),
    Format(name="ras-mc-ctl", opens=r"Label\s+CE\s+UE$", found_by=r"Label\s+CE\s+UE", shape=Shape.COLUMNS, row=r"\S+(?:\s+\d+){2}$"),
    Format(
        name="sinfo -R",
        opens=r"REASON +USER +TIMESTAMP +(?:STATE +)?NODELIST",
        found_by=r"REASON +USER +TIMESTAMP ",
        shape=Shape.COLUMNS,
        row=r"\S.* \S+ +(?:\d{4}-\d\d-\d\dT[\d:]{8}|Unknown) +(?:\S+ +)?\S+\s*$",
        label=("NODELIST",),
    ),
    Format(
        name="/proc/interrupts",
        opens=r"CPU0(?: +CPU\d+)*$",
        found_by=r"\bCPU0(?: +CPU1\b|[ \t]*$)",
        shape=Shape.COLUMNS,
        row=r"\s*\w+: +\d+",
        wide=-1,
    ),
    Format(
        name="lspci",
        opens=r"(?P<title>(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] [A-Z\d][\w .-]+)(?: \[[0-9a-f]{4}\])?: ",
        found_by=r"\b[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] [A-Z\d][\w .-]+(?: \[[0-9a-f]{4}\])?: ",
        shape=Shape.SECTIONS,
    ),
)
OPENS: Final = "|".join(one.found_by for one in FORMATS)
"""Any line that begins a table contains this; most others do not."""
_FORMATS: Final = tuple((one, re.compile(one.opens, re.ASCII), re.compile(one.row, re.ASCII)) for one in FORMATS)
_NAMES: Final = frozenset(one.name for one in FORMATS)


@dataclass(slots=True)
class _Table:
    """A table, as far as it has been read."""

    format: Format
    row: re.Pattern[str]
    indent: int
    newest: int
    """Number of its newest line."""
    path: list[tuple[int, str]]
    """Names of the sections, each with its indentation."""
    columns: list[list[str]]
    """Names of columns, for each line of a row."""
    complete: bool = False
    """The header of a table with bars was read."""
    lines: int = 0
    """Lines of the newest row."""
    label: str = ""

    def take(self, body: str) -> list[str] | None:
        """Return the values of a line in words; None: it is no line of this table."""
        if not body or body.isspace() or len(body) > LONGEST or not self.row.match(body):
            return None
        if self.format.shape is Shape.SECTIONS:
            return self._section(body)
        if self.format.shape is Shape.BARS:
            return self._bars(body.strip())
        if self.format.shape is Shape.LIST:
            name, _, value = body.partition(":")
            return self.words([(name, value.lstrip("."))])
        return self._row(body)

    def _section(self, body: str) -> list[str] | None:
        indent = _indent(body)
        if indent <= self.indent:
            return None
        values = body.split()
        if self.columns and len(values) == len(self.columns[0]) and all(one.isdigit() for one in values):
            return self.words(zip(self.columns.pop(), values, strict=True))
        while self.path and self.path[-1][0] >= indent:
            self.path.pop()
        name, value, said = body, "", list[str]()
        text = body.rstrip()
        if (at := len(text) - 1 if text.endswith(":") else max(text.rfind(": "), text.rfind(":\t"))) >= 0:
            name, value = text[:at], text[at + 1 :]
            said = self.words([(name, value)])
        if len(self.path) < DEEPEST:
            self.path.append((indent, name.strip()[:NAME]))
        names = value.split()
        self.columns = [names] if len(names) > 1 and all(one.isalpha() for one in names) else []
        return said

    def _row(self, body: str) -> list[str] | None:
        names = self.columns[0]
        if self.format.shape is Shape.COMMAS:
            cells = [one.strip() for one in body.split(",")]
            if len(cells) != len(names):
                return None
        else:
            cells = body.split()
            more = len(cells) - len(names)
            if more < 0 or cells[0].startswith("#"):
                return []  # units, or a row that has a value for the whole machine
            place = slice(0, more + 1) if self.format.wide == 0 else slice(len(names) - 1, None)
            cells[place] = [" ".join(cells[place])]
        row = dict(zip(names, cells, strict=True))
        label = next((one for one in self.format.label if one in row), names[0])
        self.path = [(0, row.pop(label)[:NAME].rstrip(":"))]
        return self.words(row.items())

    def _bars(self, body: str) -> list[str] | None:
        if body[0] not in "|+":
            return None
        if body[1:3] in {"--", "=="}:
            self.complete = self.complete or "=" in body
            self.lines = 0
            return []
        cells = [one.strip() for one in body.strip("|").split("|")]
        if not self.complete:
            self.columns.append(cells)
            return [] if len(self.columns) <= DEEPEST else None
        names = self.columns[self.lines % len(self.columns)]
        if self.lines % len(self.columns) == 0 and cells[0]:
            self.label = " ".join(cells[0].split())[:NAME]
        self.lines += 1
        self.path = [(0, self.label)]
        return self.words(zip(names[1:], cells[1:], strict=False))

    def words(self, values: Iterable[tuple[str, str]]) -> list[str]:
        """Return those values that may be a fault, each with all that it is judged with."""
        header = WITHIN.join([self.format.name, *(name for _, name in self.path)])
        return [
            f"{header}{WITHIN}{' '.join(name.split())[:NAME]}: {value}"
            for name, value in ((name, value.strip()) for name, value in values)
            if name and not _QUIET.fullmatch(value)
        ]


class Tables:
    """Reads the tables among the lines of a log; memory is bounded."""

    def __init__(self) -> None:
        self._open: dict[str, _Table] = {}
        self._lines = 0

    def __bool__(self) -> bool:
        return bool(self._open)

    def take(self, line: str) -> list[str] | None:
        """Return the values of *line* that may be a fault, in words; None: it is no line of a table, and judged as it is.

        A line of a table is judged as it is only if it has such values, and no signature knows any of them.

        While a table is open, all lines have to come here; otherwise those that contain `OPENS`.
        """
        self._lines += 1
        for key in [key for key, one in self._open.items() if self._lines - one.newest > MOST_BETWEEN]:
            del self._open[key]
        prefix = _PREFIX.match(line)
        key, body = ("", line) if prefix is None else ("".join(filter(None, prefix.groups())), line[prefix.end() :])
        said = self._said(key, body)
        if said is None and (task := _TASK.match(body)):
            said = self._said(key + task[0], body[task.end() :])
        return said

    def _said(self, key: str, body: str) -> list[str] | None:
        """Return what a line of the program or rank *key* says; a line that is none of its open table ends that."""
        if (table := self._open.get(key)) is not None:
            if (said := table.take(body)) is not None:
                table.newest = self._lines
                return said
            del self._open[key]
        return self._opened(key, body)

    def _opened(self, key: str, body: str) -> list[str] | None:
        """Return what a line says that begins a table."""
        text = body.strip()
        if not text or len(text) > LONGEST:
            return None
        begun = next(((entry, row, found) for entry, opens, row in _FORMATS if (found := opens.match(text))), None)
        if begun is None:
            return None
        entry, row, found = begun
        title = found.groupdict().get("title")
        table = _Table(
            format=entry,
            row=row,
            indent=_indent(body),
            newest=self._lines,
            path=[(-1, title[:NAME])] if title else [],
            columns=_columns(entry.shape, text),
        )
        if entry.shape is Shape.PAIRS:
            fields = text.split()[2:]
            return table.words(zip(fields[::2], fields[1::2], strict=False))
        if len(self._open) >= MOST_OPEN:
            del self._open[next(iter(self._open))]
        self._open[key] = table
        return []


def in_words(lines: Sequence[str], newest: int) -> list[str]:
    """Return the *newest* of *lines*, before each line of a table its values that may be a fault: their header may stand before those."""
    tables, found = Tables(), list[str]()
    for number, line in enumerate(lines, newest - len(lines)):
        said = tables.take(line)
        if number >= 0:
            found += [line] if said is None else [*said, line] if said else []
    return found


def _columns(shape: Shape, text: str) -> list[list[str]]:
    """Return the names of columns in the line that begins a table."""
    if shape is Shape.BARS:
        return [[one.strip() for one in text.strip("|").split("|")]]
    if shape is Shape.COMMAS:
        return [[one.strip() for one in text.split(",")]]
    if shape is not Shape.COLUMNS:
        return []
    names = text.lstrip("# ").split() if text.startswith("#") else text.split()
    return [["interrupt", *names, ""]] if names[0] == "CPU0" else [names]


def _indent(line: str) -> int:
    line = line.expandtabs()
    return len(line) - len(line.lstrip())


def header_of(text: str) -> str:
    """Return the header that a value was judged with, if *text* is one of a table."""
    names = text.split(WITHIN)
    return WITHIN.join(names[:-1]) if len(names) > 1 and names[0] in _NAMES else ""
