# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""What the recorded routes say: tokens per expert and bytes moved."""

from __future__ import annotations

import torch

from mscclpp_dispatcher import reference
from mscclpp_dispatcher.demo.worker import Plan, RankResult


def expert_load(plan: Plan, results: list[RankResult]) -> list[int]:
    """Routed tokens of each expert over all layers, steps and ranks."""
    ids = torch.cat([result.routes.flatten() for result in results])
    return torch.bincount(ids[ids >= 0], minlength=plan.model.num_experts).tolist()


def mean_bytes_per_call(plan: Plan, results: list[RankResult]) -> dict[str, float]:
    """Mean row bytes of one dispatch and one combine over all ranks, as ``reference.bytes_moved`` counts them.

    Rows that stay on their rank are included; ids, weights, counts and flags are not.
    """
    batches = [
        reference.TokenBatch(torch.empty(ids.shape[0], 0), ids)
        for ids in (result.routes.flatten(0, 2) for result in results)
    ]
    moved = reference.bytes_moved(plan.dispatcher, batches)
    num_calls = plan.num_steps * plan.model.num_layers
    return {"dispatch": round(moved.dispatch / num_calls, 1), "combine": round(moved.combine / num_calls, 1)}
