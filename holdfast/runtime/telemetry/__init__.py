"""What a rank measures and reports of itself: steps, waits, long sections, its status in collectives, checksums of replicas.

The connection to the agent is `holdfast.runtime.agent_client`; measurements of snapshots are in `holdfast.runtime.snapshots`.
"""
