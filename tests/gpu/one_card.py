"""Several NCCL ranks on one card: what lets NCCL accept it, which depends on its version."""

from __future__ import annotations

from typing import Final

SHARES_A_GPU: Final = (2, 30, 3)
"""The first NCCL that has a switch for several ranks on one GPU."""


def settings(process: int, nccl: tuple[int, ...]) -> dict[str, str]:
    """Return the environment of *process* on a card that it shares with those of other ranks, for this version of *nccl*.

    Up to 2.29 NCCL refuses a GPU that two ranks of one host have: ranks with different host names pass, and talk over a socket. The name is
    the process's and not the rank's: a hot spare has the number of a rank that lives. NCCL calls both ways unsafe for kernels of two ranks
    that wait for each other: so few blocks per collective. cuBLAS computes the same in each process only with a workspace of one size.
    """
    few = {"NCCL_MIN_CTAS": "1", "NCCL_MAX_CTAS": "1", "NCCL_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if nccl >= SHARES_A_GPU:
        return {**few, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    return {**few, "NCCL_HOSTID": f"holdfast-process-{process}", "NCCL_NET": "Socket"}
