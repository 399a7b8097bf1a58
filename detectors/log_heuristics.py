"""Lines that no signature knows, judged by their words: who speaks, and whether it tells of trouble.

Sceptical on purpose. Words such as *error* stand in names of files, in counts of zero and in retries that went well, so these are taken
out first; what is left is a fault when it speaks of trouble and of nothing that calms, and when a device, the kernel or a logger's own
level stands behind it.
"""

from __future__ import annotations

import re
from typing import Final

from detectors.catalogue import Blame, RecommendedAction, fault_kind
from detectors.evidence import LogLine, Sample


def _any_of(words: str) -> str:
    """Return an expression for any of *words*, whole; a dot stands for a blank."""
    return rf"(?i)\b(?:{'|'.join(words.split())})\b"


TROUBLE: Final = _any_of(r"""
    errors? err failures? fail(?:s|ed|ing)? fatal\w* faults? faulty faulted uncorrect\w* unrecover\w* corrupt\w* timed?[ -]?out
    timeouts? hang hung stuck stall(?:ed|s)? lost dead died crash\w* abort\w* panic\w* offline unreachable refused denied
    not.respond\w* no.response unable cannot can't could.not couldn't bad invalid exceed\w* overflow\w* overrun unresponsive broken
    disconnect\w* killed damaged non-?operational unhealthy degraded critical violation exception malfunction inaccessible missing
    mismatch poison\w* read-only not.ready giving.up gave.up no.space out.of.memory is.down went.down link.down unavailable
    deadlock\w* wedged unplugged offlined degraded exhausted expired interrupted illegal rejected rejecting unexpected\w*
""")
"""Words of trouble. A matcher looks for them first: a line without any is not looked at again."""

_GRAVE: Final = re.compile(
    _any_of(r"""
    fatal uncorrect\w* unrecover\w* panic hung dead died crash(?:ed|es)? corrupt(?:ed|ion) not.respond\w* unresponsive offline
    wedged offlined exhausted unavailable
    lost(?!:) aborted non-?operational unhealthy malfunction inaccessible giving.up gave.up timed.out failed failure is.down went.down
    (?:link|loop|port).down
"""),
    re.ASCII,
)
_NOT_YET: Final = re.compile(
    r"(?i)\b(?:not|never|cannot|can't|could(?:n't| not)|unable to|failure to|fail(?:s|ed)? to|without)(?: be| been)? "
    r"(?:succe\w+|recover\w*|resolve\w*|restore\w*|clear\w*|complete\w*|correct\w*|initiali[sz]\w*|register\w*|load\w*|start\w*|finish\w*"
    r"|enable\w*|establish\w*|allow\w*|ignor\w+|ready|connect\w*)",
    re.ASCII,
)
"""What would calm if it were so."""
_WELL_AGAIN: Final = re.compile(
    _any_of(r"""
    succe\w+ passed recovered resolved restored cleared healthy subsided deactivated came.up back.online harmless ignor\w+
    skip(?:s|ped|ping)?
"""),
    re.ASCII,
)
"""What calms whoever says it."""
_CALM: Final = re.compile(
    _any_of(r"""
    retrying will.retry expected optional deprecated corrected correctable not.(?:supported|available|present|found) unsupported using
    assuming fallback falling.back debug informational notice tainting capabilit\w+ test dummy supported.by threshold.set monitoring
"""),
    re.ASCII,
)
"""What calms unless a logger calls it trouble."""
_AT_EASE: Final = re.compile(
    _any_of(r"""
    completed? ok okay enabled initiali[sz]ed registered loaded started starting finished handler reporting is.active ready reachable
    connected.to established becomes.ready is.up link.up disabled.by set.to default(?:s|ing)? will.be would.be if normal allow\w*
    policy config\w* version
"""),
    re.ASCII,
)
"""What calms where trouble is no more than mentioned."""
_PLAIN: Final = re.compile(
    _any_of("""
    errors? failures? fail(?:s|ed|ing)? faults? timed?[ -]?out timeouts? hang stuck stall(?:ed|s)? abort\\w* exception overflow\\w* broken
    degraded unplugged deadlock\\w* expired interrupted illegal exceed(?:s|ed)
"""),
    re.ASCII,
)
"""Words that the kernel uses for trouble alone; others, such as *missing*, it uses for what it lives with."""
_LOUD: Final = re.compile(
    r"\b(?:ERROR|FATAL|CRITICAL|CRIT|EMERG|ALERT|SEVERE|PANIC)\b|\*ERROR\*|\[[EF]\d{4}\b|\[[EF] "
    r"|(?:^|\s)[EF]\d{4} |(?:^|[\]:\d] +)(?i:(?:fatal )?error|fatal|critical):(?! *[-+]?\d)|(?i:^fatal error\b)"
    r"|\[ ?[EF] ?\||[: ][EF] \S+\.\w+:\d+\]|(?:^|\s)ERR(?: ?[\[|:]|\s\[)|\(EE\)|\bE! "
    r"|(?i:\b(?:error|fatal): (?=[a-z]{3})(?!(?:no|none|nil|null|false)\b))"
    r"|\blevel=(?:error|fatal|crit\w*|panic)\b|^<[0-3]>|^\w+ *: ?(?:emerg|alert|crit|err) *:",
    re.ASCII,
)
"""A logger's own word for trouble."""
_MILD: Final = re.compile(r"\b(?:WARNING|WARN|NOTICE)\b|\[W\d|(?:^|\s)W\d{4} |\blevel=warn|(?:^|[\]:] )[Ww]arning: ", re.ASCII)
"""A logger's own word for what it can live with."""
_LEVEL: Final = re.compile(r"^\w+ *: ?(?:emerg|alert|crit|err|warn|notice|info|debug) *: ", re.ASCII)
"""Facility and level in front of a line, as `dmesg --decode` writes them."""
_KERNEL: Final = re.compile(r"^(?:<\d>)?\[ *\d+\.\d+\]|\bkernel: |^\w+ *: ?(?:emerg|alert|crit|err|warn) *:", re.ASCII)
_DRIVER: Final = re.compile(
    r"(?:\S+ +){0,3}?(?:nvrm|nvidia\S*|amdgpu|i915|xe|habanalabs|edac|mce|pcieport|pci|acpi|dmar|ipmi_\w+|thermal|cpu\d+|nvme\d*n?\d*"
    r"|sd|sd[a-z]{1,2}|scsi|ata\d+\S*|mdadm|smartd|md\S*|dm-\d+|bcache|drbd\S*|virtio\w*|aacraid|hpsa|megaraid\w*|mpt\dsas\w*|lpfc|qla\w+"
    r"|ext[234]-fs|xfs|btrfs|jbd2|nfs\w*|lustre\w*|lnet\w*|ceph|libceph|mlx\d\w*|bnxt_\w+|ice|i40e|ixgbe\w*|igb|igc|e1000e?|tg3|ena|efa|irdma"
    r"|hns\w*|infiniband|ib\d+|eth\d+|en[ops]\w+|bond\d+)(?:\[\d+\]| [\w:.-]+){0,3}: "
    r"|\S*\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b",
    re.IGNORECASE | re.ASCII,
)
"""A driver or a device speaks, though nothing in front says that it is the kernel's log."""

_ENDLESS: Final = re.compile(r"(\S{256})\S+")
"""What has no blank for so long is no word; it would cost the expressions below the square of its length."""

_BAD: Final = r"(?:error|fail|fault|exception|abort|fatal|crash)"
_NAMES: Final = re.compile(
    rf"\[Hardware Error\]|(?!\S+:\s)\S+/\S+|/\S+|\b\w+[._]\w*{_BAD}\w*\b|\b\w*{_BAD}\w*[._]\w+\b|\b(?:errors|oops|panic)=\S+"
    r"|\w+\.(?:py|log|csv|json|txt|so|cc?|cpp|h|sh|tar|gz)\b",
    re.IGNORECASE | re.ASCII,
)
"""Paths, addresses, names of files, identifiers and options: what they are called says nothing."""
_THINGS: Final = r"(?:errors?|failures?|faults?|timeouts?|exceptions?|err|bad|corrupt\w*|missing|lost|dropped|issues?|retries)"
_ZERO: Final = re.compile(
    rf"\b(?:0|no|zero|without(?: any)?|never)\s+(?:\w+\s+)?{_THINGS}\b"
    rf"|\b{_THINGS}(?:[ _]count)?\s*(?:=|:|\s)\s*(?:0+(?:x0+)?|none|null|false|no)\b",
    re.IGNORECASE | re.ASCII,
)

_WELL: Final = Sample(LogLine(text="step 100 | loss 2.31 | grad_norm 0.9 | lr 3.0e-4"))
_Row = tuple[str, str, str, Blame, str]


def _enter(row: _Row) -> str:
    """Enter one kind for what has no signature (id, title, component, blame, sample), and return its id."""
    name, title, component, blame, unhealthy = row
    fault_kind(
        id=name,
        title=title,
        component=component,
        source="any log, by its words",
        recommended_action=RecommendedAction.MONITOR,
        blame=blame,
        action="read the lines around it; when it comes often, write a signature for it (`holdfast faults unknown --draft`)",
        unhealthy=Sample(LogLine(text=unhealthy)),
        healthy=_WELL,
        weight=30,
    )
    return name


UNKNOWN: Final = _enter(
    (
        "unknown",
        "A failure that nothing in the catalogue knows",
        "worker",
        Blame.NONE,
        "ERROR: widget 12 exploded, giving up",
    )
)
_SUBJECTS: Final[tuple[tuple[_Row, str], ...]] = (
    (
        (
            "gpu-other",
            "A GPU or accelerator is told of with trouble that has no signature",
            "accelerator",
            Blame.GPU,
            "cambricon 0000:5d:00.0: MLU command queue 3 lost, card dead",
        ),
        r"""
        nvrm nvidia\S* amdgpu radeon nouveau kfd rocm hip gpu\d* gpus cuda xe i915 habana\w* hl\d+ gaudi davinci devdrv ascend npu
        tpu accel\d* dcgm\w* nvml nvlink nvswitch\S* hbm\d* vram drm mlu cambricon iluvatar biren metax musa xpu neuron\w* gsp
        """,
    ),
    (
        (
            "disk-other",
            "A disk is told of with trouble that has no signature",
            "disk",
            Blame.STORAGE,
            "drbd res0: disk detached after local I/O failed, disk lost",
        ),
        r"""
        nvme\S* [sh]d[a-z]{1,2}\d* scsi\S* ata\d+\S* sas\S* md\d+ dm-\d+ raid\S* mpt\dsas\S* megaraid\S* hpsa smartpqi qla2xxx lpfc
        blk\S* disks? ssd smartd mmc\w* virtio_blk vd[a-z] loop\d+ bdev iscsi\S* zfs zpool lvm bcache drbd\S* nbd\d* multipathd? drives?
        md md/\S+ aacraid virtio_scsi mdadm
        """,
    ),
    (
        (
            "storage-other",
            "Storage is told of with trouble that has no signature",
            "storage",
            Blame.STORAGE,
            "orangefs: storage volume 3 went down, giving up",
        ),
        r"""
        ext[234]\S* xfs btrfs f2fs jbd2 overlayfs fuse\S* nfs\S* sunrpc lustre\w* lnet\w* ceph libceph rbd gpfs mmfsd? beegfs cifs
        smb\d* pvc-\S* longhorn\w* rook portworx openebs minio
        weka\w* daos glusterfs? file.?system quota mount\w* checkpoint ckpt s3 gcs storage volume inode superblock journal
        """,
    ),
    (
        (
            "network-other",
            "The network is told of with trouble that has no signature",
            "network",
            Blame.NETWORK,
            "lldpad[811]: bridge br0 peer is dead, link lost",
        ),
        r"""
        mlx\d\S* bnxt\S* ice i40e ixgbe\w* igb igc e1000e? tg3 ena efa irdma qede? hns\w* ionic gve virtio_net vmxnet3 eth\d+
        en[ops]\w+ ib\d+ bond\d+ br\d+ veth\S* infiniband rdma\S* roce\S* verbs ibv\S* nccl rccl hccl gloo ucx
        ucp_\w+ infinipath hfi1\S* libfabric ofi tcp
        udp ipv[46] arp dns dhcp\S* network socket port link switch transceiver opensm subnet lldp\w* bgp\w* ospf netdev nic
        connection peer host
        """,
    ),
    (
        (
            "hardware-other",
            "The host's hardware is told of with trouble that has no signature",
            "board",
            Blame.NODE,
            "tpm tpm0: hardware malfunction, device died",
        ),
        r"""
        edac\w* mce mcelog rasdaemon machine.check dimm\w* ecc memory hugepages? pcie?\S* pcieport aer dpc iommu dmar smmu\S*
        acpi\S* apei ghes ipmi\S* bmc sel redfish psu\w* power fan\w* thermal\w* temperature voltage cpus?\S* core microcode
        tpm\S* bios uefi efi firmware cxl\S* hwmon\S* irq\S* usb i2c\S* watchdog\S* rtc\S* clock\w* rcu numa hardware board
        chassis node
        """,
    ),
    (
        (
            "host-other",
            "The host's own software is told of with trouble that has no signature",
            "service",
            Blame.NODE,
            "auditd[811]: daemon died, giving up",
        ),
        r"""
        kernel systemd\S* sshd cron\w* kubelet containerd dockerd? crio podman runc slurm\w* munge\w* pbs\w* audit\w* dbus\S*
        udev\S* modprobe module sssd\S* nscd chronyd ntpd rsyslogd? journald cgroup\S* selinux apparmor pam_\w+ service daemon
        kthread\w* workqueue\S*
        """,
    ),
    (
        (
            "training-other",
            "The training is told of with trouble that has no signature",
            "worker",
            Blame.PROCESS,
            "deepspeed: worker 3 crashed, training aborted",
        ),
        r"""
        rank\d* worker\w* torch\w* pytorch deepspeed megatron trainer train\w* dataloader loader step epoch model optimizer
        python\d* process pid ray\w*
        """,
    ),
)
"""Who may be in trouble, those that are told apart most surely first; and by which words each is known."""

_SPEAKERS: Final = tuple((_enter(row), re.compile(_any_of(words), re.ASCII)) for row, words in _SUBJECTS)
_SOFT: Final = frozenset({"network-other", "host-other", "training-other"})
"""Whose words stand in what any program says: a program's warning of them is no fault."""
_TROUBLE: Final = re.compile(TROUBLE, re.ASCII)
OTHERS: Final = frozenset({UNKNOWN, *(name for name, _ in _SPEAKERS)})
"""Kinds that say only that something is the matter."""


def look(text: str) -> str | None:
    """Return the kind of fault that the words of *text* tell of, if they do."""
    text = _ENDLESS.sub(r"\1", text)
    said = _ZERO.sub(" ", _NAMES.sub(" ", _LEVEL.sub("", text)))
    if not _TROUBLE.search(said):
        return None
    loud, grave = _LOUD.search(text) is not None, _GRAVE.search(said) is not None
    calm = _NOT_YET.sub(" ", said)
    if _WELL_AGAIN.search(calm) or (not loud and (_CALM.search(calm) or (not grave and _AT_EASE.search(calm)))):
        return None
    subject = next((name for name, words in _SPEAKERS if words.search(said)), None)
    if subject is None:
        return UNKNOWN if loud else None
    if loud or (grave and not (subject in _SOFT and _MILD.search(text))):
        return subject
    return subject if (_KERNEL.search(text) or _DRIVER.match(text)) and (grave or _PLAIN.search(said)) else None
