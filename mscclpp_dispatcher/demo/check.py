# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The same decoding in one process, without an engine, and the comparison with what the ranks wrote."""

from __future__ import annotations

import dataclasses
import pathlib

import torch

from mscclpp_dispatcher.demo.decode import DecodeState, decode_step
from mscclpp_dispatcher.demo.exchange import ReferenceExchange
from mscclpp_dispatcher.demo.model import MoeTransformer
from mscclpp_dispatcher.demo.progress import Bars
from mscclpp_dispatcher.demo.train import load_checkpoint
from mscclpp_dispatcher.demo.worker import Plan, RankResult


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Outcome over all ranks and sequences.

    Attributes:
        num_tokens: generated tokens compared.
        num_unequal: of them, those that differ.
        first_mismatch: where and how, or None.
        max_logit_difference: largest difference of the winning scores; 0.0 means equal bits.
    """

    num_tokens: int
    num_unequal: int
    first_mismatch: str | None
    max_logit_difference: float


def decode_in_one_process(plan: Plan) -> list[DecodeState]:
    """Decodes the prompts of all ranks side by side, every rank's part in the shapes that rank uses."""
    device = plan.device(0)
    weights, _ = load_checkpoint(pathlib.Path(plan.checkpoint), plan.model)
    models = [
        MoeTransformer.for_rank(plan.model, weights, plan.dispatcher.local_experts(rank, plan.num_ranks), device)
        for rank in range(plan.num_ranks)
    ]
    states, idle_states = (
        [DecodeState(plan.model, batch, len(batch.prompts) * is_busy, device) for batch in plan.batches]
        for is_busy in (1, 0)
    )
    exchange = ReferenceExchange(plan.dispatcher, models)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the rank processes: a split sum would round otherwise
    try:
        with Bars() as bars:
            bar = bars.add("check", plan.num_steps)
            for step in range(plan.num_steps):
                decode_step(
                    models,
                    [
                        state if step < batch.num_steps else idle
                        for state, idle, batch in zip(states, idle_states, plan.batches, strict=True)
                    ],
                    exchange,
                )
                bars.set(bar, step + 1, "one process, no engine")
    finally:
        torch.set_num_threads(num_threads)
    return states


def compare(plan: Plan, results: list[RankResult], expected: list[DecodeState]) -> Comparison:
    """Every generated token of every rank, and the scores that chose them."""
    num_tokens = num_unequal = 0
    first_mismatch = None
    max_difference = 0.0
    for rank, (batch, result, state) in enumerate(zip(plan.batches, results, expected, strict=True)):
        history, top_logits = state.history.cpu(), state.top_logits.cpu()
        for row, (begin, end) in enumerate(zip(batch.prompt_lengths, batch.end_lengths, strict=True)):
            unequal = (result.history[row, begin:end] != history[row, begin:end]).nonzero().flatten().tolist()
            num_tokens += end - begin
            num_unequal += len(unequal)
            difference = (result.top_logits[row, : end - 1] - top_logits[row, : end - 1]).abs().max().item()
            max_difference = max(max_difference, difference)
            if unequal and first_mismatch is None:
                position = begin + unequal[0]
                first_mismatch = (
                    f"rank {rank}, sequence {row}, position {position}: byte {result.history[row, position]} from the "
                    f"ranks, {history[row, position]} in one process (winning scores differ by up to {difference:.3g})"
                )
    return Comparison(num_tokens, num_unequal, first_mismatch, max_difference)
