"""The verbs of a job's life as Prefect tasks: launch, monitor, detect, isolate, reschedule, resume. Thin: the library does it."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # a user's project may have a folder of this name, and its modules have to be found too
