"""Burn in nodes: test each by itself, then the network in pairs, and return the outcome of each node."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.policies.nodes.burn_in import OFFSET, UNCERTAIN, BurnInOutcome, apply_thresholds, outcome
from holdfast.policies.nodes.pair_schedule import PairTest, findings, next_round
from holdfast.policies.nodes.required_checks import PartToTest
from holdfast.probe.burn_in.checks.traffic import BLOCK
from holdfast.probe.burn_in.plan import BurnInPlan
from holdfast.probe.burn_in.session import BurnInConnections, BurnInSession
from holdfast.probe.remote.program import NoAnswer, ProbeFailed

MAX_THREADS: Final = 64
"""Nodes that are tested at once. Each takes a waiting thread and a connection here."""
SLOWEST: Final = 4.0
"""A pair may take this many times as long as at the minimum bandwidth, plus `PAIR_SECONDS`."""
PAIR_SECONDS: Final = 20.0
CLOCK_SECONDS: Final = 0.2
"""Time for which a node's clocks are watched."""
SHARES: Final = {"compute": 0.35, "matrix": 0.1, "gpu": 0.25, "memory": 0.25, "disk": 0.05}
"""Each check's share of the time of a node."""

T = TypeVar("T")
R = TypeVar("R")
OnCheck = Callable[[str, Check], None]
"""Called with a node and each of its checks as it ends, from several threads."""
Relay = Callable[[str, str, int], tuple[str, int]]
"""From the serving node, the connecting node and the port to the host and port to connect to."""


@dataclass(slots=True)
class BurnInRunner:
    """One burn-in of some nodes."""

    connections: BurnInConnections
    plan: BurnInPlan
    on_check: OnCheck = lambda _node, _check: None
    now: Callable[[], float] = time.time
    """The clock that those of the nodes are compared with."""
    relay: Relay | None = None
    wanted: Mapping[str, Sequence[PartToTest]] = field(default_factory=dict)
    """Node to the parts of it that the checks have to exercise."""
    _sessions: dict[str, BurnInSession] = field(default_factory=dict)
    _aborted: bool = False
    _failures: dict[str, str] = field(default_factory=dict)
    """Node to why no command reaches it."""

    def try_out(self, nodes: Sequence[str], partners: Sequence[str] = ()) -> dict[str, BurnInOutcome]:
        """Return the outcome of each of *nodes*. *partners* take part in the network checks, and are not judged."""
        try:
            checks = dict(zip(nodes, self._for_all(self._check_node, nodes), strict=True))
            for node, check in self._check_network(nodes, partners).items():
                self.on_check(node, check)
                checks[node].append(check)
        finally:
            self._close_sessions()
        return {node: outcome(node, checks[node], self.wanted.get(node, ())) for node in nodes}

    def _for_all(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Do *work* for all at once, or for one after another where nodes share one machine, and would slow each other down."""
        threads = max(1, min(MAX_THREADS, len(items))) if self.connections.concurrent else 1
        with ThreadPoolExecutor(threads, thread_name_prefix="burn-in") as pool:
            try:
                return list(pool.map(work, items))
            except BaseException:  # Ctrl-C does not wait for the nodes
                self._aborted = True
                pool.shutdown(wait=False, cancel_futures=True)
                self._close_sessions()
                raise

    def _close_sessions(self) -> None:
        for session in list(self._sessions.values()):
            session.close()
        self._sessions.clear()

    # -- one node ---------------------------------------------------------------------------------------------------------

    def _check_node(self, node: str) -> list[Check]:
        """Test one node by itself."""
        session = self._session(node)
        if session is None:
            found = [Check(name="reach", mark=CheckMark.SKIPPED, words=self._failures[node])]
            self.on_check(node, found[0])
            return found
        found = []
        for check in self._checks(session):
            if self._aborted:
                break
            found.append(apply_thresholds(check, self.plan.limits))
            self.on_check(node, found[-1])
        return found

    def _checks(self, session: BurnInSession) -> Iterator[Check]:
        plan = self.plan
        seconds = {name: share * plan.seconds for name, share in SHARES.items()}
        yield from session.ask("compute", seconds=seconds["compute"])
        if plan.torch:
            yield from session.ask("matrix", seconds=seconds["matrix"])
            expected = plan.gpus.get(session.node, 0)
            yield from session.ask("gpu", seconds=seconds["gpu"], share=plan.memory_share, expected=expected)
        yield from session.ask("memory", seconds=seconds["memory"], share=plan.memory_share, most=plan.memory_most)
        folder = self.connections.folder(session.node)
        yield from session.ask("disk", seconds=max(1.0, seconds["disk"]), folder=folder, size=plan.disk_size)
        yield self._check_clock(session)

    def _check_clock(self, session: BurnInSession) -> Check:
        """Watch the node's clocks, and compare them with ours."""
        (check,) = session.ask("ticking", seconds=min(CLOCK_SECONDS, self.plan.seconds / 4))
        if check.mark is not CheckMark.PASSED:
            return replace(check, name="clock")
        try:
            off, uncertain = session.offset(self.now)
        except NoAnswer as error:
            return replace(check, mark=CheckMark.SKIPPED, words=str(error))
        return replace(check, figures={**check.figures, OFFSET: off, UNCERTAIN: uncertain})

    def _session(self, node: str) -> BurnInSession | None:
        """Return the session of *node*, opened at the first call; None where that failed."""
        if self._aborted:
            self._failures.setdefault(node, "the burn-in was aborted")
        if node not in self._sessions and node not in self._failures:
            try:
                self._sessions[node] = self.connections.open(node)
            except NoAnswer as error:
                self._failures[node] = str(error)
        return self._sessions.get(node)

    # -- pairs ------------------------------------------------------------------------------------------------------------

    def _check_network(self, nodes: Sequence[str], partners: Sequence[str]) -> dict[str, Check]:
        """Test pairs of nodes in rounds; return what is known of each node's network then."""
        begun, tests, ends = time.monotonic(), list[PairTest](), dict[str, Check]()
        tested = [node for node in nodes if node in self._sessions]
        for _ in range(self.plan.rounds):
            pairs = next_round(tested, partners, tests)
            if not pairs:
                break
            for test, checks in self._for_all(self._test_pair, pairs):
                tests.append(test)
                ends |= {node: check for node, check in checks.items() if test.mark is CheckMark.PASSED or node not in ends}
        spent = time.monotonic() - begun
        has_pair = len(nodes) + len(partners) > 1
        return {
            node: Check(
                name="network",
                mark=found.mark,
                words=found.words,
                figures=ends[node].figures if node in ends else {},
                devices=ends[node].devices if node in ends else (),
                seconds=spent,
                needed=has_pair and not self.plan.short,
            )
            for node, found in findings(tested, tests).items()
        }

    def _test_pair(self, pair: tuple[str, str]) -> tuple[PairTest, dict[str, Check]]:
        """Exchange blocks between two nodes in both directions; return the result, and the check of each end."""
        a, b = pair
        client, server = self._session(a), self._session(b)
        if client is None or server is None:
            why = "; ".join(f"{node}: {self._failures[node]}" for node in (a, b) if node in self._failures)
            return PairTest(a=a, b=b, mark=CheckMark.SKIPPED, words=why), {}
        try:
            sent, served = self._exchange(client, server)
        except NoAnswer as error:
            return PairTest(a=a, b=b, mark=CheckMark.SKIPPED, words=str(error)), {}
        sent = apply_thresholds(sent, self.plan.limits)
        ends = {a: sent, b: replace(served, figures=sent.figures)}
        for node, check in ((a, sent), (b, served)):
            if check.mark is not CheckMark.PASSED:
                return PairTest(a=a, b=b, mark=check.mark, words=f"at {node}, {check.words}"), ends
        return PairTest(a=a, b=b, mark=CheckMark.PASSED), ends

    def _exchange(self, client: BurnInSession, server: BurnInSession) -> tuple[Check, Check]:
        blocks = max(1, self.plan.network_size // BLOCK)
        seconds = PAIR_SECONDS + SLOWEST * 2 * self.plan.network_size / 1e6 / (self.plan.limits.network or 10.0)
        token, until = secrets.token_hex(16), time.monotonic() + 2 * seconds
        mark = server.begin("serve", seconds=seconds, token=token, blocks=blocks, port=self.plan.port)
        listening = server.answer(mark, until)
        if not isinstance(listening, dict):  # it could not listen, for example because the port is in use
            why = listening[0]["words"] if isinstance(listening, list) and listening else listening
            raise ProbeFailed(f"{server.node} could not listen: {why}")
        host, port = self.connections.address(server.node), int(listening["port"])
        if self.relay is not None:
            host, port = self.relay(server.node, client.node, port)
        (sent,) = client.ask("send", seconds=seconds, token=token, blocks=blocks, host=host, port=port)
        (served,) = server.checks(mark, until)
        return sent, served
