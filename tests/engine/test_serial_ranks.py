# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""More ranks than processes could be started for: all in one process, their halves in turn."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import DIRECT_SEND, EXPERT_MAJOR, LOCAL_REDUCE, RANK_MAJOR, VARIANTS, Case
from checks import assert_equal, check_dispatch, is_read_row
from launcher import DEVICE_TYPE
from serial_ranks import SerialRanks

from mscclpp_dispatcher import CopyPath, Payload, reference
from mscclpp_dispatcher.reference import ScalingExperts, TokenBatch

DEVICE = "cuda:0" if DEVICE_TYPE == "cuda" else "cpu"


def run_serial_case(case: Case, copy_path: CopyPath = CopyPath.AUTO) -> None:
    """All rounds of the case, every rank in this process."""
    device = DEVICE
    settings = {} if device == "cpu" else {"allow_shared_device": True, "num_blocks": 2, "copy_path": copy_path}
    config = dataclasses.replace(case.config(), **settings)
    ranks = SerialRanks(config, case.num_ranks, device)
    experts = [
        ScalingExperts(config, config.local_experts(rank, case.num_ranks), device) for rank in range(case.num_ranks)
    ]
    for round_idx in range(case.num_rounds):
        batches = case.batches(round_idx)
        there = [
            TokenBatch(*(None if tensor is None else tensor.to(device) for tensor in dataclasses.astuple(batch)))
            for batch in batches
        ]
        outputs, handles = ranks.dispatch(
            [batch.x for batch in there],
            [batch.topk_ids for batch in there],
            [batch.topk_weights for batch in there],
            case.active,
        )
        rows = []
        for rank, output in enumerate(outputs):
            check_dispatch(config, output, batches, rank, case.active)
            values = experts[rank](output)
            is_read = is_read_row(config, output)[..., None]
            rows.append(torch.where(is_read, values, float("nan")).to(values.dtype))
        for rank, out in enumerate(ranks.combine(rows, handles)):
            assert_equal(f"rank {rank}: out", out, reference.round_trip(config, case.num_ranks, batches[rank]))
    ranks.close()


def _serial_case(num_ranks: int, **fields: object) -> Case:
    num_tokens = tuple((3 * rank + 1) % 6 for rank in range(num_ranks))
    return Case(
        name=f"serial_{num_ranks}",
        num_tokens=num_tokens,
        num_experts=2 * num_ranks + 3,
        num_topk=min(8, num_ranks),
        routing="masked",
        num_rounds=3,
        **fields,
    )


@pytest.mark.parametrize("payload", Payload, ids=lambda payload: payload.value)
@pytest.mark.parametrize("copy_path", [CopyPath.TMA, CopyPath.PLAIN], ids=lambda path: path.value)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel(variant, copy_path, payload):
    """Each kernel on a small case: what compute-sanitizer runs too."""
    case = Case(
        name=variant,
        num_tokens=(5, 0, 3),
        num_experts=7,
        num_topk=3,
        hidden=72,
        routing="repeated",
        payload=payload,
        num_rounds=2,
        **VARIANTS[variant],
    )
    run_serial_case(case, copy_path)


@pytest.mark.parametrize("num_ranks", [2, 16, 33, 64])
@pytest.mark.parametrize("layout", [EXPERT_MAJOR, RANK_MAJOR], ids=lambda layout: layout.value)
@pytest.mark.parametrize("combine_mode", [LOCAL_REDUCE, DIRECT_SEND], ids=lambda mode: mode.value)
def test_many_ranks(num_ranks, layout, combine_mode):
    run_serial_case(_serial_case(num_ranks, layout=layout, combine_mode=combine_mode))


@pytest.mark.parametrize("layout", [EXPERT_MAJOR, RANK_MAJOR], ids=lambda layout: layout.value)
def test_more_tokens_than_a_tile(layout):
    """A block prepares 1024 routes at a time; here each of two blocks has several times that."""
    case = Case(
        name="tiles",
        num_tokens=(700, 0, 513),
        num_experts=40,
        num_topk=7,
        hidden=64,
        routing="repeated",
        layout=layout,
        num_rounds=2,
    )
    run_serial_case(case)


@pytest.mark.parametrize("layout", [EXPERT_MAJOR, RANK_MAJOR], ids=lambda layout: layout.value)
def test_row_in_several_pieces(layout):
    """Rows longer than a bulk copy's stage travel in pieces; the last one is smaller."""
    case = Case(name="pieces", num_tokens=(3, 5), hidden=20488, num_experts=4, num_topk=2, layout=layout, num_rounds=2)
    run_serial_case(case)
