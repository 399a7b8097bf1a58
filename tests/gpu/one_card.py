"""Several NCCL ranks on one card: what lets NCCL accept it, which depends on its version."""

from __future__ import annotations

from typing import Final

SHARES_A_GPU: Final = (2, 30, 3)
"""The first NCCL that has a switch for several ranks on one GPU."""


def settings(rank: int, nccl: tuple[int, ...]) -> dict[str, str]:
    """Return the environment of *rank* on a card that it shares with other ranks, for this version of *nccl*.

    Up to 2.29 NCCL refuses a GPU that two ranks of one host have: ranks with different host names pass, and talk over a socket. NCCL calls
    both unsafe for kernels of two ranks that wait for each other: so few blocks per collective.
    """
    few = {"NCCL_MIN_CTAS": "1", "NCCL_MAX_CTAS": "1", "NCCL_SOCKET_IFNAME": "lo"}
    if nccl >= SHARES_A_GPU:
        return {**few, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    return {**few, "NCCL_HOSTID": f"holdfast-rank-{rank}", "NCCL_NET": "Socket"}
