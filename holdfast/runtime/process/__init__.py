"""How a training process starts and exits: the fork server, hot spares and their successors, SIGTERM, the quick exit.

Nothing here knows of steps: what a process does between start and exit is in `session` and `groups`.
All but `hot_spare` needs only the standard library.
"""
