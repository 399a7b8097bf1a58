"""What a user writes of when nodes are taken out of service."""

from __future__ import annotations

from pydantic import Field, StrictInt

from holdfast.spec.durations import Duration, PositiveDuration, lasting
from holdfast.spec.job import Part
from policies.cordons import Rules


class Quarantine(Part):
    """When a node is taken out of service, for how long, and how many at most. The same for all jobs of the cluster."""

    share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the cluster's nodes that may be out of service before a program may take out no further one; one node "
        "always may. Persons may take out any number (`holdfast nodes hold`).",
    )
    doubts: StrictInt = Field(
        default=3,
        ge=0,
        description="So many lesser faults of a node, each of which makes it suspect, quarantine it within `doubt_for`; 0: never.",
    )
    doubt_for: PositiveDuration = lasting("1d", description="For so long a node is suspect: used where there is no better one.")
    due_after: Duration = lasting(
        "1h",
        description="A quarantined node is due for a burn-in after so long; twice as long after each further quarantine or failed burn-in.",
    )
    retire_after: StrictInt = Field(
        default=4, ge=0, description="So many quarantines of a node within `counted_for` retire it; 0: it is never retired by a program."
    )
    retire_after_failed: StrictInt = Field(
        default=5, ge=0, description="So many failed burn-ins of a node within `counted_for` retire it; 0: they never do."
    )
    counted_for: PositiveDuration = lasting("30d", description="For so long a quarantine or a failed burn-in is counted.")
    ask: Duration = lasting(
        "30m",
        description="For so long a person is asked (`holdfast approve`, or the Prefect UI) before more than `share` of the cluster, or so "
        "many of a job's nodes that too few are left, are isolated. If nobody answers, the cluster's nodes stay, and the job waits for "
        "others in place of its unhealthy ones; 0: nobody is asked.",
    )

    @property
    def rules(self) -> Rules:
        """Return these settings as the state machine of nodes reads them."""
        return Rules(
            share=self.share,
            doubts=self.doubts,
            doubt_window=self.doubt_for.total_seconds(),
            cool=self.due_after.total_seconds(),
            retire=self.retire_after,
            failures=self.retire_after_failed,
            window=self.counted_for.total_seconds(),
        )
