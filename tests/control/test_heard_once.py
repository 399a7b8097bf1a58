"""A GPU that is acted on fails on its own node alone, also where other nodes of the same machine read the same kernel's log."""

from __future__ import annotations

import pytest

from detectors.catalogue import Fault
from holdfast.control.faults.diagnosis_inputs import heard_once
from policies.case import PastFault

GPU = "GPU 0000:18:00.0"


@pytest.mark.parametrize(("kind", "kept"), [("local", ["b"]), ("ssh", ["a", "b", "c"])])
def test_nodes_of_one_machine_do_not_make_a_fault_common(kind: str, kept: list[str]) -> None:
    """Nodes that are machines of their own do: there the same GPU's name is another GPU."""
    fault = Fault(kind="gpu-off-bus", at=5.0, node="b", rank=1, quote="Xid 79", device=GPU)
    earlier = [PastFault(kind="gpu-off-bus", at=5.0, node=node, device=GPU) for node in "abc"]
    other = PastFault(kind="gpu-off-bus", at=4.0, node="a", device="GPU 0000:3b:00.0")
    assert heard_once([*earlier, other], [fault], kind) == (*(one for one in earlier if one.node in kept), other)
