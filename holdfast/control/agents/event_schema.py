"""What agents say, checked before anything is built on it: a damaged journal or a node in the wrong hands must not end the flow.

Of each field that the flow reads the type is checked, whatever the event; which fields an event needs, its taker says. What is not
named here is let through, so that agents may tell more than this version of the flow understands.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from holdfast.protocol import Message

MOST: Final = 2**53
"""Larger than any count of ours; databases hold no number beyond 64 bits."""

Whole = Annotated[int, Field(ge=-MOST, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Digits = Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")]
"""A number as the key of a JSON object."""
Groups = list[list[Count]]
_Row = Annotated[tuple[Count, Real, Real | None, float | None], Field(strict=False)]
"""A step, when it ended, its seconds and its loss; JSON has no tuples."""
_Home = Annotated[tuple[str, Count], Field(strict=False)]


class _Said(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Raised(_Said):
    type: str = ""
    message: str = ""
    traceback: str | None = None
    errno: Whole | None = None
    step: Count | None = None


class _Snapshot(_Said):
    step: Count | None = None
    age: Real | None = None
    every: Count | None = None
    size: Count | None = None
    why: str | None = None


class _Check(_Said):
    step: Count
    digest: str
    piece: str


class _Beat(_Said):
    step: Count | None
    age: Real
    section: str | None
    section_limit: Real | None
    managed: bool
    process: str
    wait: str
    output_age: Real | None
    printed: bool = True
    snapshot: _Snapshot = _Snapshot()
    replica: Count | None = None
    paces: list[Annotated[list[Real], Field(min_length=4, max_length=4)]] = []
    checks: list[_Check] = []


class _Event(_Said):
    event: Annotated[str, StringConstraints(max_length=64)]
    at: Real | None = None
    generation: Count | None = None
    for_generation: Count | None = None
    rank: Count | None = None
    id: Count | None = None
    pid: Count | None = None
    step: Count | None = None
    until: Count | None = None
    code: Whole | None = None
    signal: Whole | None = None
    errno: Whole | None = None
    ended: Real | None = None
    loss: float | None = None
    seconds: Real | dict[str, Real] | None = None
    size: Count | None = None
    beside: Real | None = None
    over: Count | None = None
    why: str | None = None
    path: str | None = None
    name: str | None = None
    kind: str | None = None
    group: str | None = None
    source: str | None = None
    reason: str | None = None
    quote: str | None = None
    part: str | None = None
    bytes: Count | None = None
    bandwidth: Real | None = None
    rebuilt: Count | None = None
    rss: Count | None = None
    coverage: dict[str, Any] | None = None
    grew: dict[str, Any] | None = None
    output: str | None = None
    oom: str | None = None
    oom_blind: str | None = None
    finished: bool | None = None
    ordered: bool | None = None
    replica: bool | None = None
    grouped: bool | None = None
    heartbeat: bool | None = None
    standby: Count | None = None
    raised: _Raised | None = None
    roles: Groups | None = None
    copies: Groups | None = None
    tapes: str | None = None
    steps: list[_Row] | None = Field(default=None, min_length=1)
    ranks: dict[Digits, _Beat] | None = None
    on: list[Count] | None = None
    said: dict[str, Any] | None = None
    events: list[dict[str, Any]] | None = None


class _Memory(_Said):
    port: Count | None = None
    to: list[_Home] = []


class _Roles(_Said):
    roles: Groups | None = None
    copies: Groups | None = None


class _Standby(_Said):
    role: Count | None = None
    ready: bool = False


class _About(_Said):
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
    memory: _Memory | None


class _Attached(_Said):
    agent: str
    since: Whole


class _Prepared(_Said):
    memory: _Memory | None = None


class _Port(_Said):
    port: Annotated[int, Field(gt=0, lt=2**16)]


class _Held(_Said):
    name: str
    rank: Count
    world: Count
    step: Count
    lineage: Whole


class _Stored(_Said):
    snapshots: list[_Held]


class _Living(_Said):
    generation: Count
    ranks: list[Count]


class _Token(_Said):
    token: str


class _Deposited(_Said):
    records: list[dict[str, Any]]
    next: Count | None


_ANSWERS: Final[dict[str, type[_Said]]] = {
    "attach": _Attached,
    "prepare": _Prepared,
    "port": _Port,
    "stored": _Stored,
    "living": _Living,
    "token": _Token,
    "deposited": _Deposited,
}
"""Orders of whose answers a flow reads more than whether they were carried out."""


def answer_complaint(verb: str, answer: Message) -> str:
    """Say what is wrong with an agent's answer to the order *verb*; empty when it can be used as it is."""
    kind = _ANSWERS.get(verb)
    return "" if kind is None else _complaint(kind, answer)


def check_event(event: Message) -> None:
    """Raise ``ValueError`` for an event with a field that cannot be what it is called."""
    if why := _complaint(_Event, event):
        raise ValueError(why)


def complaint(told: Message) -> str:
    """Say what is wrong with an agent's answer to ``about``; empty when it can be used as it is."""
    return _complaint(_About, told)


def _complaint(kind: type[_Said], said: Message) -> str:
    try:
        kind.model_validate(said)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return ""
