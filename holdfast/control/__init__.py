"""The live side of a flow: connections to agents, what is known of the job, and the recovery in work."""
