"""What the state of a training process consists of, and how it is taken from the user's objects and put back.

No files, no network, no groups: `checkpoint`, `snapshots` and `groups` decide where state goes.
"""
