"""Burn-ins as a page: why first, what to do next, and a line for each check."""

from __future__ import annotations

from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.policies.nodes.burn_in import BurnInOutcome, outcome
from holdfast.policies.nodes.cordons import CordonedFault
from holdfast.policies.nodes.node_states import NodeState
from holdfast.policies.nodes.required_checks import parts_to_test
from holdfast.report.text.node_text import burn_ins_in_short, burn_ins_markdown
from tests.mentions import mentions, one_line_mentions

SOUND = Check(name="compute", mark=CheckMark.PASSED, words="every answer is the known one", figures={"cores": 8.0}, seconds=21.0)
ODD = Check(name="disk", mark=CheckMark.FAILED, words="*block* 3 | of <4>\nwas read wrong", devices=("/", "sda1"))
NO_GPU = Check(name="gpu", mark=CheckMark.SKIPPED, words="no NVIDIA device is visible", needed=False)
FOUND: dict[str, BurnInOutcome] = {
    "node-0": outcome("node-0", [SOUND]),
    "node-1": outcome("node-1", [SOUND, NO_GPU], parts_to_test([CordonedFault(kind="gpu-off-bus")])),
    "node-2": outcome("node-2", [SOUND, ODD]),
}
STATES = {
    "node-0": NodeState.HEALTHY, "node-1": NodeState.QUARANTINED, "node-2": NodeState.QUARANTINED, "node-3": NodeState.CORDONED,
}  # fmt: skip


def test_the_page_says_who_stays_out_why_and_what_to_do() -> None:
    """What needs a person comes first; each node and each check is one line, whatever a node says."""
    page = burn_ins_markdown(FOUND, {"node-3": "it is cordoned"}, STATES)
    escaped = "\\*block\\* 3 \\| of &lt;4&gt; was read wrong"
    for line, named in zip(
        page.splitlines(),
        (
            ("**node-2**", "failed", NodeState.QUARANTINED, "disk", escaped),
            ("**node-1**", "not proven", NodeState.QUARANTINED, "GPU", NO_GPU.words),
            ("**node-0**", "passed", NodeState.HEALTHY, "compute"),
            ("**node-3**", "not tested", NodeState.CORDONED, "it is cordoned"),
        ),
        strict=False,
    ):
        assert mentions(line, *named)
    assert one_line_mentions(page, "**compute**", "passed", "21.0 s", SOUND.words, "8 cores")
    assert one_line_mentions(page, "**disk**", "failed", "0 s", escaped, "/, sda1")
    assert one_line_mentions(page, "node-1", NodeState.QUARANTINED, "GPU", "`holdfast node return node-1 --reason ...`")
    assert page.index("## What to do") < page.index("## Checks of node-2") < page.index("## Checks of node-0")


def test_a_run_in_a_sentence_gives_the_reasons() -> None:
    """Three of them: more do not fit the line that the UI has for it."""
    assert burn_ins_in_short({"node-0": FOUND["node-0"]}, 1) == "1 node, 1 passed, 1 not tested"
    assert mentions(burn_ins_in_short({"node-1": FOUND["node-1"]}, 0), "1 node", "1 not proven", "node-1", "GPU")
    many = {f"node-{number}": outcome(f"node-{number}", [ODD]) for number in range(5)}
    assert burn_ins_in_short(many, 0).endswith("; and 2 more")
