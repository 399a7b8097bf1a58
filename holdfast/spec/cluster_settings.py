"""Settings that every kind of cluster has: quarantine, burn-in, maintenance windows and preemption notices."""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt
from pydantic_core import PydanticCustomError

from holdfast.detectors.catalogue import AREAS
from holdfast.policies.nodes.burn_in import BurnInThresholds
from holdfast.policies.nodes.cordons import Rules
from holdfast.policies.nodes.maintenance import MaintenanceWindow
from holdfast.spec.files.names import contradiction, expand_names
from holdfast.spec.files.units import Duration, Percent, PositiveDuration, Size, SizeOrZero, duration_field, percent_bounds, size_field
from holdfast.spec.job import NonEmptyText, SpecModel


class Quarantine(SpecModel):
    """When a node is taken out of service, for how long, and how many at most. The same for all jobs of the cluster."""

    max_unavailable: Annotated[Percent, percent_bounds()] = Field(
        default=0.25,
        json_schema_extra={"default": "25%"},
        description="Share of the cluster's nodes that may be out of service before programs isolate no further one; one node "
        "always may. People may cordon any number (`holdfast node cordon`).",
    )
    max_minor_faults: StrictInt = Field(
        default=3,
        ge=0,
        description="Number of minor faults of a node within `suspect_for` that quarantine it; each makes it suspect; 0: never.",
    )
    suspect_for: PositiveDuration = duration_field("1d", description="How long a node stays suspect: used only if there is no better one.")
    burn_in_after: Duration = duration_field(
        "1h",
        description="A quarantined node is due for a burn-in after this time, doubled by each further quarantine or failed burn-in.",
    )
    decommission_after: StrictInt = Field(
        default=4, ge=0, description="Quarantines of a node within `window` that decommission it; 0: programs never do."
    )
    decommission_after_failed: StrictInt = Field(
        default=5, ge=0, description="Number of failed burn-ins of a node within `window` that decommission it; 0: they never do."
    )
    window: PositiveDuration = duration_field("30d", description="How long a quarantine or a failed burn-in counts.")
    approval_timeout: Duration = duration_field(
        "30m",
        description="How long programs wait for an approval (`holdfast node approve`, or the Prefect UI) before they isolate more than "
        "`max_unavailable` of the cluster, or so many of a job's nodes that too few remain. Without an answer the cluster's nodes stay in "
        "service, and the job waits for nodes to replace its unhealthy ones; 0: no approval is requested.",
    )

    @property
    def rules(self) -> Rules:
        """Return these settings as the state machine of nodes reads them."""
        return Rules(
            max_unavailable=self.max_unavailable,
            suspicions=self.max_minor_faults,
            suspicion_window=self.suspect_for.total_seconds(),
            cool=self.burn_in_after.total_seconds(),
            decommission_after=self.decommission_after,
            failures=self.decommission_after_failed,
            window=self.window.total_seconds(),
        )


def _component(name: str) -> str:
    """Refuse a name that the fault catalogue does not have."""
    if name in AREAS:
        return name
    near = difflib.get_close_matches(name[:120], AREAS, n=1)
    cure = f"Did you mean '{near[0]}'?" if near else f"Write one of: {', '.join(sorted(AREAS))}"
    raise PydanticCustomError("component", "no component is called {shown}", {"shown": repr(name)[:80], "cure": cure})


class BurnInThresholdSettings(SpecModel):
    """What a node must reach to pass a burn-in. 0: no limit."""

    min_disk_bandwidth: SizeOrZero = size_field("20MB", description="Minimum write rate of its disk in bytes per second, flush included.")
    min_network_bandwidth: SizeOrZero = size_field(
        "50MB", description="Minimum rate between two nodes in bytes per second, each way; 1 Gbit/s gives about 115 MB."
    )
    max_latency: Duration = duration_field("20ms", description="Maximum round trip of a message to another node, median of 50.")
    max_clock_offset: Duration = duration_field(
        "1s", description="Maximum offset of a node's clock from that of the machine that runs the burn-in."
    )

    @property
    def limits(self) -> BurnInThresholds:
        """Return these settings as the checks read them."""
        return BurnInThresholds(
            disk=self.min_disk_bandwidth / 1e6,
            network=self.min_network_bandwidth / 1e6,
            latency=1000 * self.max_latency.total_seconds(),
            clock=self.max_clock_offset.total_seconds(),
        )


class BurnInSettings(SpecModel):
    """How nodes are tested before jobs use them: after a quarantine, by hand, and before a launch."""

    duration: PositiveDuration = duration_field("60s", description="Duration of a burn-in on a node, all checks but the network.")
    memory: Annotated[Percent, percent_bounds(most=0.9)] = Field(
        default=0.25, json_schema_extra={"default": "25%"}, description="Share of the free memory that is tested."
    )
    max_memory: Size = size_field("64GB", description="Maximum memory that is tested on a node.")
    disk_size: Size = size_field("512MB", description="How much is written to a node's disk.")
    network_size: Size = size_field("256MB", description="How much each of two nodes sends to the other.")
    directory: NonEmptyText | None = Field(
        default=None, description="Folder on the nodes in which their disk is tested; empty: the node's own, over SSH `/var/tmp`."
    )
    port: StrictInt = Field(
        default=0, ge=0, le=65535, description="Port on which a node listens during the network test; 0: any that is free."
    )
    nice: StrictInt = Field(default=10, ge=0, le=19, description="Nice value of the burn-in's processes; 19: lowest priority.")
    torch: StrictBool = Field(default=True, description="Also multiply matrices with torch, on CPUs and GPUs, where the node has it.")
    accept_untested: tuple[Annotated[NonEmptyText, AfterValidator(_component)], ...] = Field(
        default=(),
        description="Components of the fault catalogue (`holdfast faults ls`) whose faults a passed burn-in clears although no check "
        "exercises the component, e.g. `[power, cooling]`; after a fault of any other, only a person returns the node to service.",
    )
    before_launch: StrictBool | None = Field(
        default=None,
        description="Whether nodes run a short burn-in before a launch, while their agents start, and are used last if they fail it; "
        "empty: over SSH yes, on this machine no.",
    )
    thresholds: BurnInThresholdSettings = Field(default=BurnInThresholdSettings(), description="What a node must reach.")


def _node_range(text: str) -> str:
    expand_names(text)
    return text


def _time(value: object) -> object:
    """Read a date and time; a bare number would be seconds since 1970, which nobody means."""
    if isinstance(value, datetime):
        return value
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value.strip())
        except ValueError:
            pass
    cure = 'Write a date and a time, e.g. "2026-12-01 22:00", with a zone (`+01:00`) if it is not that of this machine'
    raise PydanticCustomError("time", "{shown} is not a date and time", {"shown": repr(value)[:80], "cure": cure})


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        cure = "Fix the pattern, or put a backslash before characters that stand for themselves"
        raise PydanticCustomError("pattern", "is not a regular expression: {why}", {"why": str(error), "cure": cure}) from error
    return text


def _url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", text):
        cure = 'Write one such as "http://169.254.169.254/latest/meta-data/spot/instance-action"'
        raise PydanticCustomError("url", "{shown} is not an HTTP URL", {"shown": repr(text)[:80], "cure": cure})
    return text


class Maintenance(SpecModel):
    """A time at which nodes are unavailable: some time before, jobs get none of them and ranks on them migrate."""

    nodes: list[Annotated[NonEmptyText, AfterValidator(_node_range)]] = Field(
        default=[], description="Names of nodes, or ranges such as `gpu-[01-16]`; if `failure_domains` is empty too: all."
    )
    failure_domains: list[NonEmptyText] = Field(default=[], description="Failure domains whose nodes are included.")
    start: Annotated[datetime, BeforeValidator(_time)] = Field(
        description="Date and time, e.g. `2026-12-01 22:00`; without a zone the time of the machine that the controller runs on."
    )
    duration: PositiveDuration = duration_field(
        "4h", description="How long the nodes are unavailable; afterwards they return by themselves."
    )
    interval: PositiveDuration | None = Field(
        default=None, description="From the start of one window to that of the next, e.g. `1d` or `7d`; empty: it does not repeat."
    )
    lead_time: PositiveDuration = duration_field(
        "30m", description="How long before the start jobs no longer get the nodes, and ranks on them migrate."
    )
    reason: NonEmptyText = Field(default="maintenance", description="What is done; shown wherever the nodes are listed.")

    def window(self, names: Sequence[str], domains: Mapping[str, str]) -> MaintenanceWindow:
        """Return the window with its nodes, of a cluster with nodes *names* and failure *domains* (by node)."""
        meant = {name for text in self.nodes for name in expand_names(text)} | {
            node for node, one in domains.items() if one in self.failure_domains
        }
        everything = not self.nodes and not self.failure_domains
        return MaintenanceWindow(
            nodes=frozenset(names) if everything else frozenset(meant) & frozenset(names),
            start=self.start,
            duration=self.duration,
            interval=self.interval,
            lead_time=self.lead_time,
            reason=self.reason,
        )

    def problems(self, names: Sequence[str], domains: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
        """Yield field, reason and cure of all that contradicts itself or the cluster."""
        if self.interval is not None and self.interval < self.duration:
            yield "interval", "the next window begins before this one ends", "Raise `interval`, or lower `duration`"
        unknown = [name for text in self.nodes for name in expand_names(text) if name not in names]
        if unknown:
            yield "nodes", f"the cluster has no node '{unknown[0][:80]}'", f"Name nodes of the cluster, such as {names[0]}"
        unknown = [one for one in self.failure_domains if one not in domains.values()]
        if unknown:
            known = ", ".join(sorted(set(domains.values()))[:5])
            cure = f"Name one of {known}" if known else "Name the nodes instead: this cluster has no failure domains"
            yield "failure_domains", f"no node is in a failure domain '{unknown[0][:80]}'", cure


def check_maintenance(plan: Sequence[Maintenance], names: Sequence[str], domains: Mapping[str, str]) -> None:
    """Raise `PydanticCustomError` for the first window of *plan* that does not fit a cluster of these nodes."""
    for number, one in enumerate(plan):
        for field, reason, cure in one.problems(names, domains):
            raise contradiction(f"maintenance[{number}].{field}", reason, cure)


class PreemptionNotice(SpecModel):
    """Where a node's preemption notice appears: agents poll there while a job runs. SIGTERM to an agent always is such a notice."""

    file: NonEmptyText | None = Field(
        default=None, description="The node will be preempted once this file exists; `{node}` stands for the node's name."
    )
    url: Annotated[NonEmptyText, AfterValidator(_url)] | None = Field(
        default=None, description="Polled by HTTP: an answer with status 200 is a notice; `{node}` stands for the node's name."
    )
    token_url: Annotated[NonEmptyText, AfterValidator(_url)] | None = Field(
        default=None,
        description="Requested first, by PUT, for a token that every request then carries (IMDSv2 of AWS: "
        "`http://169.254.169.254/latest/api/token`); empty: no token is needed.",
    )
    headers: dict[NonEmptyText, NonEmptyText] = Field(default={}, description="Headers of the request, e.g. `Metadata-Flavor: Google`.")
    pattern: Annotated[str, AfterValidator(_pattern)] = Field(
        default="", description="Regular expression that the answer (or the file) must contain to be a notice; empty: any is."
    )
    signals: list[Literal["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGPWR", "SIGXCPU"]] = Field(
        default=[], description="Signals to the agent that are notices, too."
    )
    interval: PositiveDuration = duration_field("5s", description="Polling interval.")
    timeout: PositiveDuration = duration_field("2s", description="Timeout of a request; one without an answer is no notice.")
    lead_time: PositiveDuration = duration_field("2m", description="From the notice to the end of the node.")

    def for_agents(self) -> dict[str, object]:
        """Return the settings as agents read them; times in seconds, signals as numbers."""
        return {
            **self.model_dump(include={"file", "url", "token_url", "headers", "pattern"}),
            "signals": [int(getattr(signal, name)) for name in self.signals],
            **{name: getattr(self, name).total_seconds() for name in ("interval", "timeout", "lead_time")},
        }


QuarantineField = Annotated[Quarantine, Field(description="When nodes are taken out of service.")]
BurnInField = Annotated[BurnInSettings, Field(description="How nodes are tested before they return to service.")]
MaintenanceField = Annotated[list[Maintenance], Field(description="Times at which nodes are unavailable.")]
PreemptionNoticeField = Annotated[PreemptionNotice, Field(description="Where preemption notices of nodes appear.")]
MaintenanceFileField = Annotated[
    NonEmptyText | None,
    Field(
        description="YAML file whose `maintenance` and `preemption_notice` are reread while jobs run; empty: the file that describes the "
        "cluster.",
    ),
]
DomainsField = Annotated[
    dict[str, NonEmptyText],
    Field(
        description="Failure domain of each node, e.g. `node-0: rack-a`: replicas are placed in two domains. A node that is not named is "
        "a domain of its own.",
    ),
]
