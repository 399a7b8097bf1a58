"""The fork server as a program: run as a file, by the interpreter that a job names, whether Holdfast is installed there or not.

With ``run`` and a script, or ``-m`` and a module, it runs that in its own process: where there is no fork server, and the job's ranks must
have the same process groups all the same.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def this_holdfast() -> None:
    """Make the Holdfast that this file belongs to importable, and nothing else in its folder, which may be another interpreter's."""
    folder = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("holdfast", folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["holdfast"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this file's folder; a worker gets its script's instead
    this_holdfast()
    from holdfast.runtime.process.exit import prepare_quick_exit

    prepare_quick_exit()
    from holdfast.runtime.process import fork_server

    if sys.argv[1] == "run":
        fork_server.run_cold(sys.argv[2:])
    else:
        fork_server.main()
