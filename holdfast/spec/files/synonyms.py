"""What an unknown field probably means: the words of torchrun, sbatch, Kubernetes and version 0.1, and the field that each stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

Table = Mapping[str, Mapping[str, str]]
"""Path of a part of the file (empty: the file itself) to words that are unknown there, each with the field to use, or with a sentence."""

RENDEZVOUS: Final = "Leave it out: Holdfast starts the rendezvous itself, and sets MASTER_ADDR and MASTER_PORT"
LOGS: Final = "Leave it out: `holdfast logs` shows the output of the ranks"
PLACED: Final = "Leave it out: Holdfast numbers nodes and ranks itself"
IMAGE: Final = "Leave it out: Holdfast starts processes on nodes, not containers"
OWN_CPUS: Final = "Leave it out: the ranks of a node share its CPUs; OMP_NUM_THREADS may be set in `env`"

TORCHRUN: Final[Table] = {
    "": {
        "num_nodes": "nnodes",
        "nproc": "nproc_per_node",
        "num_processes": "nproc_per_node",
        "processes_per_node": "nproc_per_node",
        "gpus_per_node": "nproc_per_node",
        "world_size": "nproc_per_node",
        "max_restarts": "max_recoveries",
        "training_script": "script",
        "training_script_args": "args",
        "script_args": "args",
        "m": "module",
        "no_python": "command",
        "run_path": "script",
        "rdzv_backend": RENDEZVOUS,
        "rdzv_endpoint": RENDEZVOUS,
        "rdzv_id": RENDEZVOUS,
        "rdzv_conf": RENDEZVOUS,
        "standalone": RENDEZVOUS,
        "master_addr": RENDEZVOUS,
        "master_port": RENDEZVOUS,
        "local_addr": RENDEZVOUS,
        "node_rank": PLACED,
        "role": PLACED,
        "log_dir": LOGS,
        "redirects": LOGS,
        "tee": LOGS,
        "log_line_prefix_template": LOGS,
        "monitor_interval": "timeouts.heartbeat",
        "start_method": "Leave it out: workers are forked from a process that has imported torch",
        "cwd": "workdir",
    }
}
SBATCH: Final[Table] = {
    "": {
        "nodes": "nnodes",
        "ntasks_per_node": "nproc_per_node",
        "tasks_per_node": "nproc_per_node",
        "ntasks": "nproc_per_node",
        "time": "walltime",
        "time_limit": "walltime",
        "chdir": "workdir",
        "export": "env",
        "job_name": "name",
        "output": LOGS,
        "error": LOGS,
        "signal": "timeouts.termination_grace",
        "requeue": "max_recoveries",
        "cpus_per_task": OWN_CPUS,
        "nodelist": "node_labels",
        "nodefile": "node_labels",
        "wrap": "command",
    }
}
OF_THE_JOB: Final = "Leave it out: a job has"
IN_A_JOB: Final[Table] = {
    "": {
        "nodes": f"{OF_THE_JOB} it, as `nnodes`",
        "num_nodes": f"{OF_THE_JOB} it, as `nnodes`",
        "nnodes": f"{OF_THE_JOB} it, not a cluster",
        "ranks": f"{OF_THE_JOB} them, as `nproc_per_node`",
        "ntasks_per_node": f"{OF_THE_JOB} them, as `nproc_per_node`",
        "nproc_per_node": f"{OF_THE_JOB} it, not a cluster",
        "spare_nodes": f"{OF_THE_JOB} it, not a cluster",
        "job_name": f"{OF_THE_JOB} it, as `name`",
    }
}
"""What a cluster file does not say, because it is of each job. A local cluster has `nodes`."""
SBATCH_CLUSTER: Final[Table] = {
    "": {
        "nodelist": "exclude",
        "gpus_per_node": "gpus",
        "time_limit": "time",
        "extra": "options",
        "sbatch": "options",
        "sbatch_options": "options",
        "job_id": "allocation",
        "jobid": "allocation",
        "oversubscribe": "`exclusive`, which is the opposite: `exclusive: false` shares nodes",
        "features": "constraint",
        "kill_wait": "preemption_notice.lead_time",
    }
}
KUBERNETES: Final[Table] = {
    "": {
        "replicas": "nnodes",
        "min_replicas": '`nnodes: "MIN:MAX"`',
        "max_replicas": '`nnodes: "MIN:MAX"`',
        "min_nodes": '`nnodes: "MIN:MAX"`',
        "max_nodes": '`nnodes: "MIN:MAX"`',
        "parallelism": "nnodes",
        "completions": "nnodes",
        "termination_grace_period_seconds": "timeouts.termination_grace",
        "termination_grace_period": "timeouts.termination_grace",
        "backoff_limit": "max_recoveries",
        "active_deadline_seconds": "walltime",
        "progress_deadline_seconds": "timeouts.hang",
        "startup_probe": "timeouts.startup",
        "liveness_probe": "timeouts.heartbeat",
        "working_dir": "workdir",
        "node_selector": "node_labels",
        "restart_policy": "policy",
        "image": IMAGE,
        "containers": IMAGE,
        "container": IMAGE,
        "volumes": IMAGE,
        "resources": "nproc_per_node",
        "metadata": "name",
    }
}
KUBERNETES_CLUSTER: Final[Table] = {
    "": {"replicas": "nodes", "topology": "failure_domains", "pod_disruption_budget": "quarantine.max_unavailable"},
    "quarantine": {"pod_disruption_budget": "max_unavailable"},
}
VERSION_0_1: Final[Table] = {
    "": {
        "wanted": "nnodes",
        "least": '`nnodes: "MIN:MAX"`',
        "ranks": "nproc_per_node",
        "spare": "spare_nodes",
        "spares": "spare_nodes",
        "standbys": "hot_spares",
        "standby": "hot_spares",
        "labels": "node_labels",
        "environment": "env",
        "directory": "workdir",
        "limits": "timeouts",
        "deadlines": "timeouts.recovery",
        "budget": "max_recoveries",
        "in_place": "max_restarts_in_place",
        "recoveries": "max_recoveries",
        "fruitless": "max_recoveries_without_progress",
        "window": "recovery_window",
        "every": "checkpoint.interval",
        "save_every": "checkpoint.interval",
        "first_step": "timeouts.startup",
    },
    "checkpoint": {
        "every": "interval",
        "frequency": "interval",
        "every_least": "min_interval",
        "every_most": "max_interval",
        "path": "directory",
        "dir": "directory",
        "folder": "directory",
        "keep_last": "keep",
        "max_to_keep": "keep",
    },
    "checkpoint.memory": {
        "every": "interval",
        "overhead": "max_overhead",
        "policy": "when_late",
        "pause": "max_pause",
        "limit": "max_memory",
    },
    "timeouts": {
        "first_step": "startup",
        "hang_least": "hang_min",
        "hang_factor": "hang_multiplier",
        "hang_timeout": "hang",
        "stop_grace": "termination_grace",
        "last_save": "final_checkpoint",
        "stopped_grace": "stopped_process",
        "agent_silence": "heartbeat",
        "output_silence": "log_silence",
        "end_grace": "exit_grace",
        "terminate": "termination_grace",
        "walltime": "`walltime` at the top level of the file, not under `timeouts`",
    },
    "timeouts.recovery": {
        "take_over": "replace_ranks",
        "narrow": "shrink_live",
        "restart_in_place": "restart_workers",
        "shrink": "shrink_restart",
    },
    "checks": {"copies": "replicas"},
}
VERSION_0_1_CLUSTER: Final[Table] = {
    "": {
        "domains": "`failure_domains`, or for `kind: ssh` `failure_domain` of each host",
        "notice": "preemption_notice",
        "plan": "maintenance_file",
        "misses": "failure_threshold",
        "ahead": "lead_time",
        "share": "`exclusive`, which is the opposite: `exclusive: false` shares nodes",
    },
    "hosts": {"domain": "failure_domain", "rack": "failure_domain", "host": "address", "hostname": "address", "ip": "address"},
    "quarantine": {
        "share": "max_unavailable",
        "doubts": "max_minor_faults",
        "doubt_for": "suspect_for",
        "due_after": "burn_in_after",
        "retire_after": "decommission_after",
        "retire_after_failed": "decommission_after_failed",
        "counted_for": "window",
        "ask": "approval_timeout",
    },
    "burn_in": {
        "seconds": "duration",
        "memory_share": "memory",
        "memory_most": "max_memory",
        "folder": "directory",
        "limits": "thresholds",
    },
    "burn_in.thresholds": {
        "disk": "min_disk_bandwidth",
        "network": "min_network_bandwidth",
        "latency": "max_latency",
        "clock": "max_clock_offset",
    },
    "maintenance": {
        "begins": "start",
        "begin": "start",
        "lasts": "duration",
        "every": "interval",
        "ahead": "lead_time",
        "domains": "failure_domains",
    },
    "preemption_notice": {"every": "interval", "lasts": "lead_time"},
}
VERSION_0_1_POLICY: Final[Table] = {
    "": {
        "common": "correlated",
        "frequent": "recurring",
        "slowness": "stragglers",
        "bad_loss": "diverged_loss",
        "deadlines": "timeouts",
        "budget": "max_recoveries",
        "in_place": "max_restarts_in_place",
        "recoveries": "max_recoveries",
        "fruitless": "max_recoveries_without_progress",
        "window": "recovery_window",
        "max_restarts": "max_recoveries",
        "backoff_limit": "max_recoveries",
        "levels": "recommended_actions",
        "base": "based_on",
    },
    "timeouts": VERSION_0_1["timeouts.recovery"],
    "correlated": {"nodes": "min_nodes", "share": "min_share"},
    "recurring": {"processes": "process_times"},
    "flapping": {"apart": "min_gap"},
    "stragglers": {"factor": "min_cost_ratio", "least": "min_saving", "each": "max_migrations_per_rank", "most": "max_migrations"},
    "diverged_loss": {"same_data": "retries_with_same_data", "without_batch": "retries_without_batches", "near": "max_step_gap"},
}

JOB: Final = (TORCHRUN, SBATCH, KUBERNETES, VERSION_0_1)
CLUSTER: Final = (IN_A_JOB, SBATCH_CLUSTER, KUBERNETES_CLUSTER, VERSION_0_1_CLUSTER)
POLICY: Final = (VERSION_0_1_POLICY,)
ACTIONS: Final = {
    "take-over": "replace-ranks",
    "narrow": "shrink-live",
    "restart-in-place": "restart-workers",
    "shrink": "shrink-restart",
    "restart": "restart-workers",
}
"""Names that recovery actions had in version 0.1, or have elsewhere."""
POLICY_ONLY: Final = frozenset(
    {"based_on", "recommended_actions", "actions", "correlated", "recurring", "flapping", "stragglers", "diverged_loss"}
)
"""Fields that only a policy can have."""
KINDS: Final = {
    "job-zombie": "training-frozen",
    "loss-lost": "loss-diverged",
    "node-apart": "pairwise-partition",
    "node-severed": "node-partitioned",
    "control-plane-lost": "controller-partitioned",
    "gpu-stranger": "gpu-foreign-process",
    "replica-behind": "replica-lag",
    "checkpoint-late": "checkpoint-backlog",
}
"""Names that fault kinds had in version 0.1."""


def plain(word: str) -> str:
    """Return *word* as a field would be written: ``--nproc-per-node``, ``minReplicas`` and ``NNODES`` in lowercase with underscores."""
    split = word if word.isupper() else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word)
    return split.strip("-_ ").replace("-", "_").replace(" ", "_").lower()


def meaning(word: str, part: str, tables: tuple[Table, ...]) -> str:
    """Return the field that the unknown *word* in *part* of a file means, or a sentence with a space in it; empty where no table has it."""
    return next((found for table in tables if (found := table.get(part, {}).get(plain(word)))), "")
