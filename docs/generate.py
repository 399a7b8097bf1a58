"""Write the pages of docs/ that are drawn from the code: `python -m docs.generate`, or `make docs`."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from enum import StrEnum
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from detectors.all_kinds import by_area, by_place
from holdfast.spec.problems import model_in
from policies.node_states import NODE_MOVES, NodeEvent
from policies.states import TERMINAL, TRANSITIONS, Event, State

DOCS: Final = Path(__file__).parent

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)

HEAD: Final = "<!-- Written by `make docs`; a change made here is lost. -->\n"

VARIABLES: Final[Mapping[str, str]] = {
    "HOLDFAST_HOME": "Folder of all that Holdfast keeps: jobs, local clusters, the history; of this user alone. Default: `~/.holdfast`.",
    "HOLDFAST_HISTORY": "Database URL of the history, `sqlite:///...` or `postgresql://...`. Default: `history.db` in the folder above.",
    "HOLDFAST_LOG": "`json` has the command line, flows and agents log one JSON object a line. Default: `text`.",
    "HOLDFAST_SIGTERM": "What SIGTERM to a flow means: `stop` stops the job, `detach` ends the flow and not the job. Default: `stop`.",
    "HOLDFAST_CONTROLLER_HEARTBEAT": "Seconds between two heartbeats of a controller; when they stop, an alert is sent. Default: `20`.",
    "HOLDFAST_MEMSTORE_ROOT": "Folder on a memory file system below which nodes keep training state. Default: `/dev/shm`.",
    "HOLDFAST_KERNEL_LOG": "Where an agent follows the kernel's log: the host's, or a syslog daemon's file. Default: `/dev/kmsg`.",
    "HOLDFAST_NODE_ROOT": "Where an agent finds the `/proc` and `/sys` of its node, if the host's are mounted elsewhere. Default: `/`.",
    "HOLDFAST_ADDED": "Set by `holdfast run` for a flow: names of the variables that it has added, which no script is given.",
    "HOLDFAST_PREFECT_STANDS_IN": "Set by `holdfast run` for a flow with a Prefect server of its own: the one that was named and is away.",
    "HOLDFAST_PREFECT_STANDS_IN_AUTH": "Set beside it: user and password for the one that was named.",
}
"""What a person may set, and what it means."""

WORKER_VARIABLES: Final[Mapping[str, str]] = {
    "HOLDFAST_SOCKET": "Unix socket of the agent; where it is missing, `import holdfast` runs without one.",
    "HOLDFAST_JOB": "Name of the job.",
    "HOLDFAST_NODE": "Name of the node.",
    "HOLDFAST_AGENT": "Id of the agent that started it: whatever is left of an agent that was killed carries it.",
    "HOLDFAST_NODE_MARK": "Folder of the node: marks every process that belongs to it, so that none is overlooked when the node is fenced.",
    "HOLDFAST_GENERATION": "Number of the membership that this worker belongs to.",
    "HOLDFAST_STARTED": "When the worker was started, in seconds since 1970.",
    "HOLDFAST_CHECKPOINT_DIR": "Folder of the checkpoints.",
    "HOLDFAST_SAVE_EVERY": "Steps between two checkpoints; 0 saves none.",
    "HOLDFAST_WIDTH": "Ranks of the job at its full width: how large a share of a step's batch may be while fewer are there.",
    "HOLDFAST_SKIP_STEPS": "Steps that are done without the batches that they would be done with.",
    "HOLDFAST_INVALIDATED": "`STEP:GENERATION`, separated by commas: states of so many steps and more of earlier generations are spoiled.",
    "HOLDFAST_KEEP": "Checkpoints kept.",
    "HOLDFAST_MEMSTORE": "Folder in the node's memory for snapshots of the state; missing where none is kept.",
    "HOLDFAST_CHECKPOINT_WRITER": "1 where the agent has checkpoints written out of the memory store, beside training.",
    "HOLDFAST_SAVE_BANDWIDTH": "Bytes a second that this node may write for checkpoints beside training; missing: no limit.",
    "HOLDFAST_MEMSTORE_LIMIT": "Bytes that all snapshots and replicas on this node may take.",
    "HOLDFAST_MEMORY_SERVERS": "Node to host and port of what serves its snapshots, as JSON: the own node, and those without ranks.",
    "HOLDFAST_CHECK_EVERY": "Steps between two comparisons of the parameters of ranks that hold copies of each other; `auto` or 0.",
    "HOLDFAST_MEMORY_EVERY": "Steps between two snapshots in memory; 0 takes none.",
    "HOLDFAST_MEMORY_OVERHEAD": "Share of the training time that snapshots may take.",
    "HOLDFAST_MEMORY_POLICY": "`skip` or `pause`: what to do when a copy does not fit into the idle time.",
    "HOLDFAST_MEMORY_PAUSE": "Seconds that one step may be held up at most, under `pause`.",
    "HOLDFAST_TOKEN": "Secret of the job, by which its workers know each other.",
    "HOLDFAST_HOT_SPARE": "Number of a hot spare: a process that warms up and waits for a rank; missing in every other.",
    "HOLDFAST_ROLES": "Ranks that do the same work on different data, as JSON: one list a role.",
    "HOLDFAST_WAITING_ROLE": "The role in which a hot spare waits, by its place among the roles.",
    "HOLDFAST_RECORDINGS": "Folder of what the first ranks recorded, from which a hot spare warms up without peers.",
    "HOLDFAST_WARMED": "Roles in which a hot spare has warmed up already, as JSON: the runtime's own note.",
    "HOLDFAST_FRESH": "1 in a process that takes over a lost rank without having been a hot spare.",
}
"""What the agent sets for each worker, beside the variables of `torchrun`."""

EVALUATION_VARIABLES: Final[Mapping[str, str]] = {
    "HOLDFAST_CHECKPOINT": "Folder of the checkpoint to evaluate, in the format of `torch.distributed.checkpoint`.",
    "HOLDFAST_CHECKPOINT_STEP": "Steps done when it was taken.",
    "HOLDFAST_METRICS": "File that the evaluation may write its metrics to, as a JSON object; it may print them instead.",
}
"""What `evaluate_checkpoint` sets for an evaluation."""

TITLED: Final = (
    ("Environment variables", VARIABLES),
    ("Set for each worker", WORKER_VARIABLES),
    ("Set for an evaluation", EVALUATION_VARIABLES),
)


def table(*rows: tuple[str, ...]) -> str:
    """Return *rows* as a table in Markdown; the first is its head."""
    head, *body = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body]) + "\n"


def said_under(kind: type[StrEnum]) -> dict[str, str]:
    """Return the sentence that stands under each member of *kind* in its source."""
    lines = next(node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    said = {}
    for member, below in pairwise(lines):
        match member, below:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                said[name] = text
    return said


def diagram(table_of: Mapping[tuple[S, E], S]) -> Iterator[str]:
    """Draw a table of moves: one arrow for all the events that lead from one state to another."""
    words = {state: state.replace("-", "_") for (state, _) in table_of}  # a dash would end a name in the diagram
    words |= {state: state.replace("-", "_") for state in table_of.values()}
    yield f"    [*] --> {words[next(iter(table_of))[0]]}"
    for before, after in dict.fromkeys((state, after) for (state, _), after in table_of.items()):
        events = [event for (state, event), to in table_of.items() if (state, to) == (before, after)]
        yield f"    {words[before]} --> {words[after]}: {', '.join(events)}"
    yield from (f"    {words[state]} --> [*]" for state in words if state not in {before for before, _ in table_of})


def states_page() -> str:
    """Show the life of a job, then that of a node: diagram, table of moves, meaning of the events."""
    said, of_nodes = said_under(Event), said_under(NodeEvent)
    table_of = {(state, event): after for state, outcomes in TRANSITIONS.items() for event, after in outcomes.items()}
    moves = [(state, f"`{event}`", after) for (state, event), after in table_of.items()]
    node_moves = [(state, f"`{event}`", after) for (state, event), after in NODE_MOVES.items()]
    return "\n".join([
        HEAD,
        "# The life of a job\n",
        "A move that is not in this table is refused.",
        "The history keeps every move with its reason; the newest one is the state of the job.",
        f"A job ends as {' or '.join(state for state in State if state in TERMINAL)}.\n",
        "```mermaid\nstateDiagram-v2",
        *diagram(table_of),
        "```\n",
        table(("State", "Event", "Next state"), *moves),
        "## Events\n",
        table(("Event", "Meaning"), *((f"`{event}`", said[event.name]) for event in Event)),
        "# The life of a node\n",
        "Jobs are given nodes that are healthy, or suspect where there is no better one; in every other state a node is isolated.",
        "What keeps a node in its state is its holds, of which it may have several: [who may lift them](architecture.md#out-of-service).\n",
        "```mermaid\nstateDiagram-v2",
        *diagram(NODE_MOVES),
        "```\n",
        table(("State", "Event", "Next state"), *node_moves),
        "## Events of nodes\n",
        table(("Event", "Meaning"), *((f"`{event}`", of_nodes[event.name]) for event in NodeEvent)),
    ])  # fmt: skip


def faults_page() -> str:
    """Show the catalogue: what each kind is, how it is seen, what it asks for."""
    parts = [
        HEAD,
        "# The fault catalogue\n",
        "Every kind of fault that Holdfast can name.",
        "The recommended action is what a fault asks for; the attribution is the part that probably caused it.",
        "`holdfast faults show KIND` adds an unhealthy and a healthy sample; `holdfast classify LOG` finds the kinds seen in logs.\n",
        table(("Area", "Kinds"), *((area, str(number)) for area, number in by_area().items())),
    ]
    for (area, component), kinds in groupby(by_place(), key=lambda one: (one.area, one.component)):
        rows = [
            (
                f"[`{one.id}`]({one.reference.removeprefix('docs/')})",
                one.title, one.source, f"`{one.recommended_action}`", f"`{one.attributed_to}`", one.action,
                ", ".join(f"`{other}`" for other in one.confused_with),
            )
            for one in kinds
        ]  # fmt: skip
        head = ("Kind", "What it is", "Seen by", "Recommended action", "Attributed to", "What to do", "Often taken for")
        parts += [f"## {area}: {component}\n", table(head, *rows)]
    return "\n".join(parts)


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield *command* and all below it, each with the words that call it."""
    yield path, command
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from commands(child, f"{path} {name}")


def cli_page() -> str:
    """Show `--help` of every command."""
    from holdfast.cli import app  # noqa: PLC0415 (the other pages do not need it)

    parts = [HEAD, "# The command line\n"]
    for path, command in commands(app, "holdfast"):
        settings = {**app.context_settings, "terminal_width": 100, "max_content_width": 100}  # as the program itself reads them
        context = click.Context(command, info_name=path, **settings)
        parts.append(f"## `{path}`\n\n```text\n{command.get_help(context).rstrip()}\n```\n")
    return "\n".join(parts)


def fields_of(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """Return the fields of *model*, each with its name."""
    return list(model.model_fields.items())


def models(top: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield *top* and the models in its fields, each with the field it stands in."""
    yield path, top
    for name, field in fields_of(top):
        if (inner := model_in(field.annotation)) is not None:
            yield from models(inner, f"{path}.{name}".lstrip("."))


PLAIN: Final[Mapping[Any, str]] = {
    Any: "anything",
    str: "text",
    int: "whole number",
    float: "number",
    bool: "yes or no",
    timedelta: "duration",
}


def named(kind: Any) -> str:  # noqa: ANN401 (any annotation is a type here)
    """Return the type *kind* in a reader's words."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(named(member) for member in inner if member is not types.NoneType)
    if origin is tuple and inner[-1] is not ...:
        return f"({', '.join(named(one) for one in inner)})"
    if origin in {list, tuple}:
        return f"list of {named(inner[0])}"
    if origin is dict:
        return f"{named(inner[0])} to {named(inner[1])}"
    return named(inner[0]) if origin is typing.Annotated else PLAIN.get(kind) or str(kind.__name__).lstrip("_")


def duration(value: timedelta) -> str:
    """Return *value* as one writes it in a job file."""
    for unit, seconds in (("d", 86400), ("h", 3600), ("m", 60)):
        if value and value % timedelta(seconds=seconds) == timedelta():
            return f"{value // timedelta(seconds=seconds)}{unit}"
    return f"{value.total_seconds():g}s"


def default(field: FieldInfo) -> str:
    """Return the default of *field* as one writes it, or what its absence means."""
    value = field.get_default(call_default_factory=True, validated_data={}) if not field.is_required() else ...
    if value is ...:
        return "(required)"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, timedelta):
        return f"`{duration(value)}`"
    return "(empty)" if value in (None, [], {}) else f"`{value}`"


def settings_page() -> str:
    """List every field of what a user writes, then the environment variables."""
    from holdfast.spec import LocalCluster, SlurmCluster, SshCluster, TrainingJob  # noqa: PLC0415 (the other pages do not need it)
    from holdfast.spec.policy import PolicyFile  # noqa: PLC0415 (as above)

    parts = [HEAD, "# Settings\n", "A job file is YAML or Python. Durations are `90s`, `5m`, `2h`, `1d`, or a number of seconds.\n"]
    tops: tuple[tuple[str, type[BaseModel]], ...] = (
        ("Job", TrainingJob),
        ("Cluster of `kind: local`", LocalCluster),
        ("Cluster of `kind: ssh`", SshCluster),
        ("Cluster of `kind: slurm`", SlurmCluster),
        ("Policy file", PolicyFile),
    )
    for title, top in tops:
        for path, model in models(top):
            parts += [f"#{'##' if path else '#'} {f'`{path}`' if path else title}\n", f"{(model.__doc__ or '').strip()}\n"]
            rows = [(f"`{name}`", named(field.annotation), default(field), field.description or "") for name, field in fields_of(model)]
            parts.append(table(("Field", "Type", "Default", "Meaning"), *rows))
    for title, names in TITLED:
        parts += [f"## {title}\n", table(("Variable", "Meaning"), *((f"`{name}`", text) for name, text in names.items()))]
    return "\n".join(parts)


def events_page() -> str:
    """Show the events that Prefect gets: what each is about, what it is related to, and what it says."""
    from holdfast.prefect.event_kinds import RESOURCES, rows  # noqa: PLC0415 (the other pages do not need it)

    return "\n".join([
        HEAD,
        "# Events\n",
        "What Holdfast sends to the Prefect server: for automations to act on, and for the event feed of its UI.",
        "Each event has the job or the node that it is about as its resource, and is related to the others that apply.",
        "Notifications about nodes alone have the cluster as their resource.\n",
        table(("Role", "Resource id"), *((role, f"`{ident}`") for role, ident in RESOURCES.items())),
        table(("Event", "Meaning", "About", "Related to", "Payload"), *rows()),
    ])  # fmt: skip


def first_line(documented: object) -> str:
    """Return the first line that stands under a class or a method."""
    return (documented.__doc__ or "").strip().splitlines()[0]


def handled(*handlers: Callable[..., Any] | None) -> str:
    """Return what each handler does, with its name."""
    return "<br>".join(f"{first_line(handler)} (`{handler.__qualname__}`)" for handler in handlers if handler is not None)


def fields_in_words(fields: Mapping[str, tuple[Any, bool]]) -> str:
    """List fields by their types and whether each is needed; those that may be left out stand in brackets."""
    told = {f"`{name}`: {named(kind)}": needed for name, (kind, needed) in fields.items()}
    return ", ".join(text if needed else f"[{text}]" for text, needed in told.items())


def fields_of_record(record: type[BaseModel]) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field of *record*, and whether it is needed."""
    return {name: (field.annotation, field.is_required()) for name, field in fields_of(record)}


def fields_of_message(declared: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """Return the same of a handler of the agent, or of a record in its messages; the fields of a plan or a table stand in the message."""
    from holdfast.agent.schema import fields_of as declared_fields  # noqa: PLC0415 (the other pages do not need it)

    found: dict[str, tuple[Any, bool]] = {}
    for name, field in declared_fields(declared).items():
        if name in {"plan", "table"}:
            found |= fields_of_message(typing.get_args(field.hint)[0])
        else:
            found[name.removesuffix("_")] = field.hint, field.required
    return found


def records_in(fields: Mapping[str, tuple[Any, bool]]) -> Iterator[type[BaseModel]]:
    """Yield the records that *fields* hold, and those within them."""
    for kind, _ in fields.values():
        if (inner := model_in(kind)) is not None:
            yield inner
            yield from records_in(fields_of_record(inner))


def protocol_page() -> str:
    """Show events, commands and the messages of workers: fields, who sends, who handles."""
    from holdfast.agent.commands import COMMANDS  # noqa: PLC0415 (the other pages do not need it)
    from holdfast.agent.monitor.preemption import PreemptionSettings  # noqa: PLC0415 (as above)
    from holdfast.agent.worker_messages import KINDS  # noqa: PLC0415 (as above)
    from holdfast.agent.workers.in_process_recovery import RankAssignment  # noqa: PLC0415 (as above)
    from holdfast.agent.workers.spawner import MemstoreSettings  # noqa: PLC0415 (as above)
    from holdfast.control.agents.schema import ANSWERS  # noqa: PLC0415 (as above)
    from holdfast.control.supervisor.event_table import EVENTS  # noqa: PLC0415 (as above)

    records, rows = dict[str, type[BaseModel]](), []
    for kind in EVENTS.values():
        own = {
            name: one
            for name, one in fields_of_record(kind.fields).items()
            if name != "event" and (one[1] or name not in {"at", "generation"})
        }
        records |= {one.__name__: one for one in records_in(own)}
        row = (f"`{kind.name}`", first_line(kind.fields), ", ".join(kind.senders), fields_in_words(own), handled(kind.state, kind.record))
        rows.append(row)
    orders = []
    for command in COMMANDS.values():
        answer = fields_of_record(ANSWERS[command.name]) if command.name in ANSWERS else {}
        records |= {one.__name__.lstrip("_"): one for one in records_in(answer)}
        checked = fields_in_words(answer) if answer else ", ".join(f"`{name}`" for name in command.answer)
        orders.append((f"`{command.name}`", handled(command.run), fields_in_words(fields_of_message(command.run)), checked))
    messages = [
        (f"`{one.name}`", ", ".join(one.senders), fields_in_words(fields_of_message(one.fields or one.handle)), handled(one.handle))
        for one in KINDS
    ]
    return "\n".join([
        HEAD,
        "# The protocol\n",
        "One JSON object a line. The controller gives commands; the agent answers each, and sends events.",
        "Workers, hot spares and the checkpoint writer send messages to the agent of their node.",
        "Fields in brackets may be left out.\n",
        "## Events\n",
        "An event that is not in this table is ignored. One with a wrong field is dropped, and recorded once for each node.",
        "`generation` is the one that an event belongs to: an event of another one changes nothing.\n",
        table(("Event", "Meaning", "Sent by", "Fields", "What the controller does"), *rows),
        "## Commands\n",
        "Besides its fields a command has its name in `do`, its number in `id`, and `session`, `job` and `epoch` of the controller.",
        "The answer has the number in `re`, `ok`, and `why` where the command was refused.",
        "Fields of answers whose types are shown are checked by the controller.\n",
        table(("Command", "What the agent does", "Fields", "Fields of the answer"), *orders),
        "## Messages to the agent\n",
        "Besides its fields a message has its name in `t`, and where it is answered its number in `id`; the answer has that in `re`.",
        "The agent notes a malformed or unknown message in its log, and drops it.\n",
        table(("Message", "Sent by", "Fields", "What the agent does"), *messages),
        "## Records\n",
        table(
            ("Record", "Fields"),
            *((name, fields_in_words(fields_of_record(one))) for name, one in records.items()),
            *((one.__name__, fields_in_words(fields_of_message(one))) for one in (RankAssignment, MemstoreSettings, PreemptionSettings)),
        ),
    ])  # fmt: skip


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "states.md": states_page,
    "faults.md": faults_page,
    "cli.md": cli_page,
    "settings.md": settings_page,
    "events.md": events_page,
    "protocol.md": protocol_page,
}
"""Page to what draws it."""


def main() -> None:
    """Write every page that differs."""
    for name, draw in PAGES.items():
        page, text = DOCS / name, draw()
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
            print(f"docs/{name} written")


if __name__ == "__main__":
    main()
