"""The Prefect flows: training-job (the state machine of one job), its run form, cluster-health and node-repair.

Flows call tasks; they contain no I/O, no `try` and no `sleep`. Tasks are in `tasks`, what tasks do is in `holdfast`.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # a user's project may have a package of this name too
