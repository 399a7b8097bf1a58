"""Job, cluster and policy files: how they are read, what their values look like, and what is said of a mistake."""
