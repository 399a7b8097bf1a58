"""The Prefect flow run that a controller runs in, and what its owner asks of it there.

Written by a thread that polls Prefect (`holdfast.prefect_client.own_flow_run`), read by the controller: nothing here imports Prefect, and
a server that is unreachable changes nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class FlowRun:
    """Which flow run this is, and whether it was cancelled or suspended. Without Prefect all of it stays empty."""

    id: str = ""
    url: str = ""
    """Its page in the Prefect UI; empty where there is no UI."""
    predecessor: str = ""
    """Id of the flow run that controlled the job before; empty where there was none."""
    cancelled: str = ""
    """Why the job is to stop: who cancelled what."""
    suspended: str = ""
    """Why the job is to be suspended; cleared when the flow run is resumed in place."""

    poll: threading.Event = field(default_factory=threading.Event)
    """Set where its state should be polled at once."""

    @property
    def on_lease(self) -> dict[str, str]:
        """Return what the lease of the job has on record of it."""
        return {"flow_run": self.id, "flow_run_url": self.url}
