"""Whether a script uses a session, as its files say: by that all ranks decide alike which groups they create."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.runtime.groups.script_scan import uses_session

USES = {
    "attribute": {"train.py": "import holdfast\ndef main():\n    with holdfast.session(model=None): pass"},
    "other name": {"train.py": "import holdfast as h\nh.session"},
    "from": {"train.py": "def main():\n    from holdfast import session"},
    "integration": {"train.py": "from holdfast.integrations.huggingface import HoldfastCallback"},
    "by its name": {"train.py": "import importlib\nimportlib.import_module('holdfast.integrations.lightning')"},
    "beside it": {"train.py": "import loop", "loop.py": "import holdfast\nholdfast.session"},
    "in a function": {
        "train.py": "def f():\n    from parts import it",
        "parts/__init__.py": "",
        "parts/it.py": "from holdfast import session",
    },
    "in a package": {"train.py": "import parts.a.b", "parts/__init__.py": "", "parts/a/__init__.py": "from holdfast import join"},
    "relative": {
        "parts/train.py": "from .loop import run",
        "parts/__init__.py": "",
        "parts/loop.py": "from . import more",
        "parts/more.py": "from holdfast import Session",
    },
}
DOES_NOT = {
    "a comment": {"train.py": "# started by holdfast.session\nimport torch"},
    "heartbeats": {"train.py": "import holdfast\nwith holdfast.section('save'): holdfast.heartbeat(1)"},
    "heartbeats only": {"train.py": "from holdfast import heartbeat, section"},
    "an integration that reports": {"train.py": "from holdfast.integrations import megatron as ft_integration"},
    "the same by its name": {"train.py": "import holdfast.integrations.megatron as ft\nfrom holdfast.integrations.megatron import setup"},
    "not imported": {"train.py": "import torch, os, sys, nothing.there", "loop.py": "import holdfast\nholdfast.session"},
    "broken": {"train.py": "import loop", "loop.py": "from holdfast import session, ("},
    "in circles": {"train.py": "import loop", "loop.py": "import train"},
}


@pytest.mark.parametrize(
    ("files", "uses"), [*((one, True) for one in USES.values()), *((one, False) for one in DOES_NOT.values())], ids=str
)
def test_the_imports_of_a_script_and_its_modules_count(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    uses: bool,  # noqa: FBT001 (a table)
) -> None:
    """Wherever it stands in them."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    main = tmp_path / next(iter(files))
    assert uses_session(main, main.parent.name if main.parent != tmp_path else "", []) == uses
    assert uses_session(main, "", ["--trainer.callbacks+=holdfast.integrations.lightning.HoldfastCallback"])
