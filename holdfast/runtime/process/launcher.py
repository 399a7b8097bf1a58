"""What the launcher does before the first line of a script or module: name the process, replace `torch.distributed.init_process_group`.

Scripts import the function by name (``from torch.distributed import init_process_group``), so it must be another one by then. torch may be
imported already, by the fork server, or will be by the script. Standard library only, so that the fork server can use it without torch.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any, Final

from holdfast.host.process import set_title

REPLACED: Final = frozenset({"auto", "managed"})
"""Values of ``HOLDFAST_GROUPS`` with which `init_process_group` is replaced."""
_MODULE: Final = "torch.distributed"


def name_process(argv: Sequence[str]) -> None:
    """Show in `ps` which rank of which job this process is, and the script in *argv*; its arguments may be secret."""
    job, rank, spare = (os.environ.get(name) for name in ("HOLDFAST_JOB", "RANK", "HOLDFAST_HOT_SPARE"))
    parts = argv[:2] if argv[0] == "-m" else [os.path.basename(argv[0])]  # noqa: PTH119 (a string, as Python has it)
    if rank == "-1":  # a helper: its program is one of Holdfast's own
        parts, who = [os.path.basename(os.path.dirname(argv[0]))], "helper"  # noqa: PTH119, PTH120 (as above)
    else:
        who = f"hot spare {spare}" if spare else f"rank {rank}"
    set_title(f"holdfast: {who} of job {job} ({' '.join(parts)})")


def replace_init_process_group() -> None:
    """Replace torch's function in this process, now or when the script imports torch, if the job's ``groups`` say so."""
    if os.environ.get("HOLDFAST_GROUPS") not in REPLACED:
        return
    module = sys.modules.get(_MODULE)
    if module is not None:
        _replace_in(module)
    elif not any(isinstance(one, _TorchFinder) for one in sys.meta_path):
        sys.meta_path.insert(0, _TorchFinder())


def original(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's own function for *function*, which may be the one that replaces it."""
    found: Callable[..., Any] = getattr(function, "of_torch", function)
    return found


def _replace_in(distributed: Any) -> None:  # noqa: ANN401 (the module)
    """Replace the function in `torch.distributed`, and wherever torch itself has imported it to."""
    real = getattr(distributed, "init_process_group", None)  # a torch that was built without distributed has none
    if real is None or hasattr(real, "of_torch"):
        return
    process = os.getpid()

    @functools.wraps(real)
    def init_process_group(*given: Any, **named: Any) -> Any:  # noqa: ANN401 (torch's own)
        if os.getpid() != process:  # a process that the script has forked, and whose ranks are its own affair
            return real(*given, **named)
        from holdfast.runtime.init import init_process_group as ours  # noqa: PLC0415 (torch may be half imported before)

        return ours(real, *given, **named)

    init_process_group.of_torch = real  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and vars(module).get("init_process_group") is real:
            module.init_process_group = init_process_group  # type: ignore[attr-defined]


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Replaces the function as soon as `torch.distributed` has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find `torch.distributed` as others do, with a loader that replaces the function; find nothing else."""
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A module's own loader, after which the function is replaced."""

    def __init__(self, own: Any) -> None:  # noqa: ANN401 (a loader)
        self._own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        created: ModuleType | None = self._own.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, as its own loader, and replace the function."""
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        _replace_in(module)


# -- modules ------------------------------------------------------------------------------------------------------------


def find_module(name: str) -> tuple[Any, CodeType]:
    """Return the spec and the code that ``python -m`` runs for the module *name*; exit as Python does when there is none."""
    python: Any = runpy
    try:
        _, spec, code = python._get_module_details(name, python._Error)  # noqa: SLF001 (what `python -m` calls)
    except python._Error as error:  # noqa: SLF001
        sys.exit(f"{sys.executable}: {error}")
    return spec, code


def run_module(spec: Any, code: CodeType, main: ModuleType) -> None:  # noqa: ANN401 (a module's spec)
    """Run the *code* of a module in *main*, as ``python -m`` does."""
    sys.argv[0] = spec.origin
    python: Any = runpy
    python._run_code(code, main.__dict__, None, "__main__", spec)  # noqa: SLF001 (as above)
