"""Read policy files, and make the policies of them that decide. Only `BadFile` leaves this module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from holdfast.errors import BadFile, Problem
from holdfast.spec.job import TrainingJob, is_policy_file
from holdfast.spec.load import YAML, document_of, made_of, mapping_of, placed_in
from holdfast.spec.policy import PolicyFile, unanswered
from holdfast.spec.problems import shown
from holdfast.spec.yaml_text import Unreadable
from policies.case import RecoveryAction
from policies.escalation import NOTING, ORDERS
from policies.policy import BASE, NAMED, Policy

Value = TypeVar("Value")


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Return the policy in the file at *path*; raise `BadFile` with all that is wrong with it."""
    file, problems = review_policy(path)
    if problems or file is None:
        raise BadFile(shown(str(path)), tuple(problems))
    return policy_of(file, name=str(path))


def review_policy(path: str | os.PathLike[str]) -> tuple[PolicyFile | None, list[Problem]]:
    """Return what the policy file at *path* says, and all that is wrong with it, each with its line."""
    problems: list[Problem] = []
    if Path(path).suffix.lower() not in YAML:
        reason = f"the ending '{shown(Path(path).suffix)}' says no YAML"
        return None, [Problem(field="file", reason=reason, cure="Name it .yaml; a policy has no other form")]
    try:
        document = document_of(Path(path))
        given = mapping_of(document, f"Write at least `based_on: {BASE}`")
        file = made_of(PolicyFile, given, problems, document)
    except Unreadable as error:
        return None, [error.problem]
    told = {problem.field for problem in problems}
    problems += [placed_in(document, problem) for problem in unanswered(given) if problem.field not in told]
    return file, problems


def policy_of(file: PolicyFile, *, name: str) -> Policy:
    """Return the policy that *file* describes, with what it does not say from the one that it is based on."""
    base = NAMED[file.based_on]
    common, frequent, flapping = NOTING[file.based_on]
    order = ORDERS[file.based_on] if file.actions is None else tuple(RecoveryAction(action) for action in file.actions)
    return Policy(
        name=name,
        based_on=file.based_on,
        order=order,
        noting=(_with(common, file.common), _with(frequent, file.frequent), _with(flapping, file.flapping)),
        bad_loss=_with(base.bad_loss, file.bad_loss),
        recommended_actions=dict(file.recommended_actions),
        budget=_with(base.budget, file.budget),
        deadlines=_with(base.deadlines, file.deadlines),
        slowness=_with(base.slowness, file.slowness),
    )


def policy_for(job: TrainingJob) -> Policy:
    """Return the policy that *job* names, under what the job itself says; raise `BadFile` for a file that cannot be used."""
    return under_job(load_policy(job.policy) if is_policy_file(job.policy) else NAMED[job.policy], job)


def under_job(policy: Policy, job: TrainingJob) -> Policy:
    """Return *policy* with the budget and the deadlines that *job* says itself: they go before the policy's."""
    return replace(policy, budget=_with(policy.budget, job.budget), deadlines=_with(policy.deadlines, job.deadlines))


def _with(value: Value, said: BaseModel) -> Value:
    """Return *value* with those of its fields that *said* says, in seconds where they are durations."""
    known = {field.name for field in fields(value)}  # type: ignore[arg-type]
    given: Mapping[str, Any] = {name: getattr(said, name) for name in type(said).model_fields if name in known}
    told = {name: one.total_seconds() if isinstance(one, timedelta) else one for name, one in given.items() if one is not None}
    return replace(value, **told)  # type: ignore[type-var]
