"""The one way to run a program of ours on a node that has nothing of ours: its source is sent, and each question is a line of JSON.

`program` is the side that asks, `bundle` makes the source, `remote_main` and the modules that it carries are the side that answers.
What reaches an interpreter is not here, but for a child on this machine: an SSH connection is in `holdfast.cluster.ssh`.
"""
