"""Multiply matrices with torch, where the node's python3 has it: on the vector units of the cores, and on each GPU.

A GPU computes one large product over and over: each result must equal the first bit for bit, the first that of the other GPUs of its kind,
and products of whole numbers those of the CPU. Its memory is filled with patterns.
"""

from __future__ import annotations

import importlib
import statistics
import time
from pathlib import Path
from typing import Any, Final

from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.plurals import plural

MATRIX: Final = "matrix"
GPU: Final = "gpu"
SMALL: Final = 256
"""Rows and columns of a product of whole numbers below 64: each sum is below 2**20, so float32 holds it exactly."""
LARGE: Final = 4096
SHARE: Final = 0.8
"""Share of the median speed of the node's GPUs of one kind that each must reach: one that throttles is slower."""
SEED: Final = 20261
CHUNK: Final = 256 << 20
"""Bytes of one tensor of patterns."""


def matrix(seconds: float) -> Check:
    """Multiply on the CPU for *seconds*, and compare with integers."""
    begun = time.monotonic()
    torch = _torch()
    if isinstance(torch, str):
        return Check(name=MATRIX, mark=CheckMark.SKIPPED, words=torch, needed=False)
    a, b, wanted = _whole_numbers(torch)
    rounds, wrong = 0, ""
    while not wrong and (not rounds or time.monotonic() < begun + seconds):
        for kind in (torch.float32, torch.float64):
            if not torch.equal((a.to(kind) @ b.to(kind)).long(), wanted):
                wrong = f"a product of whole numbers as {kind} differs from the same in integers"
        rounds += 1
    figures = {"threads": float(torch.get_num_threads()), "rounds": float(rounds)}
    mark, words = (CheckMark.FAILED, wrong) if wrong else (CheckMark.PASSED, "every product is the one in integers")
    return Check(name=MATRIX, mark=mark, words=words, figures=figures, seconds=time.monotonic() - begun)


def gpu(seconds: float, memory_share: float, expected: int = 0) -> list[Check]:
    """Test each GPU for its part of *seconds*: half with products, half with *memory_share* of its free memory.

    *expected* is the number of GPUs in the cluster file; 0: it does not say.
    """
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if not devices:
        words = "no NVIDIA device is visible" + (f", and the cluster file says {expected}" if expected else "")
        return [Check(name=GPU, mark=CheckMark.SKIPPED, words=words, needed=expected > 0 and not Path("/dev/kfd").exists())]
    if len(devices) < expected:
        visible = plural(len(devices), "NVIDIA device is visible", "NVIDIA devices are visible")
        words = f"{visible}, and the cluster file says {expected}"
        return [Check(name=GPU, mark=CheckMark.FAILED, words=words)]
    torch = _torch()
    if isinstance(torch, str):
        return [Check(name=GPU, mark=CheckMark.SKIPPED, words=f"it has {plural(len(devices), 'NVIDIA device')}, and {torch}")]
    if not torch.cuda.is_available():
        words = f"it has {plural(len(devices), 'NVIDIA device')}, and its torch {torch.__version__} can use none of them"
        return [Check(name=GPU, mark=CheckMark.SKIPPED, words=words)]
    count = torch.cuda.device_count()
    tested = [_test_gpu(torch, number, seconds / count, memory_share) for number in range(count)]
    return _compared(tested, missing=len(devices) - count)


def addresses(torch: Any, number: int) -> tuple[str, ...]:  # noqa: ANN401
    """Return the PCI address of a GPU, where this torch knows it."""
    facts = torch.cuda.get_device_properties(number)
    try:
        return (f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0",)
    except AttributeError:
        return ()


def _torch() -> Any:  # noqa: ANN401 (torch, or why there is none)
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        return f"its python3 has no torch: {error}"
    except (OSError, RuntimeError) as error:
        return f"its torch cannot be used: {error}"


def _whole_numbers(torch: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401 (torch's own)
    """Return two matrices of whole numbers, and their product in integers."""
    source = torch.Generator().manual_seed(SEED)
    a, b = (torch.randint(-63, 64, (SMALL, SMALL), generator=source, dtype=torch.int64) for _ in range(2))
    return a, b, a @ b


def _test_gpu(torch: Any, number: int, seconds: float, memory_share: float) -> dict[str, Any]:  # noqa: ANN401
    """Test one GPU; return what it is, what was wrong, its first products and its speed."""
    found: dict[str, Any] = {"number": number, "name": torch.cuda.get_device_name(number), "wrong": "", "figures": {}, "products": []}
    found["devices"] = addresses(torch, number)
    begun = time.monotonic()
    device = torch.device("cuda", number)
    try:
        with torch.cuda.device(device):
            found["wrong"] = multiply(torch, device, begun + seconds / 2, found)
            if not found["wrong"]:
                free, _ = torch.cuda.mem_get_info(device)
                found["wrong"] = fill(torch, device, begun + seconds, int(free * memory_share), found)
    except RuntimeError as error:  # from CUDA: an illegal access, an uncorrectable memory error, a lost device
        found["wrong"] = str(error).splitlines()[0]
    found["seconds"] = time.monotonic() - begun
    return found


def multiply(torch: Any, device: Any, until: float, found: dict[str, Any]) -> str:  # noqa: ANN401
    """Multiply on *device* until *until* (monotonic); return what was wrong, and add first products and speeds to *found*."""
    small_a, small_b, wanted = _whole_numbers(torch)
    if not torch.equal(_product(small_a.double().to(device), small_b.double().to(device)).long().cpu(), wanted):
        return "a product of whole numbers differs from the same on the CPU"
    for name, ends in (("float32", (time.monotonic() + until) / 2), ("bfloat16", until)):
        source = torch.Generator().manual_seed(SEED)
        a, b = (torch.randn(LARGE, LARGE, generator=source).to(device, getattr(torch, name)) for _ in range(2))
        first, rounds, spent = _product(a, b), 0, 0.0
        _wait_for(torch, device)
        while not rounds or time.monotonic() < ends:
            at = time.monotonic()
            again = _product(a, b)
            _wait_for(torch, device)
            spent, rounds = spent + time.monotonic() - at, rounds + 1
            if not torch.equal(again, first):
                places = plural(int((again != first).sum()), "place")
                return f"product {rounds} in {name} differs in {places} from the first one"
        found["products"].append(first.cpu())
        found["figures"][f"{name} TFLOP/s"] = 2 * LARGE**3 * rounds / spent / 1e12
    return ""


def fill(torch: Any, device: Any, until: float, size: int, found: dict[str, Any]) -> str:  # noqa: ANN401
    """Fill *size* bytes of memory with words that hold their own index, then with the inverse, and compare; return what was wrong."""
    words = CHUNK // 8
    parts = [torch.empty(words, dtype=torch.int64, device=device) for _ in range(max(1, size // CHUNK))]
    places, passes = torch.arange(words, dtype=torch.int64, device=device), 0
    while not passes or time.monotonic() < until:
        for transform in (torch.clone, torch.bitwise_not):
            for place, part in enumerate(parts):
                _write(part, transform(places + place * words))
            bad = sum(int((part != transform(places + place * words)).sum()) for place, part in enumerate(parts))
            if bad:
                return plural(bad, "word of its memory was", "words of its memory were") + " read with another value than was written"
        passes += 1
    found["figures"] |= {"GPU MiB": len(parts) * CHUNK / (1 << 20), "passes": float(passes)}
    return ""


def _product(a: Any, b: Any) -> Any:  # noqa: ANN401
    return a @ b


def _write(part: Any, values: Any) -> None:  # noqa: ANN401
    part.copy_(values)


def _wait_for(torch: Any, device: Any) -> None:  # noqa: ANN401
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compared(tested: list[dict[str, Any]], *, missing: int) -> list[Check]:
    """Compare GPUs of one kind with each other; return a check of each."""
    checks = []
    for one in tested:
        peers = [other for other in tested if other["name"] == one["name"] and not other["wrong"]]
        wrong = one["wrong"] or _different(one, peers) or _slow(one, peers)
        mark, words = (CheckMark.FAILED, wrong) if wrong else (CheckMark.PASSED, f"{one['name']}: every product is the same")
        facts = {name: one[name] for name in ("figures", "seconds", "devices")}
        checks.append(Check(name=f"{GPU} {one['number']}", mark=mark, words=words, **facts))
    if missing > 0:
        checks.append(Check(name=GPU, mark=CheckMark.SKIPPED, words=f"{missing} of its NVIDIA devices cannot be used by torch"))
    return checks


def _different(one: dict[str, Any], peers: list[dict[str, Any]]) -> str:
    """Return how its products differ from those of most GPUs of its kind."""
    unequal = [
        peer["number"]
        for peer in peers
        if not all(own.equal(theirs) for own, theirs in zip(one["products"], peer["products"], strict=True))
    ]
    return f"its products differ from those of GPUs {unequal}" if len(unequal) > len(peers) / 2 else ""


def _slow(one: dict[str, Any], peers: list[dict[str, Any]]) -> str:
    """Return by how much it is slower than the median of its kind."""
    for name, speed in one["figures"].items():
        median = statistics.median(peer["figures"][name] for peer in peers)
        if name.endswith("TFLOP/s") and speed < SHARE * median:
            return f"it reached {speed:.1f} {name}, other GPUs of its kind {median:.1f}"
    return ""
