"""The live picture of one job: a panel with what is known now, the newest incidents, and a line about keys.

It fits any terminal: rows are wrapped between words, and where lines are few the least important rows are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.cli.changes import JobChange
from holdfast.cli.job_view import JobView, ranks_by_node
from holdfast.cli.node_view import JobNode, JobNodes
from holdfast.cli.output import clock, colour_of, first_lines, wrapped
from holdfast.cli.recovery_view import Recovery
from holdfast.history.models import Incident
from holdfast.plurals import plural
from holdfast.policies.states import State
from holdfast.report.text.wording import NOTHING, count, duration, incident_closed, on_target, rank_count, since, visible

BLOCKS: Final = "▁▂▃▄▅▆▇█"
DONE, TO_DO = "━", "─"
"""Characters of the bar: it is read without colours, too."""
WIDE: Final = 100
"""Columns from which there is room for the loss curve, and for a table of nodes."""
LABELLED: Final = 56
"""Columns from which there is a column of labels."""
LABEL: Final = 11
"""Columns of the labels."""
MIN_BAR: Final = 8
TALL: Final = 40
"""Lines from which nodes have a table."""
LOW: Final = 16
"""Lines below which one line shows what scrolls by, instead of a quarter of them."""
MAX_TABLE_NODES: Final = 8
MAX_INCIDENTS: Final = 8
MIN_INCIDENT_LINES: Final = 2
INCIDENT_SHARE: Final = 5
"""One in so many lines of the terminal may show incidents, and one more."""
REASON_LINES: Final = 2
"""Lines that the reason of a state may take."""
UNREMARKABLE: Final = frozenset({State.RUNNING, State.COMPLETED})
"""States that need no reason."""
CLOSING: Final = "the job has ended; its controller ends the remaining processes and completes the history"
MAX_NODES: Final = 16
"""Nodes that are named at most."""
SEPARATOR: Final = " · "
"""Between the parts of the hint."""
GAP: Final = "   "
"""Between numbers on one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Some lines of the panel."""

    priority: int
    """Where lines are few, sections of a higher number are left out first."""
    lines: Sequence[Text]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the table of incidents."""

    name: str
    min_width: int
    right: bool = False
    rank: int = 0
    """Columns of a higher rank are left out first; 0: always shown."""


COLUMNS: Final = (
    Column(name="#", min_width=2, right=True),
    Column(name="after", min_width=8, right=True, rank=3),
    Column(name="fault", min_width=8),
    Column(name="on", min_width=8, rank=1),
    Column(name="action", min_width=8),
    Column(name="down", min_width=8, right=True),
    Column(name="lost", min_width=4, right=True, rank=2),
)


def max_events(height: int) -> int:
    """Return how many events a terminal of so many lines keeps in the picture after they have scrolled away."""
    return 6 if height >= TALL else 3 if height >= LOW else 1


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw *values* as a row of blocks, newest right; a dot for each that is not a finite number."""
    shown = values[-width:]
    numbers = [value for value in shown if value is not None and math.isfinite(value)]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    size = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int((value - low) / size * 8))] if value is not None and math.isfinite(value) else "·" for value in shown)


class Frame:
    """The picture of one `JobView`, sized when it is drawn."""

    def __init__(self, view: JobView, *, hint: str, notice: str = "", events: Sequence[JobChange] = ()) -> None:
        self._view, self._hint, self._notice, self._events = view, hint, notice, events
        self._recovery = view.recovery
        self.lines = 0
        """Lines of the picture, once it was drawn."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, console.size.height
        below = footer(self._notice, CLOSING if self._view.ended else self._hint, width)
        room = height - (1 if height < LOW else height // 4) - len(below) - 2
        inside = max(1, width - 4)
        sections = list(self._sections(inside, height))
        kept = _most_important(sections, room)
        room -= sum(len(one.lines) for one in kept)
        yield self._panel(kept, width)
        incidents = self._incidents(min(MAX_INCIDENTS, height // INCIDENT_SHARE + 1, room), width)
        if incidents is not None:
            yield incidents
            room -= incidents.row_count + 1 + bool(incidents.caption)
        for line in below:
            yield Text(line, style="yellow" if self._notice else "dim", no_wrap=True)
        self.lines = height - (1 if height < LOW else height // 4) - room

    def _panel(self, sections: Sequence[Section], width: int) -> RenderableType:
        view = self._view
        colour = colour_of(view.state)
        seconds = int(view.elapsed)
        elapsed = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"  # in a unit that does not change while it is watched
        name, most = visible(view.job.name), width - cell_len(view.state) - len(elapsed) - 10
        while cell_len(name) > max(1, most):
            name = name[:-2] + "…" if len(name) > 1 else ""
        title = Text.assemble((name, "bold"), "  ", (view.state, f"bold {colour}"), "  ", elapsed)
        generation = f"  generation {view.generation.number}" if view.generation else ""
        if cell_len(title.plain) + len(generation) + 6 <= width:
            title.append(generation, style="dim")
        lines = [line for one in sections for line in one.lines]
        return Panel(Group(*lines), title=title, title_align="left", border_style=colour, width=width)

    # -- the rows of the panel --------------------------------------------------------------------------------------------

    def _sections(self, width: int, height: int) -> Iterator[Section]:
        """Yield the sections, as they are drawn from top to bottom."""
        view, recovery = self._view, self._recovery
        lines = 1 if height < LOW else 2
        yield Section(priority=0, lines=self._step(width))
        yield Section(priority=1, lines=self._numbers(width))
        if view.reason and view.state not in UNREMARKABLE and (recovery is None or view.state == State.WAITING):
            yield Section(priority=2, lines=_row("reason", view.reason, width, most=REASON_LINES))
        yield from self._nodes(width, height)
        if reserve := view.nodes.reserve:
            yield Section(priority=10, lines=_row("spares", reserve, width, most=lines))
        if view.nodes.removed:
            out = "; ".join(f"{node} {why}" for node, why in view.nodes.removed.items())
            yield Section(priority=11, lines=_row("removed", out, width, most=lines, style="yellow"))
        if not view.ended:
            yield from self._saved(width, lines)
        if texts := view.warning_texts:
            yield Section(priority=8, lines=_row("warning", texts[-1], width, most=lines, style="yellow"))
        if recovery is not None:
            yield from _recovery(recovery, width, lines)
        events = [line for one in self._events for line in _event(one, width)]
        if events:
            yield Section(priority=12, lines=events)

    def _step(self, width: int) -> list[Text]:
        view = self._view
        step, until = (view.step.step if view.step else 0), view.until
        if view.step is None:
            return _row("step", view.no_steps or "none yet", width, most=2)
        if not until:
            return _row("step", view.progress, width, most=1, style="bold")
        share = f"{min(1.0, step / until):.1%}"
        label = "step".ljust(LABEL if width >= LABELLED else 5)
        room = width - len(label) - len(view.progress) - len(share) - 2
        line = Text(no_wrap=True, overflow="ellipsis").append(label, style="dim").append(view.progress, style="bold")
        if room >= MIN_BAR:
            done = min(room, int(room * step / until))
            colour = colour_of(view.state)
            line.append(" ").append(DONE * done, style=colour).append(TO_DO * (room - done), style="dim").append(f" {share}")
        else:
            line.append(f" {share}")
        return [line]

    def _numbers(self, width: int) -> list[Text]:
        """Return the measured numbers, on as many lines as that takes: a cut number is worthless."""
        view = self._view
        parts = [view.loss] if view.loss != NOTHING else [NOTHING] if view.step else []
        parts += [view.speed] if view.speed != NOTHING else []
        parts += [view.throughput] if view.throughput else []
        parts += [f"ETA {duration(view.eta)}"] if view.eta is not None else []
        if not parts:
            return []
        found = _flowing("loss", parts, width, gap=GAP)
        room = width - cell_len(found[-1].plain) - 3
        losses = [step.loss for step in view.steps]
        if width + 4 >= WIDE and room > 8 and (curve := sparkline(losses, min(48, room))):  # noqa: PLR2004 (a shorter curve shows nothing)
            found[-1].append(GAP).append(curve, style="cyan")
        return found

    def _nodes(self, width: int, height: int) -> Iterator[Section]:
        """Yield which node has which ranks, and the nodes that need attention."""
        view, nodes = self._view, self._view.nodes
        if view.generation is None:
            yield Section(priority=5, lines=_row("nodes", "no workers yet", width, most=1))
            return
        in_table = height >= TALL and width + 4 >= WIDE
        yield Section(priority=4, lines=[self._members(width, named=not in_table)])
        if in_table:
            yield Section(priority=9, lines=list(_node_table([*nodes.members, *(nodes.spares or ())], width)))
            return
        most = 1 if height < LOW else 3
        if lines := _attention(nodes, width, most):
            yield Section(priority=5, lines=lines)

    def _members(self, width: int, *, named: bool) -> Text:
        """Return how many ranks are on how many nodes, and if they are to be *named* which: as many as fit on the line."""
        view, nodes = self._view, self._view.nodes
        assert view.generation is not None
        bad = sum(one.is_bad for one in nodes.members)
        state = f", {bad} {'needs' if bad == 1 else 'need'} attention" if bad else ""
        if not bad and nodes.members and all(one.condition == "healthy" for one in nodes.members):
            state = ", healthy" if len(nodes.members) == 1 else ", all healthy"
        size = rank_count(view.generation.world_size, view.generation.facts)
        line = f"{size} on {plural(len(view.members), 'node')}{state}"
        room = width - (LABEL if width >= LABELLED else 6)
        if state and cell_len(line) > room:
            line = plural(len(view.members), "node") + state
        longer = (f"{line}: {ranks_by_node(view.members, most)}" for most in range(min(len(view.members), MAX_NODES) * named, 0, -1))
        line = next((one for one in longer if cell_len(one) <= room), line)
        return _row("nodes", line, width, most=1)[0]

    def _saved(self, width: int, most: int) -> Iterator[Section]:
        """Yield the newest in-memory snapshot, the newest checkpoint, and what a failure would cost now."""
        view, row = self._view, self._view.snapshots
        is_new = row is not None and view.generation is not None and row.generation == view.generation.number
        if view.step is not None and (text := view.newest_snapshot) and (is_new or view.no_snapshots):
            yield Section(priority=9, lines=_row("snapshot", text, width, most=most))
        if saved := view.checkpoint:
            text = f"step {count(saved.step)}, {duration(max(0.0, view.at - saved.at))} ago"
            yield Section(priority=7, lines=_row("checkpoint", text, width, most=1))
        elif view.step is not None:
            yield Section(priority=7, lines=_row("checkpoint", "none yet", width, most=1))
        if view.not_saved:
            yield Section(priority=7, lines=_row("not saved", view.not_saved, width, most=2, style="yellow"))
        if view.risk:
            yield Section(priority=6, lines=_row("at risk", view.risk, width, most=2))

    # -- below the panel --------------------------------------------------------------------------------------------------

    def _incidents(self, room: int, width: int) -> Table | None:
        """Return the table of the newest incidents, without the one that the panel shows; None if there is none, or no room."""
        shown = self._recovery.incident.id if self._recovery is not None else ""
        found = [one for one in self._view.incidents if one.id != shown]
        return _table(found, self._view, room, width) if found and room >= MIN_INCIDENT_LINES else None


def _most_important(sections: Sequence[Section], room: int) -> list[Section]:
    """Return the sections that fit into *room* lines, in their order; the most important one always does."""
    kept = list[int]()
    for place in sorted(range(len(sections)), key=lambda place: sections[place].priority):
        if len(sections[place].lines) <= room or not kept:
            kept.append(place)
            room -= len(sections[place].lines)
    return [sections[place] for place in sorted(kept)]


def _recovery(recovery: Recovery, width: int, most: int) -> Iterator[Section]:
    """Yield the fault and the phases of a recovery, and its action with the reason."""
    one = recovery.incident
    if recovery.is_over:
        text, style = incident_closed(one).removeprefix("incident "), "green"
    else:
        ago = f", {duration(recovery.seconds)} ago" if most > 1 else ""
        text, style = f"{one.number}: {one.kind} on {on_target(one.target)}{ago}", "bold yellow"
    yield Section(priority=2, lines=_row("incident", text, width, most=most, style=style))
    phases = [phase.text for phase in recovery.phases]
    lines = _flowing("recovery", phases, width, gap=SEPARATOR)
    running = recovery.phase
    if most == 1 and len(lines) > 1 and running is not None:
        place = [phase.name for phase in recovery.phases].index(running.name) + 1
        lines = _row("recovery", f"{place}/{len(phases)} {running.text}", width, most=1)
    if running is not None:
        for line in lines:
            line.highlight_words([running.text], style="bold yellow")
    yield Section(priority=3, lines=lines)
    if recovery.action and not recovery.is_over:
        reason = f": {recovery.reason}" if recovery.reason else ""
        yield Section(priority=5, lines=_row("action", f"{recovery.action}{reason}", width, most=most))


def _event(change: JobChange, width: int) -> list[Text]:
    """Return a change that has scrolled away, on one line."""
    text = visible(change.text).splitlines()[0]
    lines = first_lines(f"{clock(change.at)}  {text}", width, 1)
    return [Text(line, style="dim", no_wrap=True) for line in lines]


def _attention(nodes: JobNodes, width: int, most: int) -> list[Text]:
    """Return the nodes that need attention on at most so many lines and one more; those with the same condition share a line."""
    found, lines = nodes.attention, list[Text]()
    for _, text in found[:most]:
        lines += _row("", f"! {text}", width, most=2 if len(found) < most else 1, style="red")
    if hidden := sum(number for number, _ in found[most:]):
        lines += _row("", f"! and {count(hidden)} more", width, most=1, style="red")
    return lines


def _node_table(nodes: Sequence[JobNode], width: int) -> Iterator[Text]:
    """Yield a line for each node, of many for those that need attention and the first others."""
    shown = sorted(nodes, key=lambda one: not one.is_bad)[:MAX_TABLE_NODES] if len(nodes) > MAX_TABLE_NODES else list(nodes)
    name = max((cell_len(visible(one.name)) for one in shown), default=0)
    role = max((cell_len(one.role) for one in shown), default=0)
    for one in shown:
        before = f"{' ' * LABEL}{visible(one.name).ljust(name)}  {one.role.ljust(role)}  "
        state = first_lines(" ".join(visible(one.state or "no check yet").split()), max(1, width - cell_len(before)), 1)[0]
        yield Text(before + state, style="red" if one.is_bad else "", no_wrap=True, overflow="ellipsis")
    hidden = [one for one in nodes if one not in shown]
    if hidden:
        bad = sum(one.is_bad for one in hidden)
        rest = f"{bad} of them {'needs' if bad == 1 else 'need'} attention" if bad else "none of them needs attention"
        yield from _row("", f"and {plural(len(hidden), 'more node', 'more nodes')}, {rest}", width, most=1, style="dim")


def footer(notice: str, hint: str, width: int) -> list[str]:
    """Return the lines below the panel: the whole notice, or as much of the hint as fits."""
    if notice:
        return wrapped(" ".join(visible(notice).split()), width)
    parts = visible(hint).split(SEPARATOR)
    while len(parts) > 1 and cell_len(SEPARATOR.join(parts)) > width:
        parts.pop()
    return first_lines(SEPARATOR.join(parts), width, 1)


def _row(label: str, text: str, width: int, *, most: int, style: str = "") -> list[Text]:
    """Return *text* with its label, on at most so many lines; on a narrow terminal the label has no column of its own."""
    shown = " ".join(visible(text).split())
    if width >= LABELLED:
        parts = first_lines(shown, width - LABEL, most)
        heads = [label.ljust(LABEL), *(" " * LABEL for _ in parts[1:])]
    else:
        head = f"{label} " if label else ""
        parts = first_lines(head + shown, width, most, indent=2)
        heads = [head, *("" for _ in parts[1:])]
        parts[0] = parts[0].removeprefix(head)
    return [
        Text(no_wrap=True, overflow="ellipsis").append(head, style="dim").append(part, style=style or None)
        for head, part in zip(heads, parts, strict=True)
    ]


def _flowing(label: str, parts: Sequence[str], width: int, *, gap: str) -> list[Text]:
    """Return *parts* on as many lines as they take, none of them cut in two."""
    head = label.ljust(LABEL) if width >= LABELLED else f"{label} "
    lines = [head]
    for place, part in enumerate(parts):
        joined = lines[-1] + (gap if place and lines[-1].strip() and lines[-1] != head else "") + part
        if cell_len(joined) > width and lines[-1].strip():
            lines.append(" " * (LABEL if width >= LABELLED else 2) + part)
        else:
            lines[-1] = joined
    found = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
    found[0].stylize("dim", 0, len(head))
    return found


def _table(incidents: Sequence[Incident], view: JobView, room: int, width: int) -> Table:
    """Return the table of the newest *incidents*; where the terminal is narrow, columns of a high rank are left out."""
    table = Table(box=None, padding=(0, 1), show_edge=False, header_style="dim")
    most = room - 1 if len(incidents) <= room - 1 else max(0, room - 2)
    newest = list(incidents)[-most:] if most else []
    rows = [(one, _cells(one, view)) for one in newest]
    shown = list(COLUMNS)
    for column in sorted((one for one in COLUMNS if one.rank), key=lambda one: -one.rank):
        if sum(2 + max([one.min_width, *(cell_len(cells[one.name]) for _, cells in rows)]) for one in shown) > width:
            shown.remove(column)
    for column in shown:
        table.add_column(
            column.name,
            no_wrap=True,
            overflow="ellipsis",
            ratio=None if column.right else 3,
            min_width=column.min_width,
            justify="right" if column.right else "left",
        )
    for one, cells in rows:
        table.add_row(*(cells[column.name] for column in shown), style="" if one.closed_at is not None else "yellow")
    if hidden := len(incidents) - len(newest):
        table.caption, table.caption_justify = f" and {count(hidden)} before", "left"
    return table


def _cells(one: Incident, view: JobView) -> dict[str, str]:
    down = one.downtime_s if one.closed_at is not None else max(0.0, view.at - one.fault_at)
    return {
        "#": str(one.number),
        "after": since(one.fault_at, view.job.at),
        "fault": visible(one.kind),
        "on": visible(on_target(one.target)),
        "action": visible(one.action or NOTHING),
        "down": duration(down),
        "lost": NOTHING if one.steps_lost is None else str(one.steps_lost),
    }
