"""How a training process begins and ends: fork server, standby, restart of the script, SIGTERM, exit."""
