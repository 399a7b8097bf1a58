"""Heuristic for log lines without a signature: which component wrote the line, and whether its words report a problem.

Deliberately strict. Words such as *error* occur in file names, in counts of zero and in successful retries, so these are removed
first; the rest is a fault if it has words of failure and none of success, and if a device, the kernel or the log level of the line
confirms it.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.detectors.catalogue import Attribution, RecommendedAction, fault_kind
from holdfast.detectors.evidence import LogLine, Sample


def _any_of(words: str) -> str:
    """Return an expression that matches any of *words* as whole words; a dot stands for a space."""
    return rf"(?i)\b(?:{'|'.join(words.split())})\b"


TROUBLE: Final = _any_of(r"""
    errors? err failures? fail(?:s|ed|ing)? fatal\w* faults? faulty faulted uncorrect\w* unrecover\w* corrupt\w* timed?[ -]?out
    timeouts? hang hung stuck stall(?:ed|s)? lost dead died crash\w* abort\w* panic\w* offline unreachable refused denied
    not.respond\w* no.response unable cannot can't could.not couldn't bad invalid exceed\w* overflow\w* overrun unresponsive broken
    disconnect\w* killed damaged non-?operational unhealthy degraded critical violation exception malfunction inaccessible missing
    mismatch poison\w* read-only not.ready giving.up gave.up no.space out.of.memory is.down went.down link.down unavailable
    deadlock\w* wedged unplugged offlined degraded exhausted expired interrupted illegal rejected rejecting unexpected\w*
""")
"""Words of failure. A matcher checks them first: a line without any is skipped."""

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
"""Negated words of success."""
_WELL_AGAIN: Final = re.compile(
    _any_of(r"""
    succe\w+ passed recovered resolved restored cleared healthy subsided deactivated came.up back.online harmless ignor\w+
    skip(?:s|ped|ping)?
"""),
    re.ASCII,
)
"""Words of success that always rule out a fault."""
_CALM: Final = re.compile(
    _any_of(r"""
    retrying will.retry expected optional deprecated corrected correctable not.(?:supported|available|present|found) unsupported using
    assuming fallback falling.back debug informational notice tainting capabilit\w+ test dummy supported.by threshold.set monitoring
"""),
    re.ASCII,
)
"""Words that rule out a fault unless the log level is error."""
_AT_EASE: Final = re.compile(
    _any_of(r"""
    completed? ok okay enabled initiali[sz]ed registered loaded started starting finished handler reporting is.active ready reachable
    connected.to established becomes.ready is.up link.up disabled.by set.to default(?:s|ing)? will.be would.be if normal allow\w*
    policy config\w* version
"""),
    re.ASCII,
)
"""Words that rule out a fault unless there are grave words or the log level is error."""
_PLAIN: Final = re.compile(
    _any_of("""
    errors? failures? fail(?:s|ed|ing)? faults? timed?[ -]?out timeouts? hang stuck stall(?:ed|s)? abort\\w* exception overflow\\w* broken
    degraded unplugged deadlock\\w* expired interrupted illegal exceed(?:s|ed)
"""),
    re.ASCII,
)
"""Words that the kernel uses only for failures; others, such as *missing*, it also uses for harmless conditions."""
_LOUD: Final = re.compile(
    r"\b(?:ERROR|FATAL|CRITICAL|CRIT|EMERG|ALERT|SEVERE|PANIC)\b|\*ERROR\*|\[[EF]\d{4}\b|\[[EF] "
    r"|(?:^|\s)[EF]\d{4} |(?:^|[\]:\d] +)(?i:(?:fatal )?error|fatal|critical):(?! *[-+]?\d)|(?i:^fatal error\b)"
    r"|\[ ?[EF] ?\||[: ][EF] \S+\.\w+:\d+\]|(?:^|\s)ERR(?: ?[\[|:]|\s\[)|\(EE\)|\bE! "
    r"|(?i:\b(?:error|fatal): (?=[a-z]{3})(?!(?:no|none|nil|null|false)\b))"
    r"|\blevel=(?:error|fatal|crit\w*|panic)\b|^<[0-3]>|^\w+ *: ?(?:emerg|alert|crit|err) *:",
    re.ASCII,
)
"""Log level of error or above."""
_MILD: Final = re.compile(r"\b(?:WARNING|WARN|NOTICE)\b|\[W\d|(?:^|\s)W\d{4} |\blevel=warn|(?:^|[\]:] )[Ww]arning: ", re.ASCII)
"""Log level of warning or notice."""
_LEVEL: Final = re.compile(r"^\w+ *: ?(?:emerg|alert|crit|err|warn|notice|info|debug) *: ", re.ASCII)
"""Facility and level at the start of a line, as `dmesg --decode` writes them."""
_KERNEL: Final = re.compile(r"^(?:<\d>)?\[ *\d+\.\d+\]|\bkernel: |^\w+ *: ?(?:emerg|alert|crit|err|warn) *:", re.ASCII)
_DRIVER: Final = re.compile(
    r"(?:\S+ +){0,3}?(?:nvrm|nvidia\S*|amdgpu|i915|xe|habanalabs|edac|mce|pcieport|pci|acpi|dmar|ipmi_\w+|thermal|cpu\d+|nvme\d*n?\d*"
    r"|sd|sd[a-z]{1,2}|scsi|ata\d+\S*|mdadm|smartd|md\S*|dm-\d+|bcache|drbd\S*|virtio\w*|aacraid|hpsa|megaraid\w*|mpt\dsas\w*|lpfc|qla\w+"
    r"|ext[234]-fs|xfs|btrfs|jbd2|nfs\w*|lustre\w*|lnet\w*|ceph|libceph|mlx\d\w*|bnxt_\w+|ice|i40e|ixgbe\w*|igb|igc|e1000e?|tg3|ena|efa|irdma"
    r"|hns\w*|infiniband|ib\d+|eth\d+|en[ops]\w+|bond\d+)(?:\[\d+\]| [\w:.-]+){0,3}: "
    r"|\S*\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b",
    re.IGNORECASE | re.ASCII,
)
"""A line of a driver or device without a kernel prefix."""

_ENDLESS: Final = re.compile(r"(\S{256})\S+")
"""Long runs without a space: no words, and quadratic time in the expressions below."""

_BAD: Final = r"(?:error|fail|fault|exception|abort|fatal|crash)"
_NAMES: Final = re.compile(
    rf"\[Hardware Error\]|(?!\S+:\s)\S+/\S+|/\S+|\b\w+[._]\w*{_BAD}\w*\b|\b\w*{_BAD}\w*[._]\w+\b|\b(?:errors|oops|panic)=\S+"
    r"|\w+\.(?:py|log|csv|json|txt|so|cc?|cpp|h|sh|tar|gz)\b",
    re.IGNORECASE | re.ASCII,
)
"""Paths, addresses, file names, identifiers and options, whose words mean nothing."""
_THINGS: Final = r"(?:errors?|failures?|faults?|timeouts?|exceptions?|err|bad|corrupt\w*|missing|lost|dropped|issues?|retries)"
_ZERO: Final = re.compile(
    rf"\b(?:0|no|zero|without(?: any)?|never)\s+(?:\w+\s+)?{_THINGS}\b"
    rf"|\b{_THINGS}(?:[ _]count)?\s*(?:=|:|\s)\s*(?:0+(?:x0+)?|none|null|false|no)\b"
    r"|\buncorrect\w*(?: (?:errors?|ecc|parity|sec-ded)){0,2}\s*[=:]\s*0\b|\bfailure occurred\s*[=:]\s*no\b",
    re.IGNORECASE | re.ASCII,
)
"""Counts of zero, and failures that did not happen."""
_OF_A_MODEL: Final = re.compile(r"\bdead (?:neurons?|units?|features?|latents?)\b|\bfail(?:s|ed)? to improve\b", re.IGNORECASE | re.ASCII)
"""What a training says of its model: no device fails."""

_WELL: Final = Sample(LogLine(text="step 100 | loss 2.31 | grad_norm 0.9 | lr 3.0e-4"))
_Row = tuple[str, str, str, Attribution, str]


def _define(row: _Row) -> str:
    """Define a fault kind for lines without a signature (id, title, component, attribution, sample); return its id."""
    name, title, component, attributed_to, unhealthy = row
    fault_kind(
        id=name,
        title=title,
        component=component,
        source="any log, by a heuristic about its words",
        recommended_action=RecommendedAction.MONITOR,
        attributed_to=attributed_to,
        action="read the surrounding lines; if it happens often, write a signature for it (`holdfast faults unknown --draft`)",
        unhealthy=Sample(LogLine(text=unhealthy)),
        healthy=_WELL,
        weight=30,
    )
    return name


UNKNOWN: Final = _define(
    (
        "unknown",
        "A failure that is not in the catalogue",
        "worker",
        Attribution.NONE,
        "ERROR: widget 12 exploded, giving up",
    )
)
_SUBJECTS: Final[tuple[tuple[_Row, str], ...]] = (
    (
        (
            "gpu-other",
            "A GPU or accelerator: a log line reports a problem that has no signature",
            "accelerator",
            Attribution.GPU,
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
            "A disk: a log line reports a problem that has no signature",
            "disk",
            Attribution.STORAGE,
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
            "Storage: a log line reports a problem that has no signature",
            "storage",
            Attribution.STORAGE,
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
            "The network: a log line reports a problem that has no signature",
            "network",
            Attribution.NETWORK,
            "lldpad[811]: bridge br0 peer is dead, link lost",
        ),
        r"""
        mlx\d\S* bnxt\S* ice i40e ixgbe\w* igb igc e1000e? tg3 ena efa irdma qede? hns\w* ionic gve virtio_net vmxnet3 eth\d+
        en[ops]\w+ ib\d+ bond\d+ br\d+ veth\S* infiniband rdma\S* roce\S* verbs ibv\S* nccl rccl hccl gloo ucx
        ucp_\w+ infinipath hfi1\S* libfabric ofi tcp
        udp ipv[46] arp dns dhcp\S* network socket port link switch transceiver opensm subnet lldp\w* bgp\w* ospf netdev nic
        connection peer (?<!hci\s)host(?!\s(?:controller|halt))
        """,
    ),
    (
        (
            "hardware-other",
            "The host's hardware: a log line reports a problem that has no signature",
            "board",
            Attribution.NODE,
            "tpm tpm0: hardware malfunction, device died",
        ),
        r"""
        edac\w* mce mcelog rasdaemon machine.check dimm\w* ecc memory hugepages? pcie?\S* pcieport aer dpc iommu dmar smmu\S*
        acpi\S* apei ghes ipmi\S* bmc sel redfish psu\w* power fan\w* thermal\w* temperature voltage cpus?\S* core microcode
        tpm\S* [xeou]hci\S* bios uefi efi firmware cxl\S* hwmon\S* irq\S* usb i2c\S* watchdog\S* rtc\S* clock\w* rcu numa hardware board
        chassis node
        """,
    ),
    (
        (
            "host-other",
            "The host's own software: a log line reports a problem that has no signature",
            "service",
            Attribution.NODE,
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
            "The training: a log line reports a problem that has no signature",
            "worker",
            Attribution.PROCESS,
            "deepspeed: worker 3 crashed, training aborted",
        ),
        r"""
        rank\d* worker\w* torch\w* pytorch deepspeed megatron trainer train\w* dataloader loader step epoch model optimizer
        python\d* process pid ray\w*
        """,
    ),
)
"""Components with the words that identify them, the most specific first."""

_SPEAKERS: Final = tuple((_define(row), re.compile(_any_of(words), re.ASCII)) for row, words in _SUBJECTS)
_SOFT: Final = frozenset({"network-other", "host-other", "training-other"})
"""Components whose words any program may use, so a warning is no fault."""
_TROUBLE: Final = re.compile(TROUBLE, re.ASCII)
OTHERS: Final = frozenset({UNKNOWN, *(name for name, _ in _SPEAKERS)})
"""Fault kinds without a specific cause."""


def kind_by_words(text: str) -> str | None:
    """Return the fault kind by the words of *text*; None if they report no problem."""
    text = _ENDLESS.sub(r"\1", text)
    said = _OF_A_MODEL.sub(" ", _ZERO.sub(" ", _NAMES.sub(" ", _LEVEL.sub("", text))))
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
