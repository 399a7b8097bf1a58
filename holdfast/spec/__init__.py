"""What a user writes: a `TrainingJob`, a `Cluster` and a policy, as YAML, as Python, or in a form of the Prefect UI.

The models with their texts for users, and reading, validating and checking such files. What is done with a job or a cluster is elsewhere.
"""

from __future__ import annotations

from holdfast.spec.check import checks
from holdfast.spec.cluster import Cluster, LocalCluster, SshCluster, SshHop, SshHost, cluster_of
from holdfast.spec.files.load import load_cluster, load_job, review
from holdfast.spec.job import CheckpointPlan, RecoveryTimeouts, Timeouts, TrainingJob
from holdfast.spec.slurm import SlurmCluster

__all__ = [
    "CheckpointPlan",
    "Cluster",
    "LocalCluster",
    "RecoveryTimeouts",
    "SlurmCluster",
    "SshCluster",
    "SshHop",
    "SshHost",
    "Timeouts",
    "TrainingJob",
    "checks",
    "cluster_of",
    "load_cluster",
    "load_job",
    "review",
]
