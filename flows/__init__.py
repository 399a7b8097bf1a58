"""What Prefect runs: flows that read as sentences made of tasks."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # a user's project may have a folder of this name, and its modules have to be found too
