"""What outlives this controller: standby controllers, failover at a partition, rows left with agents."""
