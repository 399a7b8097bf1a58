"""What a user writes about a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from holdfast import places
from holdfast.spec.job import NAME, FilledText, Part

MOST_LOCAL_NODES = 256
"""Each is a process on this machine; a larger number is a slip of the hand."""


class LocalCluster(Part):
    """A cluster on this machine: each node is a directory and an agent process."""

    kind: Literal["local"] = Field(default="local", description="Where the nodes come from; `local`: this machine.")
    name: Annotated[str, Field(pattern=NAME)] = Field(default="local", description="Name of the cluster: small letters, digits and dashes.")
    nodes: StrictInt = Field(default=4, ge=1, le=MOST_LOCAL_NODES, description="Nodes in the cluster.")
    directory: FilledText | None = Field(
        default=None, description="Folder that holds the nodes; empty: `clusters/NAME` in the folder that Holdfast keeps."
    )
    domains: dict[str, FilledText] = Field(
        default={},
        description="Failure domain of each node, e.g. `node-0: rack-a`: what is kept twice is kept in two domains. A node that is not "
        "named fails by itself.",
    )

    @model_validator(mode="after")
    def _names_nodes_that_there_are(self) -> Self:
        known = [f"node-{number}" for number in range(self.nodes)]
        for node in self.domains:
            if node not in known:
                reason = f"there is no node '{node[:80]}' in a cluster of {self.nodes}"
                context = {"field": f"domains.{node[:80]}", "reason": reason, "cure": f"Name one of {known[0]} to {known[-1]}"}
                raise PydanticCustomError("contradiction", "{field}: {reason}. {cure}", context)
        return self

    @property
    def home(self) -> Path:
        """Return the folder that holds the nodes."""
        return Path(self.directory).expanduser().absolute() if self.directory else places.cluster_directory(self.name)


Cluster: TypeAlias = LocalCluster
"""Every kind of cluster. With a second kind this becomes a union told apart by `kind`; pydantic takes no union of one."""
