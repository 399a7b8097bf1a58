"""The one way to run a program of ours on a node without Holdfast: its source is sent, then each question is a line of JSON.

`program` asks, and runs an interpreter of this machine; `bundle` makes the source; `remote_main` and the modules that it carries answer.
Not here: how to reach an interpreter on another machine (`holdfast.cluster.ssh`).
"""
