"""The types of the fields in agents' messages, and the answers to commands as typed records.

Every message is checked before anything is built on it: a damaged event log or a hostile node must not end the controller.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from holdfast.protocol import Message

MAX_INTEGER: Final = 2**53
"""Larger than any count of ours; databases hold no number beyond 64 bits."""

Integer = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Digits = Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")]
"""A number as the key of a JSON object."""
Groups = list[list[Count]]


class Record(BaseModel):
    """Fields that a message must have; others are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)

    @classmethod
    def of(cls, message: object) -> Self:
        """Return the record in *message*; raise ``ValueError`` that names the first invalid field, without its value."""
        try:
            return cls.model_validate(message)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


_ReplicaNode = Annotated[tuple[str, Count], Field(strict=False)]
"""Host and port; JSON has no tuples."""


class _Memstore(Record):
    port: Count | None = None
    to: list[_ReplicaNode] = Field(default_factory=list)


class _Roles(Record):
    roles: Groups | None = None
    copies: Groups | None = None


class _HotSpare(Record):
    role: Count | None = None
    ready: bool = False
    local_rank: str | None = None


class _About(Record):
    agent: str
    job: str | None
    epoch: Count = 0
    generation: Count
    since: Count
    membership: dict[str, list[Count]]
    workers: dict[Digits, Count | None]
    grouped: list[Count]
    hot_spares: dict[Digits, _HotSpare]
    roles: _Roles | None
    memory: _Memstore | None


class _Attached(Record):
    agent: str
    since: Integer


class _Prepared(Record):
    memory: _Memstore | None = None


class _Port(Record):
    port: Annotated[int, Field(gt=0, lt=2**16)]


class _Snapshot(Record):
    name: str
    rank: Count
    world: Count
    step: Count
    lineage: Integer


class _Stored(Record):
    snapshots: list[_Snapshot]


class _Living(Record):
    generation: Count
    ranks: list[Count]


class _StartedHotSpares(Record):
    refused: dict[Digits, str] = Field(default_factory=dict)


class _Token(Record):
    token: str


class _OutboxRows(Record):
    records: list[dict[str, Any]]
    next: Count | None


ANSWERS: Final[dict[str, type[Record]]] = {
    "about": _About,
    "attach": _Attached,
    "prepare": _Prepared,
    "port": _Port,
    "stored": _Stored,
    "living": _Living,
    "start-hot-spares": _StartedHotSpares,
    "token": _Token,
    "outbox-read": _OutboxRows,
}
"""The commands whose answers the controller reads, beyond whether they were carried out."""


def answer_error(command: str, answer: Message) -> str:
    """Return what is wrong with an agent's answer to *command*; empty when it is valid."""
    kind = ANSWERS.get(command)
    try:
        if kind is not None:
            kind.of(answer)
    except ValueError as error:
        return str(error)
    return ""
