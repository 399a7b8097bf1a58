"""What a user writes about burn-ins: how long, how much, and what a node has to reach."""

from __future__ import annotations

import difflib
from typing import Annotated

from pydantic import AfterValidator, Field, StrictBool, StrictInt
from pydantic_core import PydanticCustomError

from detectors.catalogue import AREAS
from holdfast.spec.durations import Duration, PositiveDuration, lasting
from holdfast.spec.job import FilledText, Part
from holdfast.spec.sizes import Size
from policies.burn_in import BurnInThresholds


def _component(name: str) -> str:
    """Refuse a name that the fault catalogue does not have."""
    if name in AREAS:
        return name
    near = difflib.get_close_matches(name[:120], AREAS, n=1)
    cure = f"Did you mean '{near[0]}'?" if near else f"Write one of: {', '.join(sorted(AREAS))}"
    raise PydanticCustomError("component", "no component is called {shown}", {"shown": repr(name)[:80], "cure": cure})


Untested = Annotated[FilledText, AfterValidator(_component)]


class BurnInLimits(Part):
    """What a node has to reach in a burn-in. 0: no limit."""

    disk: float = Field(default=20.0, ge=0, allow_inf_nan=False, description="Least MB/s that its disk writes, the flush included.")
    network: float = Field(
        default=50.0, ge=0, allow_inf_nan=False, description="Least MB/s between two nodes, in either direction; 1 Gbit/s gives about 115."
    )
    latency: Duration = lasting("20ms", description="Longest time of a message to another node and back, median of 50.")
    clock: Duration = lasting("1s", description="Most that a node's clock may be off from that of the machine that asks.")

    @property
    def limits(self) -> BurnInThresholds:
        """Return these settings as checks are held against them."""
        return BurnInThresholds(
            disk=self.disk, network=self.network, latency=1000 * self.latency.total_seconds(), clock=self.clock.total_seconds()
        )


class BurnInSettings(Part):
    """How nodes are tried before jobs are given them: after a quarantine, by hand, and before a launch."""

    seconds: PositiveDuration = lasting("60s", description="How long a node works in a burn-in, all checks together but the network.")
    memory_share: float = Field(
        default=0.25, gt=0, le=0.9, allow_inf_nan=False, description="Share of the memory that is free that is tried."
    )
    memory_most: Size = Field(default=64 * 10**9, description="Most memory that is tried on a node.", json_schema_extra={"default": "64GB"})
    disk_size: Size = Field(
        default=512 * 10**6, description="How much is written to a node's disk.", json_schema_extra={"default": "512MB"}
    )
    network_size: Size = Field(
        default=256 * 10**6, description="How much each of two nodes sends the other.", json_schema_extra={"default": "256MB"}
    )
    folder: FilledText | None = Field(
        default=None, description="Folder on the nodes in which their disk is tried; empty: the node's own, over SSH `/var/tmp`."
    )
    port: StrictInt = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port on which a node listens for another one while the network is tried; 0: any that is free.",
    )
    nice: StrictInt = Field(default=10, ge=0, le=19, description="By how much the work's priority is lower than a job's; 19: lowest.")
    torch: StrictBool = Field(default=True, description="Also multiply matrices by torch, on processors and GPUs, where the node has it.")
    accept_untested: tuple[Untested, ...] = Field(
        default=(),
        description="Components of the fault catalogue (`holdfast faults list`) whose faults a passed burn-in lifts although no check "
        "exercises the component, say `[power, cooling]`; of all others a person returns the node.",
    )
    before_launch: StrictBool | None = Field(
        default=None,
        description="Whether nodes work for a moment before a launch, beside the start of their agents, and come last when they fail; "
        "empty: over SSH yes, on this machine no.",
    )
    limits: BurnInLimits = Field(default=BurnInLimits(), description="What a node has to reach.")
