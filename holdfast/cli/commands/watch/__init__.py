"""Watch: which jobs there are, the state of one, its events and incidents, and the logs of its ranks.

Everything here only reads. The live view is in `holdfast.cli.watch` and `holdfast.cli.screens`.
"""
