"""What agents answer to commands, checked before anything is built on it: a node in the wrong hands must not end the flow."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from holdfast.control.agents.fields import Count, Digits, Groups, Record, Whole
from holdfast.protocol import Message

_Home = Annotated[tuple[str, Count], Field(strict=False)]
"""Host and port; JSON has no tuples."""


class _MemstoreAnswer(Record):
    port: Count | None = None
    to: list[_Home] = Field(default_factory=list)


class _Roles(Record):
    roles: Groups | None = None
    copies: Groups | None = None


class _Standby(Record):
    role: Count | None = None
    ready: bool = False


class _About(Record):
    agent: str
    job: str | None
    epoch: Count = 0
    generation: Count
    since: Count
    membership: dict[str, list[Count]]
    workers: dict[Digits, Count | None]
    grouped: list[Count]
    standbys: dict[Digits, _Standby]
    roles: _Roles | None
    memory: _MemstoreAnswer | None


class _Attached(Record):
    agent: str
    since: Whole


class _Prepared(Record):
    memory: _MemstoreAnswer | None = None


class _Port(Record):
    port: Annotated[int, Field(gt=0, lt=2**16)]


class _Held(Record):
    name: str
    rank: Count
    world: Count
    step: Count
    lineage: Whole


class _Stored(Record):
    snapshots: list[_Held]


class _Living(Record):
    generation: Count
    ranks: list[Count]


class _Token(Record):
    token: str


class _Deposited(Record):
    records: list[dict[str, Any]]
    next: Count | None


ANSWERS: Final[dict[str, type[Record]]] = {
    "about": _About,
    "attach": _Attached,
    "prepare": _Prepared,
    "port": _Port,
    "stored": _Stored,
    "living": _Living,
    "token": _Token,
    "deposited": _Deposited,
}
"""Commands of whose answers a flow reads more than whether they were carried out."""


def complaint(command: str, answer: Message) -> str:
    """Say what is wrong with an agent's answer to *command*; empty when it can be used as it is."""
    kind = ANSWERS.get(command)
    try:
        if kind is not None:
            kind.of(answer)
    except ValueError as error:
        return str(error)
    return ""
