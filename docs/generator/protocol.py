"""The page of the protocol between controller, agents and workers."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from docs.generator.markdown import first_line, named, page, table
from holdfast.spec.files.problems import model_in


def handled(*handlers: Callable[..., Any] | None) -> str:
    """Return what each handler does, with its name."""
    return "<br>".join(f"{first_line(handler)} (`{handler.__qualname__}`)" for handler in handlers if handler is not None)


def fields_in_words(fields: Mapping[str, tuple[Any, bool]]) -> str:
    """List fields by their types and whether each is needed; those that may be left out stand in brackets."""
    told = {f"`{name}`: {named(kind)}": needed for name, (kind, needed) in fields.items()}
    return ", ".join(text if needed else f"[{text}]" for text, needed in told.items())


def fields_of_record(record: type[BaseModel]) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field of *record*, and whether it is needed."""
    return {name: (field.annotation, field.is_required()) for name, field in record.model_fields.items()}


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
    return page(
        "# Protocol\n",
        "Controller, agents and workers exchange one JSON object per line over unix sockets. This page is for contributors.",
        "The controller sends commands; the agent replies to each, and sends events.",
        "Workers, hot spares and the checkpoint writer send messages to the agent of their node.",
        "Fields in brackets are optional.\n",
        "## Events\n",
        "The controller ignores an unknown event. It drops an event with a wrong field, and records that once per node.",
        "`generation` is the generation that sent the event; events of other generations change nothing.\n",
        table(("Event", "Meaning", "Sent by", "Fields", "What the controller does"), *rows),
        "## Commands\n",
        "In addition to its fields, a command has its name in `do`, its number in `id`, and the controller's `session`, `job` and `epoch`.",
        "The reply has the number in `re`, `ok`, and `why` if the command was refused.",
        "The controller checks the fields of replies whose types are shown.\n",
        table(("Command", "What the agent does", "Fields", "Fields of the reply"), *orders),
        "## Messages to the agent\n",
        "In addition to its fields, a message has its name in `t`. One with a reply has a number in `id`, which the reply has in `re`.",
        "The agent logs and drops a malformed or unknown message.\n",
        table(("Message", "Sent by", "Fields", "What the agent does"), *messages),
        "## Records\n",
        table(
            ("Record", "Fields"),
            *((name, fields_in_words(fields_of_record(one))) for name, one in records.items()),
            *((one.__name__, fields_in_words(fields_of_message(one))) for one in (RankAssignment, MemstoreSettings, PreemptionSettings)),
        ),
    )
