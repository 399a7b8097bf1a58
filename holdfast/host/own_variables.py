"""Variables that Holdfast sets for itself and for Prefect, so that they can be kept from what a job runs.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ADDED: Final = "HOLDFAST_ADDED"
"""Variable: the names of those that Holdfast has added to the environment of a flow."""


def with_added(environment: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return *environment* with the variables *added*, and with the names of those that it did not have before."""
    new = [name for name in added if name not in environment]
    return {**environment, **added, ADDED: ",".join(filter(None, [environment.get(ADDED, ""), *new]))}


def without_added(environment: Mapping[str, str]) -> dict[str, str]:
    """Return *environment* as it was before `with_added`."""
    added = {*environment.get(ADDED, "").split(","), ADDED}
    return {name: value for name, value in environment.items() if name not in added}
