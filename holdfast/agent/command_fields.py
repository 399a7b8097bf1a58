"""What the commands of a controller carry, one record each: fields that are checked as they are taken out of the message."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Self

from holdfast.agent import schema
from holdfast.agent.monitor.preemption import PreemptionSettings
from holdfast.agent.workers.spawner import SpawnPlan
from holdfast.protocol import Message

LEAVE_SECONDS: Final = 30.0
"""How long a worker whose rank has been given to another may take to leave, unless the command says so."""


def _environments_by(key: str) -> Callable[[Message, str], dict[int, dict[str, str]]]:
    def take(message: Message, name: str) -> dict[int, dict[str, str]]:
        return {schema.whole(item, key): schema.environment(item, "environment") for item in schema.objects(message, name)}

    return take


# Each type has beside it what takes such a field out of a message, or refuses it by its name.
Whole = Annotated[int, schema.whole]
Positive = Annotated[int, partial(schema.whole, least=1)]
Signal = Annotated[int, schema.signal_number]
Seconds = Annotated[float, schema.seconds]
Text = Annotated[str, schema.text]
Path = Annotated[str, schema.path]
Numbers = Annotated[list[int], schema.numbers]
Object = Annotated[Message, schema.mapping]
Objects = Annotated[list[Message], schema.objects]
Addresses = Annotated[list[tuple[str, int]], schema.addresses]
Membership = Annotated[schema.WireMembership, schema.membership]
NewRanks = Annotated[dict[int, dict[str, str]], _environments_by("rank")]
"""Processes to start: the environment of each, by its rank."""
NewStandbys = Annotated[dict[int, dict[str, str]], _environments_by("id")]
Plan = Annotated[SpawnPlan, lambda message, _name: SpawnPlan.of(message)]
"""In fields of the command itself."""
Notices = Annotated[PreemptionSettings, lambda message, name: PreemptionSettings.of(schema.mapping(message, name))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """No fields."""

    @classmethod
    def of(cls, message: Message) -> Self:
        """Return the fields in *message*; raise `BadField` for the first that is missing or wrong."""
        return cls(**{name: take(message, name) for name, take in _takers(cls).items()})


def _takers(kind: type[Fields]) -> Mapping[str, Callable[[Message, str], Any]]:
    """Return what takes each field of *kind* out of a message; a field that may be None may be missing."""
    found: dict[str, Callable[[Message, str], Any]] = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        needed = hasattr(hint, "__metadata__")
        take = (hint if needed else typing.get_args(hint)[0]).__metadata__[0]
        found[name] = take if needed else partial(schema.maybe, take)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(Fields):
    """The number of the last event that is known already."""

    since: Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare(Fields):
    """How the job's workers are run, in fields of the command itself, and which controller says so."""

    epoch: Whole | None
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Fields):
    """A generation, and the environment of each rank of this node."""

    generation: Whole
    membership: Membership
    workers: NewRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Fields):
    """A signal, and the seconds after which what is left is killed."""

    generation: Whole
    signal: Signal
    grace: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate(Fields):
    """Where to copy snapshots to, and with how many bytes a second at most."""

    to: Addresses
    bandwidth: Whole | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(Fields):
    """A question for the workers of this node, or for those *ranks*."""

    generation: Whole
    question: Object
    ranks: Numbers | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush(Fields):
    """Snapshots that are to become parts of a checkpoint in a directory."""

    generation: Whole
    world: Positive
    keep: Positive
    directory: Path
    snapshots: Objects


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionSource(Fields):
    """Where notices of the node's end are to be seen."""

    notice: Notices


@dataclass(frozen=True, slots=True, kw_only=True)
class Token(Fields):
    """The job whose secret is wanted."""

    job: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Deposit(Fields):
    """Rows that the history does not take now."""

    records: Objects


@dataclass(frozen=True, slots=True, kw_only=True)
class Deposited(Fields):
    """The row from which on they are wanted back."""

    since: Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon(Fields):
    """The ranks that are lost, and those that are to be killed."""

    generation: Whole
    lost: Numbers
    kill: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """Who is to hold a rank in the next generation."""

    rank: int
    source: str
    """``kept``, ``standby`` or ``fresh``."""
    standby: int | None
    environment: dict[str, str]

    @classmethod
    def of(cls, item: Message, sources: tuple[str, ...]) -> RankAssignment:
        """Return the seat that an item of a command tells of; raise `BadField` when it is none."""
        source = schema.text(item, "from")
        if source not in sources:
            raise schema.BadField("from", f"one of {', '.join(sources)}", source)
        return cls(
            rank=schema.whole(item, "rank"),
            source=source,
            standby=schema.whole(item, "standby") if source == "standby" else None,
            environment=schema.maybe(schema.environment, item, "environment") or {},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTableUpdate:
    """The next generation, as far as it is this node's."""

    generation: int
    membership: schema.WireMembership
    workers: tuple[RankAssignment, ...]
    leave: float = LEAVE_SECONDS

    @classmethod
    def of(cls, message: Message, *sources: str) -> RankTableUpdate:
        """Return the table in a command; raise `BadField` when it is none."""
        seats = tuple(RankAssignment.of(item, sources) for item in schema.objects(message, "workers"))
        ranks = [seat.rank for seat in seats]
        standbys = [seat.standby for seat in seats if seat.standby is not None]
        if len(set(ranks)) < len(ranks) or len(set(standbys)) < len(standbys):
            raise schema.BadField("workers", "a list that names each rank and each standby once", message["workers"])
        leave = schema.maybe(schema.seconds, message, "leave")
        return cls(
            generation=schema.whole(message, "generation"),
            membership=schema.membership(message, "membership"),
            workers=seats,
            leave=LEAVE_SECONDS if leave is None else leave,
        )


NewTable = Annotated[RankTableUpdate, lambda message, _name: RankTableUpdate.of(message, "kept", "standby", "fresh")]
"""In fields of the command itself."""
PlannedTable = Annotated[RankTableUpdate, lambda message, _name: RankTableUpdate.of(message, "kept", "standby")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup(Fields):
    """The next generation, in fields of the command itself, and facts for each of its workers."""

    facts: Object
    table: NewTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch(Fields):
    """The next generation, in fields of the command itself."""

    table: PlannedTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Standby(Fields):
    """The environment of each standby that is wanted."""

    standbys: NewStandbys


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Fields):
    """Standbys that are not wanted any more."""

    standbys: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell(Fields):
    """A message for ranks and standbys."""

    message: Object
    ranks: Numbers
    standbys: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace(Fields):
    """Steps between two checkpoints."""

    generation: Whole
    every: Positive
