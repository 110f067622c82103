# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Sizes and offsets of a region against the formulas that the documents give, and the checks of the C++ boundary."""

from __future__ import annotations

import itertools
import math

import pytest

from mscclpp_dispatcher import _C, CombineMode, DispatcherConfig, DispatchLayout, WeightMode
from mscclpp_dispatcher.config import MAX_EXPERTS

SECTION = 256
SERVING = {"num_ranks": 8, "num_experts": 256, "num_topk": 8, "hidden": 7168, "max_tokens_per_rank": 128}


def runtime_config(
    layout: str = "EXPERT_MAJOR",
    combine_mode: str = "LOCAL_REDUCE",
    weight_mode: str = "IN_COMBINE",
    *,
    num_ranks: int = 4,
    num_experts: int = 10,
    num_topk: int = 3,
    hidden: int = 64,
    max_tokens_per_rank: int = 5,
    num_slots: int = 1,
) -> _C.RuntimeConfig:
    """Settings of rank 1, BF16, experts in contiguous blocks."""
    config = _C.RuntimeConfig()
    config.rank = min(1, num_ranks - 1)
    config.num_ranks, config.num_experts, config.num_topk = num_ranks, num_experts, num_topk
    config.hidden, config.row_bytes = hidden, 2 * hidden
    config.max_tokens_per_rank, config.num_slots, config.num_blocks = max_tokens_per_rank, num_slots, 1
    config.padding_expert_id = -1
    config.layout = getattr(_C.DispatchLayout, layout)
    config.combine_mode = getattr(_C.CombineMode, combine_mode)
    config.weight_mode = getattr(_C.WeightMode, weight_mode)
    config.payload = _C.Payload.BF16
    python = DispatcherConfig(
        num_experts=num_experts, num_topk=num_topk, hidden=hidden, max_tokens_per_rank=max_tokens_per_rank
    )
    config.expert_rank = list(python.owners(num_ranks))
    return config


def region(*args: str, **sizes: int) -> dict[str, int]:
    return _C.MoELowLatencyRuntime.on_cpu(runtime_config(*args, **sizes)).layout


MODES = [
    (layout.name, combine.name, weight.name)
    for layout, combine, weight in itertools.product(DispatchLayout, CombineMode, WeightMode)
    if (layout.name, combine.name, weight.name) != ("RANK_MAJOR", "LOCAL_REDUCE", "IN_COMBINE")
]


@pytest.mark.parametrize("modes", MODES, ids="-".join)
def test_payload_sizes(modes):
    """Rows, ids and weights of each layout, R = 4, M = 5, K = 3, L = ceil(10 / 4) = 3."""
    layout, combine_mode, weight_mode = modes
    got = region(*modes)
    source_rows = 4 * 5
    is_expert_major, is_reduce = layout == "EXPERT_MAJOR", combine_mode == "LOCAL_REDUCE"
    assert got["recv_rows"] == (3 * source_rows if is_expert_major else source_rows)
    assert got["recv_ids"] == (0 if is_expert_major and not is_reduce else 3 * source_rows)
    if is_expert_major and weight_mode == "IN_RUNNER":
        assert got["recv_weights"] == 3 * source_rows  # one per row of three experts
    else:
        assert got["recv_weights"] == got["recv_ids"]
    if is_reduce:
        assert got["expert_output_rows"] == source_rows
    else:
        assert got["expert_output_rows"] == 3 * source_rows  # per expert, or per route


@pytest.mark.parametrize("modes", MODES, ids="-".join)
def test_sections_do_not_overlap(modes):
    got = region(*modes)
    sizes = {
        "recv_x": got["recv_rows"] * 128,
        "recv_topk_ids": got["recv_ids"] * 4,
        "recv_topk_weights": got["recv_weights"] * 4,
        "expert_output": got["expert_output_rows"] * 128,
    }
    ends = [(got[name], got[name] + size) for name, size in sizes.items()]
    for (_, end), (start, _) in itertools.pairwise(ends):
        assert start % SECTION == 0
        assert start >= end
    assert ends[-1][1] <= got["slot_bytes"]


def test_region_grows_by_whole_slots():
    one, three = region(num_slots=1), region(num_slots=3)
    assert three["slot_bytes"] == one["slot_bytes"]
    assert three["total_bytes"] - one["total_bytes"] == 2 * one["slot_bytes"]


def test_b20_bytes_of_a_serving_shape():
    """The documented formula, linear in R for RANK_MAJOR, pinned for R=8 M=1024 H=7168 K=8 E=256."""
    shape = {**SERVING, "max_tokens_per_rank": 1024}
    got = region("RANK_MAJOR", "LOCAL_REDUCE", "IN_RUNNER", **shape)
    rows = 8 * 1024
    assert got["recv_rows"] * 14336 == 117_440_512
    assert got["expert_output_rows"] * 14336 == 117_440_512
    payload = 2 * rows * 14336 + 2 * rows * 8 * 4
    control = got["total_bytes"] - payload
    assert 0 < control < 250_000
    half = region("RANK_MAJOR", "LOCAL_REDUCE", "IN_RUNNER", **{**shape, "num_ranks": 4})
    assert half["recv_rows"] * 2 == got["recv_rows"]
    expert_major = region("EXPERT_MAJOR", "LOCAL_REDUCE", "IN_COMBINE", **shape)
    assert expert_major["recv_rows"] * 14336 == 32 * rows * 14336 == 3_758_096_384
    assert expert_major["expert_output_rows"] * 14336 == 117_440_512


def test_b23_offsets_beyond_two_gigabytes():
    """64-bit offsets: the last row of a region of more than 2**32 bytes lies where Python integers say."""
    shape = {**SERVING, "max_tokens_per_rank": 4096}
    got = region("EXPERT_MAJOR", "LOCAL_REDUCE", "IN_COMBINE", **shape)
    rows = 32 * 8 * 4096
    assert got["recv_rows"] == rows
    assert got["recv_topk_ids"] == got["recv_x"] + math.ceil(rows * 14336 / SECTION) * SECTION
    assert got["total_bytes"] > 1 << 32


def test_b23_rows_beyond_int32_are_refused():
    with pytest.raises(ValueError, match=r"rows; allowed: fewer than 2\^31; lower max_tokens_per_rank"):
        region(num_ranks=64, num_experts=4096, hidden=8, max_tokens_per_rank=1 << 20)


def test_max_experts_is_the_same_on_both_sides():
    assert _C.MAX_EXPERTS == MAX_EXPERTS


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_ranks", 65, "num_ranks is 65; allowed: 1..64"),
        ("rank", 4, "rank is 4; allowed: 0..3"),
        ("num_experts", 4097, "num_experts is 4097; allowed: 1..4096"),
        ("num_topk", 33, "num_topk is 33; allowed: 1..32"),
        ("row_bytes", 24, "row_bytes is 24; allowed: multiples of 16"),
        ("num_blocks", 129, "num_blocks is 129; allowed: 1..128"),
        ("expert_rank", [0] * 9, "expert_rank has 9 entries; needed: num_experts = 10"),
        ("expert_rank", [0] * 9 + [4], r"expert_rank holds 4; allowed: 0\.\.3"),
    ],
)
def test_runtime_refuses(name, value, message):
    config = runtime_config()
    setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        _C.MoELowLatencyRuntime.on_cpu(config)


def test_runtime_refuses_launches_before_connect():
    runtime = _C.MoELowLatencyRuntime.on_cpu(runtime_config())
    with pytest.raises(ValueError, match="launch before connect"):
        runtime.dispatch(_C.SEND, 0, 0, 5, 0, 0, 0, 8, 0, 0)
    with pytest.raises(ValueError, match="region of rank 0 is at 128; it must be a multiple of 256"):
        runtime.connect([128, 256, 512, 768], [1] * 4)
