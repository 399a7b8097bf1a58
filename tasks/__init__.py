"""The Prefect tasks: those of the training-job flow, of the scheduled flows, and building blocks for users' own flows.

Tasks are thin: what they do is in `holdfast.control` and `holdfast.probe`.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # a user's project may have a package of this name too
