"""Policy files: YAML that says where a policy differs from a named one, and the policy made from it. Raises `BadFile`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictBool, StrictInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.associations import belongs
from holdfast.detectors.catalogue import NO_ACTION_NEEDED, RecommendedAction
from holdfast.errors import BadFile, Problem
from holdfast.policies.recovery.case import RecoveryAction
from holdfast.policies.recovery.escalation import NOTING, ORDERS
from holdfast.policies.recovery.policy import BASE, NAMED, Policy, PolicyTimeouts
from holdfast.spec.files import synonyms
from holdfast.spec.files.load import YAML, fields_of, located, read_yaml, validated
from holdfast.spec.files.problems import nearest, shown
from holdfast.spec.files.units import Duration, Percent, PositiveDuration
from holdfast.spec.files.yaml_text import Unreadable
from holdfast.spec.job import (
    MaxRecoveries,
    MaxRecoveriesWithoutProgress,
    MaxRestartsInPlace,
    PolicyRecoveryTimeouts,
    RecoveryWindow,
    SpecModel,
    TrainingJob,
    is_policy_file,
)

LONGEST: Final = timedelta(days=30)
"""The longest window in which faults are counted: the history is not read further back."""
ACTIONS: Final = tuple(
    action.value
    for action in RecoveryAction
    if action not in {RecoveryAction.FAIL, RecoveryAction.REQUEST_APPROVAL, RecoveryAction.ROLLBACK}
)
Value = TypeVar("Value")


def _kind(kind: str) -> str:
    """Refuse a fault kind that the catalogue does not have."""
    if kind not in CATALOGUE:
        old = synonyms.KINDS.get(kind)
        cure = (old and f"Use '{old}'") or nearest(kind, list(CATALOGUE)) or "`holdfast faults ls` lists the kinds"
        raise PydanticCustomError("kind", "no fault kind has this name", {"cure": cure})
    return kind


def _recommended_action(action: object) -> object:
    """Refuse an unknown recommended action."""
    if isinstance(action, str) and action in list(RecommendedAction):
        return action
    cure = nearest(str(action), list(RecommendedAction)) or f"Write one of {', '.join(RecommendedAction)}"
    raise PydanticCustomError("recommended_action", "{shown} is not a recommended action", {"shown": shown(repr(action)), "cure": cure})


def _action(action: str) -> str:
    """Refuse an unknown recovery action."""
    if action == RecoveryAction.FAIL:
        raise PydanticCustomError("action", "'{action}' always comes last", {"action": action, "cure": "Leave it out"})
    if action not in ACTIONS:
        old = synonyms.ACTIONS.get(action)
        cure = (old and f"Use '{old}'") or nearest(action, list(ACTIONS)) or f"Write one of {', '.join(ACTIONS)}"
        raise PydanticCustomError("action", "no action is called '{action}'", {"action": shown(action), "cure": cure})
    return action


Window = Annotated[PositiveDuration, Field(le=LONGEST)]


class CorrelatedFaults(SpecModel):
    """When a fault is attributed to no node, because it occurs on many: the software or something that nodes share causes it."""

    min_nodes: StrictInt | None = Field(
        default=None, ge=0, description="Number of nodes from which on the fault is attributed to none of them; 0: never; else 3."
    )
    min_share: Percent | None = Field(
        default=None,
        description="The same as a share of the job's nodes, e.g. `25%`, at least two of them; `0%`: never; else `0%`.",
    )
    hardware_share: Percent | None = Field(
        default=None,
        description="Share of the job's nodes that a fault must exceed which takes a node out and is attributed to its own hardware: power "
        "or a bad batch may break a few of many, and their ranks would fail there again; `0%`: no more than others; else `50%`.",
    )
    window: Window | None = Field(default=None, description="Within which they occur; at most 30 days; else 10m.")


class RecurringFaults(SpecModel):
    """When a node is replaced because the same fault recurs on it, even if a restart in place would be allowed."""

    times: StrictInt | None = Field(
        default=None,
        ge=0,
        description="Incidents of one kind attributed to GPU, node, network or storage, on one node (one device, where it is known) "
        "until it is replaced; 0: never; else 4, `patient` 6, `aggressive` 3.",
    )
    process_times: StrictInt | None = Field(
        default=None, ge=0, description="The same for kinds attributed to processes or to nothing; 0: never; else 0."
    )
    window: Window | None = Field(default=None, description="Within which they occur; at most 30 days; else 1d.")


class FlappingFaults(SpecModel):
    """When a node is replaced because a fault comes and goes on it, even if training continued each time."""

    times: StrictInt | None = Field(
        default=None,
        ge=0,
        description="Occurrences of one such kind on one node (one device, where it is known) until it is replaced; 0: never; else 5, "
        "`patient` 8, `aggressive` 3.",
    )
    window: Window | None = Field(default=None, description="Within which it occurs this often; at most 30 days; else 10m.")
    min_gap: Duration | None = Field(
        default=None, description="From one occurrence to the next; a report before that is the same one; else 5s."
    )


class Stragglers(SpecModel):
    """When a rank that slows the others down is migrated to another node, under `checks.straggler: auto`."""

    min_cost_ratio: float | None = Field(
        default=None,
        ge=1,
        allow_inf_nan=False,
        description="Staying must cost this many times what a migration costs; else 3, `patient` 10, `aggressive` 1.5.",
    )
    min_saving: Duration | None = Field(
        default=None, description="Time that a migration must save; else 1m, `patient` 10m, `aggressive` 10s."
    )
    horizon: PositiveDuration | None = Field(
        default=None, description="Time over which costs are compared when the number of remaining steps is unknown; else 1h."
    )
    max_migrations_per_rank: StrictInt | None = Field(
        default=None, ge=1, description="Migrations of one rank, or away from one node, within the window, under `migrate` too; else 1."
    )
    max_migrations: StrictInt | None = Field(
        default=None, ge=0, description="Migrations of slow ranks of a job within the window; 0: none; else 4, `patient` 2, `aggressive` 8."
    )
    window: Window | None = Field(default=None, description="Within which migrations are counted; at most 30 days; else 1d.")


class LossRecovery(SpecModel):
    """What is done when the loss stays NaN or infinite. `recommended_actions: {loss-diverged: monitor}` only reports it."""

    retries_with_same_data: StrictInt | None = Field(
        default=None, ge=0, description="Number of times that the job first goes back to an earlier state, with the same data; else 1."
    )
    retries_without_batches: StrictInt | None = Field(
        default=None,
        ge=0,
        description="Number of times after that without the batches of the step in question and of the one before; else 1.",
    )
    max_step_gap: StrictInt | None = Field(
        default=None, ge=0, description="Steps by which two such losses may be apart and still count as the same; else 100."
    )


class PolicyTimeoutSettings(PolicyRecoveryTimeouts):
    """How long each action may take; values of the job file take precedence."""


class PolicyFile(SpecModel):
    """A policy: what it leaves out is as in the one that it is based on."""

    based_on: Literal["patient", "balanced", "aggressive"] = Field(
        default="balanced", description="The named policy that provides what this file leaves out."
    )
    recommended_actions: dict[Annotated[str, AfterValidator(_kind)], Annotated[RecommendedAction, BeforeValidator(_recommended_action)]] = (
        Field(default={}, description="Fault kind to recommended action, in place of the catalogue's (`holdfast faults ls`).")
    )
    actions: list[Annotated[str, AfterValidator(_action)]] | None = Field(
        default=None,
        min_length=1,
        description=f"What is tried, in this order, of {', '.join(f'`{action}`' for action in ACTIONS)}; then the job fails.",
    )
    max_recoveries: MaxRecoveries = None
    max_restarts_in_place: MaxRestartsInPlace = None
    max_recoveries_without_progress: MaxRecoveriesWithoutProgress = None
    recovery_window: RecoveryWindow = None
    timeouts: PolicyTimeoutSettings = Field(default=PolicyTimeoutSettings(), description="How long each action may take.")
    correlated: CorrelatedFaults = Field(
        default=CorrelatedFaults(), description="The same fault on many nodes is attributed to none of them."
    )
    recurring: RecurringFaults = Field(default=RecurringFaults(), description="The same fault too often on one node.")
    flapping: FlappingFaults = Field(default=FlappingFaults(), description="A fault that comes and goes on one node.")
    stragglers: Stragglers = Field(default=Stragglers(), description="Ranks that slow the others down.")
    diverged_loss: LossRecovery = Field(default=LossRecovery(), description="The loss stays NaN or infinite.")
    fail_on_start_errors: StrictBool = Field(
        default=True,
        description=(
            "Fail the job at once if all ranks end at its first start, before a step, with the same error that a restart does not cure: a "
            "syntax error, a failed import, or exit status 2 without an exception (wrong arguments). One node of several that lacks a "
            "module is at fault itself nevertheless. `false`: restart first, as after other exceptions."
        ),
    )

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
        for problem in unrecoverable({"recommended_actions": self.recommended_actions}):
            context = {"reason": problem.reason, "cure": problem.cure, "field": problem.field}
            raise PydanticCustomError("contradiction", "{field}: {reason}. {cure}", context)
        return self


def unrecoverable(given: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem for each recommended action in *given* (validated or not) with which a lost rank would never be recovered."""
    actions = given.get("recommended_actions")
    for kind, action in actions.items() if isinstance(actions, Mapping) else ():
        known = CATALOGUE.get(str(kind))
        if known is None or known.recommended_action in NO_ACTION_NEEDED or action not in tuple(NO_ACTION_NEEDED):
            continue
        if belongs(known.id, "stops-the-job") and not belongs(known.id, "stall"):
            yield Problem(
                field=f"recommended_actions.{kind}",
                reason=f"at '{action}' a lost rank would never be recovered, and the job would wait forever",
                cure=f"The least that is allowed is '{RecommendedAction.RETRY_STEP}'",
            )


# -- from the file to the policy --------------------------------------------------------------------------------------


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Return the policy in the file at *path*; raise `BadFile` with all its problems."""
    file, problems = review_policy(path)
    if problems or file is None:
        raise BadFile(shown(str(path)), tuple(problems))
    return policy_of(file, name=str(path))


def review_policy(path: str | os.PathLike[str]) -> tuple[PolicyFile | None, list[Problem]]:
    """Return the content of the policy file at *path* and all its problems, each with its line."""
    problems: list[Problem] = []
    if Path(path).suffix.lower() not in YAML:
        reason = f"the suffix '{shown(Path(path).suffix)}' is not that of YAML"
        return None, [Problem(field="file", reason=reason, cure="Name it .yaml; a policy has no other form")]
    try:
        document = read_yaml(Path(path))
        given = fields_of(document, f"Write at least `based_on: {BASE}`")
        file = validated(PolicyFile, given, problems, document)
    except Unreadable as error:
        return None, [error.problem]
    reported = {problem.field for problem in problems}
    problems += [located(document, problem) for problem in unrecoverable(given) if problem.field not in reported]
    return file, problems


def policy_of(file: PolicyFile, *, name: str) -> Policy:
    """Return the policy that *file* describes, completed from the one that it is based on."""
    base = NAMED[file.based_on]
    correlated, recurring, flapping = NOTING[file.based_on]
    order = ORDERS[file.based_on] if file.actions is None else tuple(RecoveryAction(action) for action in file.actions)
    return Policy(
        name=name,
        based_on=file.based_on,
        order=order,
        noting=(_updated(correlated, file.correlated), _updated(recurring, file.recurring), _updated(flapping, file.flapping)),
        diverged_loss=_updated(base.diverged_loss, file.diverged_loss),
        recommended_actions=dict(file.recommended_actions),
        budget=_updated(base.budget, file),
        timeouts=_timeouts(base.timeouts, file.timeouts),
        stragglers=_updated(base.stragglers, file.stragglers),
        fail_on_start_errors=file.fail_on_start_errors,
    )


def policy_for(job: TrainingJob) -> Policy:
    """Return the policy that *job* names, with the job's own settings; raise `BadFile` for a file that cannot be used."""
    return under_job(load_policy(job.policy) if is_policy_file(job.policy) else NAMED[job.policy], job)


def under_job(policy: Policy, job: TrainingJob) -> Policy:
    """Return *policy* with the limits of recoveries and the timeouts that *job* sets: they take precedence over the policy's."""
    return replace(with_timeouts(policy, job.timeouts.recovery), budget=_updated(policy.budget, job))


def with_timeouts(policy: Policy, timeouts: PolicyRecoveryTimeouts) -> Policy:
    """Return *policy* with the *timeouts* that are set."""
    return replace(policy, timeouts=_timeouts(policy.timeouts, timeouts))


def _timeouts(before: PolicyTimeouts, settings: PolicyRecoveryTimeouts) -> PolicyTimeouts:
    stated = {name for name in PolicyRecoveryTimeouts.model_fields if getattr(settings, name) is not None}
    return replace(_updated(before, settings), stated=before.stated | stated)


def _updated(value: Value, settings: BaseModel) -> Value:
    """Return the dataclass *value* with those of its fields that *settings* sets, in seconds where they are durations."""
    known = {field.name for field in fields(value)}  # type: ignore[arg-type]
    given: Mapping[str, Any] = {name: getattr(settings, name) for name in type(settings).model_fields if name in known}
    present = {name: one.total_seconds() if isinstance(one, timedelta) else one for name, one in given.items() if one is not None}
    return replace(value, **present)  # type: ignore[type-var]
