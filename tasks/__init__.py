"""The Prefect tasks: launch, monitor, detect, decide, isolate, reschedule, resume, wait, migrate, and those of the scheduled flows.

Thin: what they do is in `holdfast.control` and `holdfast.probe`.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # a user's project may have a folder of this name, and its modules have to be found too
