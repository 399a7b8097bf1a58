"""The page of conformance, from the stored results of `make conformance`."""

from __future__ import annotations

from typing import Final

from docs.generator.markdown import page, table
from tests.conformance.results import PASSED, Results, counts

SUITES: Final = {
    "distributed": "PyTorch's `distributed_test`, as it is for gloo on CPUs",
    "distributed-mpi": "those of its tests that PyTorch runs with MPI only",
    "distributed-gpu": "those of its tests that PyTorch runs on GPUs only, with the CPU in place of every GPU",
    "public-api": "our tests of DDP, FSDP, DTensor, `DeviceMesh`, pipelining, functional collectives and checkpoints",
}


def conformance_page() -> str:
    """List which tests pass over managed groups, and why the others do not, beside stock gloo."""
    stored = Results.read()
    rows, different, passing, reasons = [], [], [], dict[str, int]()
    for suite, outcomes in stored.suites.items():
        gloo, ours = counts(outcomes, "gloo"), counts(outcomes, "holdfast")
        rows.append((f"`{suite}`", SUITES[suite], *(f"{one[PASSED]} / {one['skipped']} / {one['failed']}" for one in (gloo, ours))))
        for test, one in outcomes.items():
            if (one["gloo"] == PASSED) != (one["holdfast"] == PASSED):
                different.append((f"`{suite}`", f"`{test}`", one["gloo"], one["holdfast"]))
            elif one["holdfast"] != PASSED:
                reasons[one["holdfast"]] = reasons.get(one["holdfast"], 0) + 1
        names = ", ".join(f"`{test}`" for test, one in outcomes.items() if one["holdfast"] == PASSED)
        passing.append(f"### {suite}\n\n{names}\n")
    return page(
        "# Conformance\n",
        f"PyTorch {stored.torch}'s own tests on {stored.ranks} ranks, over managed groups and over stock gloo.",
        "`make conformance` runs them and fails when one that is listed here as passing does not pass any more, or does not exist.",
        "`make conformance ARGS=--update` runs them over both and writes this list anew.\n",
        "Tests that PyTorch runs on GPUs only are not listed, and a plain `make conformance` leaves them out. With the CPU in",
        "place of every GPU many fail over stock gloo too: `SyncBatchNorm`, NCCL and the accelerator itself are missing.",
        "`make conformance ARGS='--suite distributed-gpu'` runs them and lists each as new.\n",
        table(("Suite", "What it is", "gloo: passed / skipped / failed", "Holdfast: passed / skipped / failed"), *rows),
        "## Where the two differ\n",
        table(("Suite", "Test", "gloo", "Holdfast"), *different) if different else "Nowhere.\n",
        "## Skipped or failed over both\n",
        table(("Tests", "Reason"), *((str(count), why) for why, count in sorted(reasons.items(), key=lambda one: -one[1]))),
        "## What passes\n",
        *passing,
    )
