"""What holds for every policy and every case, and that no job is kept alive for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import Fault, RecommendedAction, RecommendedActions
from holdfast.detectors.diagnosis import Diagnosis
from holdfast.policies.nodes.placement import members_after, membership_after
from holdfast.policies.recovery.case import PastFault
from holdfast.policies.recovery.escalation import (
    POLICIES,
    Case,
    Decision,
    HotSpare,
    PastRecovery,
    RecoveryAction,
    RecoveryBudget,
    RestartAgain,
    decide,
)
from holdfast.policies.recovery.in_process import unhealthy_ranks
from tests.policies.cases import NOW, a_diagnosis

NODES = tuple("abcdefgh")
A_POLICY = st.sampled_from(sorted(POLICIES))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a case: any members, any of them lost, any spares, any past."""
    shuffled = draw(st.permutations(NODES))
    width = draw(st.integers(1, 5))
    members, others = tuple(shuffled[:width]), shuffled[width:]
    width_of_node = draw(st.integers(1, 3))
    ranks = {node: tuple(range(place * width_of_node, (place + 1) * width_of_node)) for place, node in enumerate(members)}
    home = {rank: node for node, held in ranks.items() for rank in held}
    anywhere = st.sampled_from([*NODES, None])
    rank = st.sampled_from([*home, None])
    fault = st.builds(Fault, kind=st.sampled_from(sorted(CATALOGUE)), at=st.just(NOW), node=anywhere, rank=rank)
    recovery = st.builds(
        PastRecovery, at=st.floats(0.0, NOW), action=st.sampled_from(RecoveryAction), node=anywhere, made_progress=st.booleans()
    )
    root = draw(fault)
    earlier = st.builds(
        PastFault,
        kind=st.sampled_from([root.kind, "worker-sigkill", "link-down"]),
        at=st.floats(NOW - 1000, NOW),
        node=st.sampled_from(NODES),
        incident=st.sampled_from(["", "1", "2", "3", "4"]),
        root=st.booleans(),
    )
    return Case(
        now=NOW,
        diagnosis=Diagnosis(root=root, secondary_failures=tuple(draw(st.lists(fault, max_size=3))), reason="what was seen"),
        members=members,
        lost=frozenset(draw(st.sets(st.sampled_from(members)))),
        spares=tuple(others[: draw(st.integers(0, len(others)))]),
        least=draw(st.integers(1, width)),
        past=tuple(draw(st.lists(recovery, max_size=8))),
        tried=tuple(draw(st.lists(st.sampled_from(list(RecoveryAction)[:-1]), max_size=4, unique=True))),
        blocked_reason=draw(st.sampled_from(["", "its groups are not ours"])),
        ranks=ranks,
        dead=frozenset(draw(st.sets(st.sampled_from(sorted(home)), max_size=2))),
        hot_spares=tuple(
            HotSpare(id=number, node=node, role=draw(st.sampled_from([None, 0, 1])))
            for number, node in enumerate(draw(st.lists(st.sampled_from(NODES), max_size=4)))
        ),
        roles=(tuple(sorted(home)),),
        replacement_attempts=draw(st.integers(0, 6)),
        approval_possible=draw(st.booleans()),
        approved=frozenset(draw(st.sets(st.sampled_from(members)))),
        earlier=tuple(draw(st.lists(earlier, max_size=12))),
        recommended_actions=RecommendedActions(
            changed=draw(st.dictionaries(st.sampled_from(sorted(CATALOGUE)), st.sampled_from(RecommendedAction), max_size=3))
        ),
        budget=RecoveryBudget(
            max_restarts_in_place=draw(st.integers(0, 3)),
            max_recoveries=draw(st.integers(0, 20)),
            max_recoveries_without_progress=draw(st.integers(1, 5)),
        ),
    )


@given(A_POLICY, cases())
def test_every_policy_always_answers_and_says_why(policy: str, case: Case) -> None:
    """The first rule that does not pass decides; all before it have said why they pass."""
    answer = decide(POLICIES[policy], case)
    assert answer.decision.reason.strip()
    assert answer.rule
    assert all(why.strip() for why in answer.passed_over.values())


@given(A_POLICY, cases())
def test_only_members_leave_and_only_spares_come_each_once(policy: str, case: Case) -> None:
    """A node that is neither is none of this job's business."""
    decision = decide(POLICIES[policy], case).decision
    assert set(decision.drop) <= set(case.members)
    assert set(decision.add) <= set(case.spares)
    assert len(set(decision.drop)) == len(decision.drop)
    assert len(set(decision.add)) == len(decision.add)
    after = members_after(case.members, decision)
    assert len(set(after)) == len(after) == len(case.members) - len(decision.drop) + len(decision.add)


@given(A_POLICY, cases())
def test_no_decision_goes_below_the_minimum_unless_it_waits_or_fails_the_job(policy: str, case: Case) -> None:
    """And a wait is for more than there is, but never for more than the job had."""
    decision = decide(POLICIES[policy], case).decision
    left = len(members_after(case.members, decision))
    if decision.action is RecoveryAction.WAIT_FOR_CAPACITY:
        assert max(left, case.least - 1) < decision.need <= len(case.members)
    elif decision.action not in (RecoveryAction.FAIL, RecoveryAction.REPLACE_RANKS, RecoveryAction.REQUEST_APPROVAL):
        assert left >= case.least


@given(A_POLICY, cases())
def test_no_rank_stays_on_an_unfit_node(policy: str, case: Case) -> None:
    """Lost nodes and those that a fault asks to leave, unless it is excused, are out in every decision that goes on."""
    answer = decide(POLICIES[policy], case)
    case, decision = answer.case, answer.decision
    if decision.action not in (RecoveryAction.FAIL, RecoveryAction.REQUEST_APPROVAL):
        assert not (set(case.lost) | set(case.unfit)) & set(members_after(case.members, decision))


@given(A_POLICY, cases())
def test_an_action_does_what_its_name_says(policy: str, case: Case) -> None:
    """In place nobody moves in or out, a replacement keeps the width, a shrink lowers it, ranks rotate only in place."""
    decision = decide(POLICIES[policy], case).decision
    left = len(members_after(case.members, decision))
    widths = {
        RecoveryAction.REPLACE_RANKS: not decision.add,
        RecoveryAction.RESTART_WORKERS: not decision.drop and not decision.add,
        RecoveryAction.ROLLBACK: not decision.drop and not decision.add and decision.before > 0,
        RecoveryAction.REPLACE_NODE: bool(decision.drop) and left == len(case.members),
        RecoveryAction.SHRINK_RESTART: left < len(case.members),
        RecoveryAction.REQUEST_APPROVAL: bool(decision.drop) and not decision.add,
        RecoveryAction.WAIT_FOR_CAPACITY: bool(decision.drop),
        RecoveryAction.FAIL: not decision.drop and not decision.add,
    }
    assert widths[decision.action]
    assert not decision.rotate or decision.action is RecoveryAction.RESTART_WORKERS
    assert (decision.need > 0) is (decision.action in (RecoveryAction.WAIT_FOR_CAPACITY, RecoveryAction.REQUEST_APPROVAL))


@given(A_POLICY, cases())
def test_approval_is_requested_for_unhealthy_nodes_that_work_and_only_where_it_decides(policy: str, case: Case) -> None:
    """Without them the job cannot go on, with them it could; nobody is asked twice, nor for what is lost anyway."""
    decision = decide(POLICIES[policy], case).decision
    if decision.action is not RecoveryAction.REQUEST_APPROVAL:
        return
    assert case.approval_possible
    assert set(decision.drop) <= case.leaving - case.lost - case.approved
    went = set(case.unfit) - set(decision.drop)
    without = len(case.members) - len(case.unfit) + min(len(case.spares), len(case.unfit))
    assert without < case.least <= without + len(decision.drop)
    assert went <= case.lost | case.approved
    again = decide(POLICIES[policy], replace(case, approved=case.approved | set(decision.drop))).decision
    assert again.action is not RecoveryAction.REQUEST_APPROVAL


@given(A_POLICY, cases())
def test_a_rung_that_failed_is_not_tried_again_while_no_node_was_lost(policy: str, case: Case) -> None:
    """The next one is tried at once; a restart is made again only where the job would fail else."""
    answer = decide(POLICIES[policy], case)
    if answer.rule == repr(RestartAgain()):
        others = tuple(rule for rule in POLICIES[policy] if not isinstance(rule, RestartAgain))
        assert decide(others, case).decision.action is RecoveryAction.FAIL
        return
    decision = answer.decision
    assert case.lost or decision.action not in case.tried or (decision.action is RecoveryAction.REPLACE_RANKS and decision.seats)


@given(A_POLICY, cases())
def test_replace_ranks_replaces_exactly_the_unhealthy_ranks(policy: str, case: Case) -> None:
    """Somebody lives on; each unhealthy rank has one place, on a node that can hold it; no hot spare becomes two ranks."""
    answer = decide(POLICIES[policy], case)
    case, decision = answer.case, answer.decision
    if decision.action is not RecoveryAction.REPLACE_RANKS:
        assert not decision.seats
        return
    assert not case.blocked_reason
    ranks = {rank for held in case.ranks.values() for rank in held}
    assert {seat.rank for seat in decision.seats} == unhealthy_ranks(case) < ranks
    assert not {seat.node for seat in decision.seats} & case.leaving
    used = [seat.hot_spare for seat in decision.seats if seat.hot_spare is not None]
    assert len(set(used)) == len(used)
    nodes = {one.id: one.node for one in case.hot_spares}
    assert all(nodes[seat.hot_spare] == seat.node for seat in decision.seats if seat.hot_spare is not None)
    after = membership_after({node: list(held) for node, held in case.ranks.items()}, decision.seats)
    assert sorted(rank for held in after.values() for rank in held) == sorted(ranks)
    assert not set(after) & case.leaving


@given(A_POLICY, cases())
def test_a_spent_budget_ends_every_job(policy: str, case: Case) -> None:
    """Whatever the reason, lost nodes included."""
    decision = decide(POLICIES[policy], case).decision
    assert len(case.recent()) < case.budget.max_recoveries or decision.action is RecoveryAction.FAIL


@given(st.permutations(sorted(POLICIES)), cases())
def test_a_decision_depends_on_the_case_alone(policies: list[str], case: Case) -> None:
    """The same case a second time, after others, is decided the same."""
    first = {policy: decide(POLICIES[policy], case) for policy in sorted(POLICIES)}
    assert {policy: decide(POLICIES[policy], case) for policy in policies} == first


def survived(policy: str, faults: list[tuple[str, int | None, bool]], *, in_one_incident: bool, seconds: float) -> list[Decision]:
    """Return the decisions of a job whose every recovery fails by the next of *faults*, until it fails.

    Each fault is a kind, a position among the members (None: of the job) and whether the node is lost. After a wait the nodes
    that had to go are back, or others in their places.
    """
    members: tuple[str, ...] = ("a", "b", "c")
    spares: tuple[str, ...] = ("d", "e")
    past, tried, decisions, now = list[PastRecovery](), list[RecoveryAction](), list[Decision](), NOW
    for turn in range(200):
        kind, position, lost = faults[turn % len(faults)]
        node = members[position % len(members)] if position is not None else None
        gone = frozenset({node} if node and lost else ())
        case = Case(
            now=now,
            diagnosis=a_diagnosis(kind, node),
            members=members,
            lost=gone,
            spares=spares,
            least=2,
            past=tuple(past),
            tried=tuple(tried),
        )
        decision = decide(POLICIES[policy], case).decision
        decisions.append(decision)
        if decision.action is RecoveryAction.FAIL:
            return decisions
        past.append(PastRecovery(at=now, action=decision.action, node=node, made_progress=False))
        tried = [*tried, decision.action] if in_one_incident and not lost else []
        members, spares = members_after(members, decision), tuple(one for one in spares if one not in decision.add)
        if decision.action is RecoveryAction.WAIT_FOR_CAPACITY:
            members += decision.drop[: decision.need - len(members)]
        now += seconds
    return decisions


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["worker-sigkill", "worker-exception", "job-hang", "recovery-overrun", "worker-peer-lost", "node-lost"]),
        st.one_of(st.none(), st.integers(0, 2)),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@given(A_POLICY, FAULTS, st.booleans(), st.floats(0.1, 170.0))
def test_a_job_that_only_fails_ends_within_its_budget(
    policy: str,
    faults: list[tuple[str, int | None, bool]],
    in_one_incident: bool,  # noqa: FBT001
    seconds: float,
) -> None:
    """Whatever fails, and however often nodes are lost and come back: the budget of recoveries is the bound."""
    decisions = survived(policy, faults, in_one_incident=in_one_incident, seconds=seconds)
    assert decisions[-1].action is RecoveryAction.FAIL
    assert len(decisions) <= RecoveryBudget().max_recoveries + 1


@given(A_POLICY, st.sampled_from(["worker-sigkill", "worker-exception", "job-hang", "recovery-overrun"]), st.booleans())
def test_a_script_that_always_dies_fails_the_job_after_a_few_recoveries(policy: str, kind: str, in_one_incident: bool) -> None:  # noqa: FBT001
    """Without a lost node the recoveries that bring nothing are counted, hours apart or not; a spare is tried before the end."""
    decisions = survived(policy, [(kind, 0, False)], in_one_incident=in_one_incident, seconds=7200.0)
    assert decisions[-1].action is RecoveryAction.FAIL
    assert len(decisions) <= RecoveryBudget().max_recoveries_without_progress + 2
    assert sum(decision.action is RecoveryAction.REPLACE_NODE for decision in decisions) >= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rack_that_goes_dark_node_by_node_does_not_end_the_job(policy: str) -> None:
    """Each loss interrupts the recovery from the one before, so none of them brings a step."""
    dark = [("node-lost", 0, True)] * 4
    actions = [decision.action for decision in survived(policy, [*dark, ("user-error", 0, False)], in_one_incident=True, seconds=5.0)]
    assert len(actions) == 5
    assert RecoveryAction.FAIL not in actions[:4]
