"""What explains what: the tables, the places that faults name, and the weighing."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.associations import ASSOCIATIONS, PLACE, BadAssociation, Scope, follows_step, is_secondary, load, traits_of
from holdfast.detectors.catalogue import Fault
from holdfast.detectors.causes import MOST, candidates, device_of, explained, peers_in
from holdfast.detectors.diagnosis import diagnose, evidence_wait_seconds, see
from holdfast.detectors.evidence import HangLimits, LogLine
from holdfast.detectors.log_lines.outputs import said
from tests.detectors.evidence_of import a_killed, an_echo, an_end, an_error, seen


def a_fault(kind: str, node: str | None = "n0", at: float = 0.0, **facts: object) -> Fault:
    """Return a fault that somebody reported."""
    return Fault(**{"kind": kind, "at": at, "node": node, "quote": kind, "source": "a test", **facts})  # type: ignore[arg-type]


def test_every_kind_that_a_table_names_is_in_the_catalogue() -> None:
    """A slip of the pen would be a rule that never holds."""
    assert {kind for kinds in ASSOCIATIONS.named.values() for kind in kinds} <= CATALOGUE.keys()
    assert ASSOCIATIONS.vague <= CATALOGUE.keys()
    assert ASSOCIATIONS.restates.keys() <= CATALOGUE.keys()


def test_every_rule_takes_some_causes_and_some_effects() -> None:
    """And its numbers are in their ranges."""
    kinds = [traits_of(name) for name in CATALOGUE]
    for rule in ASSOCIATIONS.explains:
        assert any(map(rule.cause.takes, kinds)), rule.name
        assert any(map(rule.effect.takes, kinds)), rule.name
    assert len({rule.name for rule in ASSOCIATIONS.explains}) == len(ASSOCIATIONS.explains), "two rules have one name"
    assert all(0.0 < rule.strength < 1.0 and rule.before >= 0.0 and rule.after > 0.0 for rule in ASSOCIATIONS.explains)


def test_most_kinds_explain_something_or_follow_from_something() -> None:
    """A catalogue without associations is a list."""
    rules = ASSOCIATIONS.explains
    kinds = map(traits_of, CATALOGUE)
    alone = sorted(one.id for one in kinds if not any(rule.cause.takes(one) or rule.effect.takes(one) for rule in rules))
    assert len(alone) < len(CATALOGUE) / 3, alone


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clock_slack = [", "is no TOML"),
        ("clock_slack = 5.0", "says nothing of 'same_clock'"),
        ('clock_slack = 5.0\nsame_clock = 1.0\nown = 80\nvague = []\n[groups.a]\nparts = ["gpu"]', "unknown fields parts"),
        ('clock_slack = 5.0\nsame_clock = 1.0\nown = 80\nvague = []\n[groups.a]\ngroups = ["b"]', "an unknown group 'b'"),
        ('clock_slack = 5.0\nsame_clock = 1.0\nown = 80\nvague = []\n[groups.a]\ncomponents = ["gpus"]', "unknown components gpus"),
        ('clock_slack = 5.0\nsame_clock = 1.0\nown = 80\nvague = []\n[groups.a]\nbut = ["gpu-lost"]', "names no kind and no family"),
        ('clock_slack = "soon"\nsame_clock = 1.0\nown = 80', "could not convert"),
    ],
)
def test_an_invalid_table_is_rejected_with_location_reason_and_remedy(tmp_path: Path, text: str, words: str) -> None:
    """Whoever adds a row reads this."""
    place = tmp_path / "mine.toml"
    place.write_text(text)
    with pytest.raises(BadAssociation) as caught:
        load(place)
    assert words in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_a_rule_of_an_unknown_scope_is_refused(tmp_path: Path) -> None:
    """The word is named."""
    place = tmp_path / "mine.toml"
    place.write_text(PLACE.read_text().replace(f'scope = "{Scope.NODE}"', 'scope = "rack"', 1))
    with pytest.raises(BadAssociation, match="rack"):
        load(place)


def test_scope_and_window_bound_what_a_fault_explains() -> None:
    """A GPU takes its own node's workers along, soon; not those of another node, nor next week's."""
    gone = a_fault("gpu-off-bus")
    assert explained(gone, a_fault("worker-sigsegv", at=5.0)) > 0.9
    assert explained(gone, a_fault("worker-sigsegv", at=86400.0)) == 0.0
    assert explained(gone, a_fault("worker-sigkill", node="n1", at=5.0)) == 0.0
    assert explained(gone, a_fault("worker-peer-lost", node="n1", at=60.0)) > 0.9
    assert explained(a_fault("worker-peer-lost", node="n1", at=60.0), gone) == 0.0


def test_two_devices_of_one_node_do_not_speak_for_each_other() -> None:
    """A symptom of another GPU has another cause."""
    gone = a_fault("gpu-off-bus", device="0000:4e:00.0")
    assert explained(gone, a_fault("gpu-gsp-timeout", device="PCI:0000:4e:00")) > 0.8
    assert explained(gone, a_fault("gpu-gsp-timeout", device="0000:5f:00.0")) == 0.0
    assert explained(gone, a_fault("gpu-gsp-timeout")) > 0.8, "who names no device may mean this one"


def test_a_disk_is_not_blamed_for_the_file_system_on_another_one() -> None:
    """A volume or a mount whose disk is not named may be on any."""
    reset = a_fault("nvme-reset", quote="nvme nvme0: I/O 1 QID 2 timeout, reset controller", source="kernel log on n0")
    own, others = "EXT4-fs (nvme0n1p2): Remounting filesystem read-only", "EXT4-fs (sda2): Remounting filesystem read-only"
    assert explained(reset, a_fault("filesystem-read-only", at=5.0, quote=own)) > 0.8
    assert explained(reset, a_fault("filesystem-read-only", at=5.0, quote=others)) == 0.0
    assert explained(reset, a_fault("filesystem-read-only", at=5.0, device="/ckpt", quote="/ckpt (/dev/sda2): read-only")) == 0.0
    assert explained(reset, a_fault("filesystem-read-only", at=5.0, quote="XFS (dm-3): Remounting filesystem read-only")) > 0.8
    failed = a_fault("worker-storage-failed", at=6.0, rank=0)
    for where, blamed in (("/dev/nvme0n1p2", "nvme-reset"), ("/dev/sda2", "filesystem-read-only")):
        measured = a_fault("filesystem-read-only", at=5.0, device="/ckpt", quote=f"/ckpt ({where}): read-only, and was not to be")
        assert diagnose([reset, measured, failed]).root.kind == blamed


@pytest.mark.parametrize("full", ["disk-full", "checkpoint-disk-full", "checkpoint-write-failed"])
@pytest.mark.parametrize("hang", ["job-hang", "collective-stuck"])
def test_a_hang_is_not_blamed_on_a_checkpoint_that_could_not_be_written(full: str, hang: str) -> None:
    """Training goes on without it; a rank that ends because of the full disk is what others wait for."""
    trouble, stuck = a_fault(full, rank=0), a_fault(hang, node=None, at=20.0)
    assert diagnose([trouble, stuck]).root.kind == hang
    ended = a_fault("worker-disk-full", rank=0, at=1.0)
    assert explained(trouble, stuck) == 0.0 < explained(ended, stuck)
    assert diagnose([trouble, ended, stuck]).root.kind != hang


@pytest.mark.parametrize("trouble", ["nvme-reset", "link-down", "gpu-xid-nvlink-fatal", "soft-lockup", "cpu-hot"])
def test_which_collectives_ranks_enter_is_no_devices_doing(trouble: str) -> None:
    """What devices report in the same minute explains a hang, and not that a rank came to another collective than the others."""
    line = a_fault(trouble, at=0.0, source="kernel log on n0")
    for kind in ("collective-mismatch", "collective-deadlock"):
        apart = a_fault(kind, node=None, at=2.0)
        assert explained(line, apart) == 0.0
        assert diagnose([line, apart]).root.kind == kind
        raised = a_fault("worker-exception", rank=1, at=1.0)
        assert explained(raised, apart) > 0.5, "its handler may enter another one"


def test_a_stuck_kernel_ends_no_process_and_a_disk_cuts_no_connection() -> None:
    """What ends or is cut has another cause; a hang may have this one."""
    stuck, disk = a_fault("soft-lockup", source="kernel log on n0"), a_fault("nvme-reset", source="kernel log on n0")
    hang, agent, lost = a_fault("job-hang", at=5.0), a_fault("agent-lost", at=5.0), a_fault("worker-peer-lost", rank=1, at=5.0)
    assert explained(stuck, hang) > 0.5 < explained(disk, hang)
    assert explained(stuck, agent) == explained(stuck, a_fault("worker-sigkill", rank=0, at=5.0)) == 0.0
    assert explained(disk, lost) == 0.0
    assert explained(a_fault("worker-storage-failed", rank=0, at=4.0), lost) > 0.5
    assert diagnose([stuck, agent]).root.kind == "agent-lost"
    assert diagnose([disk, lost]).root.kind == "worker-peer-lost"


def test_an_order_that_only_differing_clocks_explain_counts_for_less() -> None:
    """Five seconds are within what clocks of nodes differ by, ten are not."""
    first = a_fault("worker-sigkill", at=10.0)
    exact, early, too_early = (a_fault("worker-exception", "n1", at) for at in (9.0, 3.0, 1.0))
    assert explained(first, exact) > explained(first, early) > explained(first, too_early) == 0.0


def test_a_chain_of_causes_leads_to_its_begin() -> None:
    """The card takes the link down, the link takes the collective down: the card is the root, though no rule says so at once."""
    faults = [a_fault("mlx5-health", at=0.0), a_fault("link-down", at=1.0), a_fault("worker-peer-lost", "n1", at=9.0)]
    first, *_ = candidates(faults)
    assert first.fault.kind == "mlx5-health"
    assert {fault.kind for fault in first.explains} == {"link-down", "worker-peer-lost"}


def test_independent_sources_strengthen_an_explanation() -> None:
    """What the kernel and NVML both say is surer than what one of them says."""
    rest = [a_fault("worker-oom-killed", "n1", rank=3)]
    one = candidates([a_fault("gpu-off-bus"), a_fault("gpu-off-bus"), *rest])[0].confidence
    two = candidates([a_fault("gpu-off-bus"), a_fault("gpu-off-bus", source="NVML on n0"), *rest])[0].confidence
    assert two > one


def test_many_secondary_failures_are_one_line_of_the_diagnosis_and_no_burden() -> None:
    """Ten thousand ranks that lost a peer are not weighed against each other."""
    faults = seen(*(an_echo(f"n{rank // 8}", rank, at=rank / 1e4) for rank in range(1, 2000)), a_killed("n0", 0, at=0.05))
    diagnosis = diagnose(faults, (), 250)
    assert (diagnosis.root.kind, len(diagnosis.candidates)) == ("worker-sigkill", 1)
    assert len(diagnosis.candidates[0].explains) == 1999 < MOST * 1999
    assert evidence_wait_seconds(faults, 250) == 0.0


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("NVRM: Xid (PCI:0000:4E:00): 79, pid=7", "4e:00"),
        ("GPU 0000:4e:00.0: Xid 79", "4e:00"),
        ("12:30:01 mlx5_0 port 1: link down", "mlx5_0"),
        ("blk_update_request: I/O error, dev nvme1n1, sector 5", "nvme1"),
        ("EXT4-fs (nvme1n1p2): Remounting filesystem read-only", "nvme1"),
        ("EXT4-fs (sdb2): Remounting filesystem read-only", "sdb"),
        ("XFS (dm-3): Corruption detected", ""),
        ("2026-03-01 12:30:01 nothing is named", ""),
    ],
)
def test_the_device_is_parsed_from_the_text(text: str, device: str) -> None:
    """In one form, however it is written; a time of day is none."""
    assert device_of(a_fault("gpu-off-bus", quote=text)) == device


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        ("NCCL WARN NET/IB : Got completion from peer 10.0.0.3<43021> with status=12", {"10.0.0.3"}),
        ("NCCL WARN socketProgress: Connection closed by remote peer node-3<37562>", {"node-3"}),
        ("Connect to 10.0.0.3<5432> failed : Connection refused", {"10.0.0.3"}),
        ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:40123", {"10.0.0.3"}),
        ("Rank 0: ranks 3, 5 failed to pass monitoredBarrier in 30000 ms", {"rank 3", "rank 5"}),
        ("a rank was lost outside of a step, in group 'data': ranks 3, 5 are lost. All ranks restart", {"rank 3", "rank 5"}),
        ("rank 3 is lost", {"rank 3"}),
        ("rank 0 lost a peer", set()),
        ("Connection reset by peer", set()),
        ("waiting for peer review of 3 documents", set()),
    ],
)
def test_the_blamed_peer_is_parsed_from_the_text(text: str, peers: set[str]) -> None:
    """Hosts, addresses and ranks; *by peer* alone names nobody."""
    assert peers_in(text) == peers


def test_one_that_is_accused_by_its_own_node_alone_is_not() -> None:
    """And one observer is hearsay."""
    line = "NCCL WARN NET/IB : Got completion from peer n7<4791> with status=12"
    lines = [LogLine(text=line, node="n7", rank=rank, at=rank / 10) for rank in range(3)]
    assert "peer-blamed" not in {fault.kind for fault in diagnose(see(lines, HangLimits()), (), 8).secondary_failures}
    lines[0] = LogLine(text=line, node="n1", rank=0)
    assert "peer-blamed" not in {fault.kind for fault in diagnose(see(lines, HangLimits()), (), 8).secondary_failures}


def test_last_output_is_matched_with_its_source() -> None:
    """The exception that the runtime reported, or the lines that the worker printed; with what makes two of them the same."""
    reported = an_error("n0", 0, type="torch.AcceleratorError", message="CUDA error: an illegal memory access was encountered", line=9)
    printed = an_end("n1", 1, signal=6, output="step 7\nCUDA error: uncorrectable ECC error encountered\nwhat a pity")
    first, second = said([reported, printed])
    assert (first.kind, first.source, first.step) == ("cuda-illegal-address", "exception report of rank 0", 7)
    assert first.signature.endswith("torch.AcceleratorError at train.py:9")
    assert (second.kind, second.source, second.node) == ("cuda-uncorrectable-ecc", "worker output of rank 1", "n1")


def test_output_that_restates_the_exit_or_is_unspecific_is_omitted() -> None:
    """Out of memory is out of memory; and training prints much."""
    assert said([an_error(type="torch.OutOfMemoryError", message="CUDA out of memory. Tried to allocate 2 GiB")]) == []
    assert said([an_error(type="RuntimeError", message="Connection closed by peer [127.0.0.1]:4711 (gloo)", peer_lost=True)]) == []
    assert said([a_killed(output="step 7 loss 2.1\nretrying the download, attempt 1\n")]) == []
    assert said([an_end(code=0, finished=True, output="CUDA error: an illegal memory access was encountered")]) == []


def test_each_kind_is_reported_once_per_node() -> None:
    """Eight ranks that say the same are one witness."""
    message = "CUDA error: an illegal memory access was encountered"
    reported = said([an_error(f"n{rank // 8}", rank, at=rank / 10, type="RuntimeError", message=message) for rank in range(16)])
    assert {fault.kind for fault in reported} == {"cuda-illegal-address"}
    assert [(fault.node, fault.rank) for fault in reported] == [("n0", 0), ("n1", 8)]


@pytest.mark.parametrize(
    ("end", "nameless"),
    [
        (an_end(code=37, output="flux capacitor out of phase"), True),
        (an_end(code=37), True),
        (an_error(type="FluxError", message="out of phase"), True),
        (an_end(signal=40), True),
        (an_error(type="ValueError", message="bad shape"), False),
        (an_end(code=1, output="CUDA error: an illegal memory access was encountered"), False),
        (a_killed(), False),
        (an_echo(), False),
    ],
)
def test_an_end_that_nothing_knows_is_kept_as_unknown_with_its_context(end: object, nameless: bool) -> None:  # noqa: FBT001 (a row)
    """Beside the kind that the escalation handles; what a signature knows is not unknown."""
    found = [fault for fault in said([end]) if fault.kind == "unknown"]
    assert bool(found) is nameless
    for fault in found:
        assert fault.detail.startswith("rank 0 on n0, step 7: ")
        assert fault.source


def test_the_families_of_secondary_failures_and_of_what_follows_the_step_do_not_overlap() -> None:
    """What reports a loss is never the script's."""
    assert not {name for name in CATALOGUE if is_secondary(name) and follows_step(name)}
