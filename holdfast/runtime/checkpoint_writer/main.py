"""The checkpoint writer as a program: run as a file by the interpreter that trains, whether Holdfast is installed there or not."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    if "holdfast" not in sys.modules:  # else this is a fork of the fork server
        del sys.path[:1]  # this file's folder
        runpy.run_path(str(Path(__file__).parents[1] / "process" / "fork_server_main.py"))["this_holdfast"]()
    from holdfast.runtime.checkpoint_writer import service

    service.main()
