# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Model-checks docs/model/ll_protocol.pml: the protocol holds, and each seeded fault is found."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import pytest

MODEL = pathlib.Path(__file__).resolve().parents[2] / "docs" / "model" / "ll_protocol.pml"
# The search of the right model takes about 35 s and 0.8 GB; the limits leave room for slow machines.
MEMORY_LIMIT_MB = 4000
TIME_LIMIT_S = 600

FAULTS = {
    1: "epoch passed by value, so that replays repeat it",
    2: "flags written only when tokens were sent",
    3: "combine waits only for the ranks it pulls from",
    4: "epoch base moved by block 0 without the ticket",
    5: "flags written before the rows",
    6: "expert_output written between dispatch_send and dispatch_recv",
    7: "fresh flag words zero instead of first_epoch",
    8: "ticket drawn before all threads have read the base",
}

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("spin") and shutil.which("gcc")) and not os.environ.get("CI"),
        reason="needs spin and gcc; with CI set their absence is a failure",
    ),
    pytest.mark.timeout(TIME_LIMIT_S + 60),
]


def _run(command: list[str], work_dir: pathlib.Path) -> str:
    result = subprocess.run(command, cwd=work_dir, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    assert result.returncode == 0, f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}"
    return result.stdout


def _search(fault: int, work_dir: pathlib.Path) -> str:
    """The report of an exhaustive search (COLLAPSE compresses states without loss)."""
    _run(["spin", "-a", f"-DFAULT={fault}", str(MODEL)], work_dir)
    _run(["gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_LIMIT_MB}", "-o", "pan", "pan.c"], work_dir)
    return _run(["./pan", "-m10000", "-w24"], work_dir)


def _num_errors(report: str) -> int:
    match = re.search(r"errors: (\d+)", report)
    assert match, f"no verdict in the report:\n{report}"
    return int(match[1])


@pytest.mark.slow
def test_protocol_holds_in_every_interleaving(tmp_path):
    report = _search(0, tmp_path)
    assert _num_errors(report) == 0, report
    assert "Full statespace search" in report, report
    for sign in ("Search not completed", "max search depth too small", "hash-table full", "out of memory"):
        assert sign not in report, report
    unreached = re.findall(r"\((\d+) of \d+ states\)", report)
    assert unreached and set(unreached) == {"0"}, f"the model has steps that never happen:\n{report}"


@pytest.mark.parametrize("fault", FAULTS, ids=FAULTS.values())
def test_seeded_fault_is_found(fault, tmp_path):
    report = _search(fault, tmp_path)
    assert _num_errors(report) > 0, f"the model missed fault {fault} ({FAULTS[fault]}):\n{report}"
    assert "assertion violated" in report or "invalid end state" in report, report
