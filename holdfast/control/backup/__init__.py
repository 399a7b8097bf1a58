"""What outlives this controller: standby controllers, failover at a partition, and rows for the history that agents keep.

The lease that decides which controller has the job is in `holdfast.history`; reattaching to a running job is in `supervisor`.
"""
