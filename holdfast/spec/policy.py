"""What a user writes about a policy: a YAML file that says where it differs from a named one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StrictInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from detectors.all_kinds import CATALOGUE
from detectors.associations import belongs
from detectors.catalogue import NO_ACTION_NEEDED, RecommendedAction
from holdfast.errors import Problem
from holdfast.spec.durations import Duration, PositiveDuration
from holdfast.spec.job import Budget, Deadlines, Part
from holdfast.spec.problems import nearest, shown
from policies.case import RecoveryAction

LONGEST: Final = timedelta(days=30)
"""The longest window in which faults are counted: the history is not read further back."""
ACTIONS: Final = tuple(
    action.value for action in RecoveryAction if action not in {RecoveryAction.GIVE_UP, RecoveryAction.ASK_A_PERSON, RecoveryAction.GO_BACK}
)


def _kind(kind: str) -> str:
    """Refuse a fault kind that the catalogue does not have."""
    if kind not in CATALOGUE:
        cure = nearest(kind, list(CATALOGUE)) or "`holdfast faults` lists the kinds"
        raise PydanticCustomError("kind", "no fault kind is called so", {"cure": cure})
    return kind


def _level(recommended_action: object) -> object:
    """Refuse what is no recommended action."""
    if isinstance(recommended_action, str) and recommended_action in list(RecommendedAction):
        return recommended_action
    cure = nearest(str(recommended_action), list(RecommendedAction)) or f"Write one of {', '.join(RecommendedAction)}"
    raise PydanticCustomError(
        "recommended_action", "{shown} is no recommended action", {"shown": shown(repr(recommended_action)), "cure": cure}
    )


def _action(action: str) -> str:
    """Refuse what is no recovery action."""
    if action == RecoveryAction.GIVE_UP:
        raise PydanticCustomError("action", "'{action}' comes last by itself", {"action": action, "cure": "Leave it out"})
    if action not in ACTIONS:
        cure = nearest(action, list(ACTIONS)) or f"Write one of {', '.join(ACTIONS)}"
        raise PydanticCustomError("action", "no action is called '{action}'", {"action": shown(action), "cure": cure})
    return action


Window = Annotated[PositiveDuration, Field(le=LONGEST)]


class CommonFault(Part):
    """When a fault is held against no node, because the same kind came on many: the software is at fault, or something that nodes share."""

    nodes: StrictInt | None = Field(default=None, ge=0, description="Different nodes from which on none is blamed; 0: never; else 3.")
    share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="The same as a share of the job's nodes, two of them at least; 0: never; else 0.",
    )
    window: Window | None = Field(default=None, description="Within which they come; at most 30 days; else 10m.")


class FrequentFault(Part):
    """When a node leaves because it had the same fault too often, though a restart in place would be allowed."""

    times: StrictInt | None = Field(
        default=None,
        ge=0,
        description="Incidents of one kind that speaks against GPU, node, network or storage, on one node (one device, where it is known) "
        "until it leaves; 0: never; else 4, `patient` 6, `aggressive` 3.",
    )
    processes: StrictInt | None = Field(
        default=None, ge=0, description="The same for kinds that speak against processes or nobody; 0: never; else 0."
    )
    window: Window | None = Field(default=None, description="Within which they come; at most 30 days; else 1d.")


class FlappingFault(Part):
    """When a node leaves because a fault comes and goes on it, also where training went on each time."""

    times: StrictInt | None = Field(
        default=None,
        ge=0,
        description="Comings of one such kind on one node (one device, where it is known) until it leaves; 0: never; else 5, "
        "`patient` 8, `aggressive` 3.",
    )
    window: Window | None = Field(default=None, description="Within which it comes so often; at most 30 days; else 10m.")
    apart: Duration | None = Field(default=None, description="From one coming to the next; what is told sooner is the same one; else 5s.")


class SlowRanks(Part):
    """When a rank that holds the others up is moved to another node, under `checks.straggler: auto`."""

    factor: float | None = Field(
        default=None,
        ge=1,
        allow_inf_nan=False,
        description="So many times what moving costs staying has to cost at least; else 3, `patient` 10, `aggressive` 1.5.",
    )
    least: Duration | None = Field(
        default=None, description="A move has to save so much time at least; else 1m, `patient` 10m, `aggressive` 10s."
    )
    horizon: PositiveDuration | None = Field(
        default=None, description="How far is looked ahead where nobody knows how many steps are left; else 1h."
    )
    each: StrictInt | None = Field(
        default=None, ge=1, description="Moves of one rank, or away from one node, within the window, under `migrate` too; else 1."
    )
    most: StrictInt | None = Field(
        default=None, ge=0, description="Moves of slow ranks of a job within the window; 0: none; else 4, `patient` 2, `aggressive` 8."
    )
    window: Window | None = Field(default=None, description="Within which moves are counted; at most 30 days; else 1d.")


class LossRecovery(Part):
    """What is done when the loss has become no number for good. `recommended_actions: {loss-lost: monitor}` only reports it."""

    same_data: StrictInt | None = Field(
        default=None, ge=0, description="So often the job first goes back to a state from before, with the same data; else 1."
    )
    without_batch: StrictInt | None = Field(
        default=None, ge=0, description="So often after that without the batches of the step in question and of the one before; else 1."
    )
    near: StrictInt | None = Field(
        default=None, ge=0, description="Steps by which two such losses may lie apart and still count as the same; else 100."
    )


class PolicyBudget(Budget):
    """How many recoveries a job may have; what the job file says goes before it."""


class PolicyDeadlines(Part):
    """How long each action may take; what the job file says goes before it."""

    retry_step: PositiveDuration | None = Field(default=None, description=Deadlines.model_fields["retry_step"].description)
    take_over: PositiveDuration | None = Field(default=None, description=Deadlines.model_fields["take_over"].description)
    narrow: PositiveDuration | None = Field(default=None, description=Deadlines.model_fields["narrow"].description)
    restart_in_place: PositiveDuration | None = Field(default=None, description=Deadlines.model_fields["restart_in_place"].description)
    replace_node: PositiveDuration | None = Field(default=None, description=Deadlines.model_fields["replace_node"].description)
    shrink: PositiveDuration | None = Field(default=None, description=Deadlines.model_fields["shrink"].description)
    wait_for_capacity: Duration | None = Field(default=None, description=Deadlines.model_fields["wait_for_capacity"].description)


class PolicyFile(Part):
    """A policy: what it does not say is as in the one that it is based on."""

    based_on: Literal["patient", "balanced", "aggressive"] = Field(
        default="balanced", description="The named policy that speaks where this file says nothing."
    )
    recommended_actions: dict[Annotated[str, AfterValidator(_kind)], Annotated[RecommendedAction, BeforeValidator(_level)]] = Field(
        default={}, description="Fault kind to how much it asks for, in place of the catalogue's level (`holdfast faults`)."
    )
    actions: list[Annotated[str, AfterValidator(_action)]] | None = Field(
        default=None,
        min_length=1,
        description=f"What is tried, in this order, of {', '.join(f'`{action}`' for action in ACTIONS)}; giving up comes last by itself.",
    )
    budget: PolicyBudget = Field(default=PolicyBudget(), description="How many recoveries a job may have.")
    deadlines: PolicyDeadlines = Field(default=PolicyDeadlines(), description="How long each action may take.")
    common: CommonFault = Field(default=CommonFault(), description="The same fault on many nodes is no node's.")
    frequent: FrequentFault = Field(default=FrequentFault(), description="The same fault too often on one node.")
    flapping: FlappingFault = Field(default=FlappingFault(), description="A fault that comes and goes on one node.")
    slowness: SlowRanks = Field(default=SlowRanks(), description="Ranks that hold the others up.")
    bad_loss: LossRecovery = Field(default=LossRecovery(), description="The loss has become no number for good.")

    @field_validator("actions")
    @classmethod
    def _each_once(cls, value: list[str] | None) -> list[str] | None:
        """Refuse an action that is there twice."""
        twice = next((action for place, action in enumerate(value or ()) if action in (value or ())[:place]), None)
        if twice is not None:
            raise PydanticCustomError("action", "'{action}' is there twice", {"action": twice, "cure": "Keep one of them"})
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for problem in unanswered({"recommended_actions": self.recommended_actions}):
            context = {"reason": problem.reason, "cure": problem.cure, "field": problem.field}
            raise PydanticCustomError("contradiction", "{field}: {reason}. {cure}", context)
        return self


def unanswered(fields: Mapping[str, object]) -> Iterator[Problem]:
    """Say which levels in *fields* would leave a rank that is gone without anybody who answers. Takes them raw too."""
    recommended_actions = fields.get("recommended_actions")
    for kind, recommended_action in recommended_actions.items() if isinstance(recommended_actions, Mapping) else ():
        known = CATALOGUE.get(str(kind))
        if known is None or known.recommended_action in NO_ACTION_NEEDED or recommended_action not in tuple(NO_ACTION_NEEDED):
            continue
        if belongs(known.id, "stops-the-job") and not belongs(known.id, "stall"):
            yield Problem(
                field=f"recommended_actions.{kind}",
                reason=f"at '{recommended_action}' nobody would answer for a rank that is gone, and the job would stand for ever",
                cure=f"The least it may ask for is '{RecommendedAction.RETRY_STEP}'",
            )
