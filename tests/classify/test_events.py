"""Faults that belong together are one event: repetitions, and several lines about one fault."""

from __future__ import annotations

from holdfast.classify.classifier import classify_text
from holdfast.classify.events import GAP, MOST_OPEN, Event, Events

XID = "NVRM: Xid (PCI:0000:18:00): 79, pid=42, GPU has fallen off the bus."
FINE = "step 100 | loss 2.31\n"


def events_of(text: str) -> list[Event]:
    """Return the events of a log."""
    events = Events()
    return [*events.feed(classify_text(text), text.count("\n") + 1), *events.finish()]


def test_an_xid_and_what_the_driver_says_after_it_are_one_event() -> None:
    """Of the same GPU, or without a name; the Xid of another GPU is another event."""
    reset = "NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    first, second = events_of(f"{XID}\n{reset}\n{XID.replace('18:00', '5d:00')}\n")
    assert (first.first.kind, first.count, first.last) == ("gpu-off-bus", 2, 2)
    assert set(first.kinds) == {"gpu-off-bus", "gpu-recovery-reboot"}
    assert (second.first.line, second.count) == (3, 1)


def test_repetitions_are_counted_until_a_gap() -> None:
    """A disk that fails a hundred times in a row is one line to read; after other lines it is another event."""
    failed = "I/O error, dev sdb, sector {} op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2\n"
    text = "".join(failed.format(number) for number in range(100)) + FINE * (GAP + 1) + failed.format(7)
    first, second = events_of(text)
    assert (first.count, first.last, second.count) == (100, 100, 1)


def test_unrelated_faults_stay_apart_and_memory_is_bounded() -> None:
    """Each disk has its own event, however many there are; nothing is lost."""
    failed = "I/O error, dev sd{}, sector 1 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2\n"
    names = [f"{one}{other}" for one in "abcd" for other in "abcdefghijklmnopqrstuvwxyz"]
    events = Events()
    found = [*events.feed(classify_text("".join(failed.format(name) for name in names)), 10), *events.finish()]
    assert len(names) > MOST_OPEN
    assert sum(one.count for one in found) == len(found) == len(names)


def test_a_fault_of_another_log_is_not_swallowed() -> None:
    """A script that runs out of GPU memory says nothing of a memory module; what the kernel says next of the same error does."""
    memory = "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0xe16677 offset:0x0 grain:32)"
    cuda = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    first, second = events_of(f"{memory}\n{cuda}\n")
    assert (first.first.kind, first.count) == ("memory-uncorrected", 1)
    assert (second.first.kind, second.count) == ("cuda-out-of-memory", 1)
