# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The demo as a user runs it: its exit code, its figures and its plot."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from mscclpp_dispatcher.demo.check import compare
from mscclpp_dispatcher.demo.decode import DecodeState, RankBatch
from mscclpp_dispatcher.demo.model import ModelConfig
from mscclpp_dispatcher.demo.worker import Plan, RankResult

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]

SHORT = [
    "--ranks",
    "2",
    "--device",
    "cpu",
    "--layers",
    "2",
    "--batch",
    "3",
    "--prompt-bytes",
    "16",
    "--new-tokens",
    "16",
]
NUM_COMPARED = (16 + 12 + 16) + (8 + 6)  # rank 0: 3 sequences, the second a quarter shorter; rank 1: 2, of half length


def run_demo(*options: object, timeout_s: float = 110) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mscclpp_dispatcher.demo", *SHORT, *map(str, options)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "COLUMNS": "160"},
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Written by the first run, loaded by the others."""
    return tmp_path_factory.mktemp("demo") / "weights.pt"


@pytest.mark.parametrize("combine", ["local_reduce", "direct_send"])
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_tokens_equal_the_single_process_run(checkpoint, tmp_path, layout, combine):
    plot, figures_path = tmp_path / "demo.png", tmp_path / "demo.json"
    done = run_demo(
        *("--layout", layout, "--combine", combine, "--train-steps", 12, "--checkpoint", checkpoint),
        *("--plot", plot, "--json", figures_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{NUM_COMPARED} tokens equal" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    figures = json.loads(figures_path.read_text())
    assert figures["tokens_compared"] == NUM_COMPARED
    assert figures["tokens_unequal"] == 0
    assert figures["max_logit_difference"] == 0.0
    assert (figures["layout"], figures["combine_mode"]) == (layout, combine)
    assert figures["end_loss"] < figures["start_loss"]
    assert figures["busy_steps_per_rank"][1] < figures["num_steps"]  # the last rank goes on with zero tokens
    assert min(figures["dispatch_median_us"], figures["combine_median_us"]) > 0
    assert min(figures["bytes_per_call"].values()) > 0
    # Every fed byte of every layer has num_topk routes; prompts are 16 and 12 (second and third: 12, 8) bytes.
    num_fed = (31 + 23 + 23) + (23 + 17)
    assert sum(figures["expert_load"]) == num_fed * figures["num_layers"] * figures["num_topk"]


def test_a_wrong_byte_is_found():
    batch = RankBatch(torch.zeros(1, 4, dtype=torch.uint8), prompt_lengths=(4,), end_lengths=(7,))
    plan = Plan(ModelConfig(), None, (batch,), "cpu", "", 1.0)
    state = DecodeState(plan.model, batch, 1, torch.device("cpu"))
    routes = torch.stack(state.routes)
    result = RankResult(state.history.clone(), state.top_logits.clone(), routes, {}, [], 0.0, {})
    assert compare(plan, [result], [state]).first_mismatch is None
    result.history[0, 5] = 65
    found = compare(plan, [result], [state])
    assert (found.num_tokens, found.num_unequal) == (3, 1)
    assert "rank 0, sequence 0, position 5: byte 65 from the ranks, 0 in one process" in found.first_mismatch


def test_a_failing_rank_ends_the_run_with_its_traceback(checkpoint, tmp_path):
    done = run_demo("--train-steps", 12, "--checkpoint", checkpoint, "--plot", tmp_path / "no.png", "--fail-rank", 1)
    assert done.returncode == 1
    assert "rank1 failed" in done.stderr
    assert "RuntimeError: rank 1 fails at step 5" in done.stderr
    assert not (tmp_path / "no.png").exists()


def test_options_that_cannot_work_are_refused_in_a_sentence():
    done = run_demo("--experts", 1)
    assert done.returncode == 2
    assert "--experts is 1; allowed: at least --ranks 2" in done.stderr
