"""What a user writes of times at which nodes are taken away: maintenance windows, and where notices of their end are to be seen."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from holdfast.spec.durations import PositiveDuration, lasting
from holdfast.spec.job import FilledText, Part
from holdfast.spec.ranges import names_in
from holdfast.spec.spelling import contradiction
from policies.maintenance import MaintenanceWindow

_WHEN: Final = 'Write a date and a time, e.g. "2026-12-01 22:00", with a zone (`+01:00`) if it is not that of this machine'


def _checked(text: str) -> str:
    names_in(text)
    return text


def _time(value: object) -> object:
    """Take a time as people write one; a bare number would be seconds since 1970, which nobody means."""
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value.strip()) if isinstance(value, str) else _no_time(value)
    except ValueError:
        return _no_time(value)


def _no_time(value: object) -> object:
    raise PydanticCustomError("time", "{shown} is no date and time", {"shown": repr(value)[:80], "cure": _WHEN})


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        cure = "Mend the pattern, or put a backslash before letters that stand for themselves"
        raise PydanticCustomError("pattern", "is no regular expression: {why}", {"why": str(error), "cure": cure}) from error
    return text


def _url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", text):
        cure = 'Write one such as "http://169.254.169.254/latest/meta-data/spot/instance-action"'
        raise PydanticCustomError("url", "{shown} is no address of HTTP", {"shown": repr(text)[:80], "cure": cure})
    return text


NodeRange = Annotated[FilledText, AfterValidator(_checked)]


class Maintenance(Part):
    """A time at which nodes are taken away: no job is given them from some time before, and those that train there move away."""

    nodes: list[NodeRange] = Field(
        default=[], description="Names of nodes, or ranges such as `gpu-[01-16]`; with `domains` empty too: all."
    )
    domains: list[FilledText] = Field(default=[], description="Failure domains whose nodes are meant too.")
    begins: Annotated[datetime, BeforeValidator(_time)] = Field(
        description="Date and time, e.g. `2026-12-01 22:00`; without a zone the time of the machine that the flow runs on."
    )
    lasts: PositiveDuration = lasting("4h", description="For so long the nodes are away; afterwards they come back by themselves.")
    every: PositiveDuration | None = Field(
        default=None, description="From the begin of one window to that of the next, e.g. `1d` or `7d`; empty: it comes once."
    )
    ahead: PositiveDuration = lasting(
        "30m", description="So long before it begins jobs are not given the nodes any more, and ranks that are there move away."
    )
    reason: FilledText = Field(default="maintenance", description="What is done then: it is shown to everybody who meets the nodes.")

    def window(self, names: Sequence[str], domains: Mapping[str, str]) -> MaintenanceWindow:
        """Return it with the nodes that it means of a cluster."""
        meant = {name for text in self.nodes for name in names_in(text)} | {node for node, one in domains.items() if one in self.domains}
        everybody = not self.nodes and not self.domains
        return MaintenanceWindow(
            nodes=frozenset(names) if everybody else frozenset(meant) & frozenset(names),
            begins=self.begins,
            lasts=self.lasts,
            every=self.every,
            ahead=self.ahead,
            reason=self.reason,
        )

    def problems(self, names: Sequence[str], domains: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
        """Yield what does not fit together, or to the cluster: field, reason and cure."""
        if self.every is not None and self.every < self.lasts:
            yield "every", "the next window begins before this one ends", "Raise `every`, or lower `lasts`"
        strange = [name for text in self.nodes for name in names_in(text) if name not in names]
        if strange:
            yield "nodes", f"the cluster has no node '{strange[0][:80]}'", f"Name nodes of the cluster, such as {names[0]}"
        strange = [one for one in self.domains if one not in domains.values()]
        if strange:
            known = ", ".join(sorted(set(domains.values()))[:5])
            cure = f"Name one of {known}" if known else "Name the nodes instead: this cluster has no failure domains"
            yield "domains", f"no node is in a failure domain '{strange[0][:80]}'", cure


def check_plan(plan: Sequence[Maintenance], names: Sequence[str], domains: Mapping[str, str]) -> None:
    """Raise pydantic's error for the first window of *plan* that does not fit a cluster of these nodes."""
    for number, one in enumerate(plan):
        for field, reason, cure in one.problems(names, domains):
            raise contradiction(f"maintenance[{number}].{field}", reason, cure)


class Notice(Part):
    """Where a node is told that it will be taken away: agents look there while a job runs. SIGTERM to an agent always is such a notice."""

    file: FilledText | None = Field(
        default=None, description="The node will be gone once this file is there; `{node}` stands for the node's name."
    )
    url: Annotated[FilledText, AfterValidator(_url)] | None = Field(
        default=None, description="Asked by HTTP: an answer with status 200 is a notice; `{node}` stands for the node's name."
    )
    token_url: Annotated[FilledText, AfterValidator(_url)] | None = Field(
        default=None,
        description="Asked first, by PUT, for a token that every question then carries (IMDSv2 of AWS: "
        "`http://169.254.169.254/latest/api/token`); empty: none is needed.",
    )
    headers: dict[FilledText, FilledText] = Field(default={}, description="Headers of the question, e.g. `Metadata-Flavor: Google`.")
    pattern: Annotated[str, AfterValidator(_pattern)] = Field(
        default="", description="Regular expression that the answer (or the file) has to contain to be a notice; empty: any is."
    )
    signals: list[Literal["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGPWR", "SIGXCPU"]] = Field(
        default=[], description="Signals to the agent that are notices, too."
    )
    every: PositiveDuration = lasting("5s", description="From one look to the next.")
    timeout: PositiveDuration = lasting("2s", description="How long a question may take; one without an answer is no notice.")
    lasts: PositiveDuration = lasting("2m", description="From the notice to the end of the node.")

    def for_agents(self) -> dict[str, object]:
        """Return it as agents read it."""
        return {
            "file": self.file,
            "url": self.url,
            "token_url": self.token_url,
            "headers": dict(self.headers),
            "pattern": self.pattern,
            "signals": [int(getattr(signal, name)) for name in self.signals],
            "every": self.every.total_seconds(),
            "timeout": self.timeout.total_seconds(),
            "lasts": self.lasts.total_seconds(),
        }
