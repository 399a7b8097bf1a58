"""Try nodes out: each by itself, then in pairs, and say of each what it was found to be."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from detectors.burn_in_results import Check, CheckMark
from holdfast.probe.burn_in.checks.traffic import BLOCK
from holdfast.probe.burn_in.connections import BurnInConnections
from holdfast.probe.burn_in.plan import BurnInPlan
from holdfast.probe.burn_in.session import BurnInSession
from holdfast.probe.remote.errors import NoAnswer, ProbeFailed
from policies.burn_in import OFFSET, UNCERTAIN, BurnInOutcome, apply_thresholds, outcome
from policies.pair_schedule import PairTest, findings, next_round
from policies.required_checks import PartToTest

HANDS: Final = 64
"""Nodes that are tried at once. Each costs who asks a thread that waits, and a connection."""
SLOWEST: Final = 4.0
"""A pair may take so many times as long as at the least bandwidth that it has to reach, and `PATIENCE` seconds besides."""
PATIENCE: Final = 20.0
CLOCK: Final = 0.2
"""Seconds for which a node's clocks are watched."""
PARTS: Final = {"compute": 0.35, "matrix": 0.1, "gpu": 0.25, "memory": 0.25, "disk": 0.05}
"""How the time of a node is parted among the checks."""

T = TypeVar("T")
R = TypeVar("R")
Tell = Callable[[str, Check], None]
Relay = Callable[[str, str, int], tuple[str, int]]
"""From the nodes that serves and that comes, and the port, to where the latter has to go."""


@dataclass(slots=True)
class BurnInRunner:
    """One burn-in of some nodes."""

    posts: BurnInConnections
    plan: BurnInPlan
    tell: Tell = lambda _node, _check: None
    """Called with each check as it ends, from several threads."""
    now: Callable[[], float] = time.time
    """The clock that those of the nodes are held against."""
    relay: Relay | None = None
    wanted: Mapping[str, Sequence[PartToTest]] = field(default_factory=dict)
    """Node to the parts of it that the checks have to exercise."""
    _open: dict[str, BurnInSession] = field(default_factory=dict)
    _over: bool = False
    _why: dict[str, str] = field(default_factory=dict)
    """Node to why no order reaches it."""

    def try_out(self, nodes: Sequence[str], partners: Sequence[str] = ()) -> dict[str, BurnInOutcome]:
        """Return what *nodes* were found to be. *partners* lend themselves to trying the network, and are not judged."""
        try:
            checks = dict(zip(nodes, self._each(self._alone, nodes), strict=True))
            for node, check in self._network(nodes, partners).items():
                self.tell(node, check)
                checks[node].append(check)
        finally:
            self._let_go()
        return {node: outcome(node, checks[node], self.wanted.get(node, ())) for node in nodes}

    def _each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Do *work* for all at once; for one after another where nodes are one machine, as they would only take each other's time."""
        hands = max(1, min(HANDS, len(items))) if self.posts.apart else 1
        with ThreadPoolExecutor(hands, thread_name_prefix="burn-in") as pool:
            try:
                return list(pool.map(work, items))
            except BaseException:  # Ctrl-C does not wait for the nodes
                self._over = True
                pool.shutdown(wait=False, cancel_futures=True)
                self._let_go()
                raise

    def _let_go(self) -> None:
        for post in list(self._open.values()):
            post.close()
        self._open.clear()

    # -- one node ---------------------------------------------------------------------------------------------------------

    def _alone(self, node: str) -> list[Check]:
        """Try one node by itself."""
        post = self._post(node)
        if post is None:
            found = [Check(name="reach", mark=CheckMark.SKIPPED, words=self._why[node])]
            self.tell(node, found[0])
            return found
        found = []
        for check in self._checks(post):
            if self._over:
                break
            found.append(apply_thresholds(check, self.plan.limits))
            self.tell(node, found[-1])
        return found

    def _checks(self, post: BurnInSession) -> Iterator[Check]:
        plan = self.plan
        yield from post.ask("compute", seconds=PARTS["compute"] * plan.seconds)
        if plan.torch:
            yield from post.ask("matrix", seconds=PARTS["matrix"] * plan.seconds)
            expected = plan.gpus.get(post.node, 0)
            yield from post.ask("gpu", seconds=PARTS["gpu"] * plan.seconds, share=plan.memory_share, expected=expected)
        yield from post.ask("memory", seconds=PARTS["memory"] * plan.seconds, share=plan.memory_share, most=plan.memory_most)
        yield from post.ask(
            "disk", seconds=max(1.0, PARTS["disk"] * plan.seconds), folder=self.posts.folder(post.node), size=plan.disk_size
        )
        yield self._clock(post)

    def _clock(self, post: BurnInSession) -> Check:
        """Watch the node's clocks, and ask how far they are from ours."""
        (check,) = post.ask("ticking", seconds=min(CLOCK, self.plan.seconds / 4))
        if check.mark is not CheckMark.PASSED:
            return replace(check, name="clock")
        try:
            off, uncertain = post.offset(self.now)
        except NoAnswer as error:
            return replace(check, mark=CheckMark.SKIPPED, words=str(error))
        return replace(check, figures={**check.figures, OFFSET: off, UNCERTAIN: uncertain})

    def _post(self, node: str) -> BurnInSession | None:
        """Return the way to *node*, opened when it is first asked for."""
        if self._over:
            self._why.setdefault(node, "it was broken off")
        if node not in self._open and node not in self._why:
            try:
                self._open[node] = self.posts.open(node)
            except NoAnswer as error:
                self._why[node] = str(error)
        return self._open.get(node)

    # -- pairs ------------------------------------------------------------------------------------------------------------

    def _network(self, nodes: Sequence[str], partners: Sequence[str]) -> dict[str, Check]:
        """Have nodes meet in rounds; return of each what is known of its end then."""
        begun, met, told = time.monotonic(), list[PairTest](), dict[str, Check]()
        tested = [node for node in nodes if node in self._open]
        for _ in range(self.plan.rounds):
            pairs = next_round(tested, partners, met)
            if not pairs:
                break
            for meeting, ends in self._each(self._meet, pairs):
                met.append(meeting)
                told |= {end: check for end, check in ends.items() if meeting.mark is CheckMark.PASSED or end not in told}
        spent = time.monotonic() - begun
        is_alone = len(nodes) + len(partners) < 2  # noqa: PLR2004 (a pair)
        return {
            node: Check(
                name="network",
                mark=found.mark,
                words=found.words,
                figures=told[node].figures if node in told else {},
                devices=told[node].devices if node in told else (),
                seconds=spent,
                needed=not is_alone and not self.plan.short,
            )
            for node, found in findings(tested, met).items()
        }

    def _meet(self, pair: tuple[str, str]) -> tuple[PairTest, dict[str, Check]]:
        """Have the first connect to the second, and exchange blocks both ways; return the result, and each end's check with the figures."""
        a, b = pair
        comes, serves = self._post(a), self._post(b)
        if comes is None or serves is None:
            why = "; ".join(f"{node}: {self._why[node]}" for node in (a, b) if node in self._why)
            return PairTest(a=a, b=b, mark=CheckMark.SKIPPED, words=why), {}
        try:
            came, served = self._exchange(comes, serves)
        except NoAnswer as error:
            return PairTest(a=a, b=b, mark=CheckMark.SKIPPED, words=str(error)), {}
        came = apply_thresholds(came, self.plan.limits)
        ends = {a: came, b: replace(served, figures=came.figures)}
        for end, check in ((a, came), (b, served)):
            if check.mark is not CheckMark.PASSED:
                return PairTest(a=a, b=b, mark=check.mark, words=f"at {end}, {check.words}"), ends
        return PairTest(a=a, b=b, mark=CheckMark.PASSED), ends

    def _exchange(self, a: BurnInSession, b: BurnInSession) -> tuple[Check, Check]:
        blocks = max(1, self.plan.network_size // BLOCK)
        seconds = PATIENCE + SLOWEST * 2 * self.plan.network_size / 1e6 / (self.plan.limits.network or 10.0)
        token, until = secrets.token_hex(16), time.monotonic() + 2 * seconds
        mark = b.begin("serve", seconds=seconds, token=token, blocks=blocks, port=self.plan.port)
        told = b.answer(mark, until)
        if not isinstance(told, dict):  # it could not listen: the port is taken, say
            raise ProbeFailed(f"{b.node} could not listen: {told[0]['words'] if isinstance(told, list) and told else told}")
        host, port = self.posts.address(b.node), int(told["port"])
        if self.relay is not None:
            host, port = self.relay(b.node, a.node, port)
        (came,) = a.ask("send", seconds=seconds, token=token, blocks=blocks, host=host, port=port)
        (served,) = b.checks(mark, until)
        return came, served
