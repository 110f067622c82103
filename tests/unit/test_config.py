# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""DispatcherConfig: what it accepts, what it refuses and what it derives."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from mscclpp_dispatcher import (
    CombineMode,
    ConfigError,
    CopyPath,
    DispatcherConfig,
    DispatcherError,
    DispatchLayout,
    DispatchMode,
    ExpertIdSpace,
    Payload,
    WeightMode,
)
from mscclpp_dispatcher.config import MAX_BLOCKS, MAX_EXPERTS, MAX_TOPK


def make(**settings: object) -> DispatcherConfig:
    return DispatcherConfig(**{"num_experts": 8, "num_topk": 2, "hidden": 64, "max_tokens_per_rank": 4, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 0}, f"num_experts is 0; allowed: 1..{MAX_EXPERTS}"),
        ({"num_experts": MAX_EXPERTS + 1}, f"num_experts is {MAX_EXPERTS + 1}; allowed: 1..{MAX_EXPERTS}"),
        ({"num_topk": 0}, f"num_topk is 0; allowed: 1..{MAX_TOPK}"),
        ({"num_topk": 33}, f"num_topk is 33; allowed: 1..{MAX_TOPK}"),
        ({"num_topk": 2.0}, "num_topk is 2.0; it must be an int"),
        ({"num_topk": True}, "num_topk is True; it must be an int"),
        ({"num_topk": "2"}, "num_topk is '2'; it must be an int"),
        ({"hidden": 0}, "hidden is 0"),
        (
            {"hidden": 12},
            "hidden is 12: a bf16 row has 24 bytes; allowed: multiples of 16 bytes, so hidden a multiple of 8",
        ),
        ({"hidden": 66, "payload": Payload.FP32}, "so hidden a multiple of 4"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank is 0; allowed: 1.."),
        ({"max_tokens_per_rank": -1}, "max_tokens_per_rank is -1; allowed: 1.."),
        ({"num_slots": 0}, "num_slots is 0; allowed: 1..8"),
        ({"num_slots": 9}, "num_slots is 9; allowed: 1..8"),
        ({"num_blocks": 0}, f"num_blocks is 0; allowed: 1..{MAX_BLOCKS}"),
        ({"num_blocks": MAX_BLOCKS + 1}, f"allowed: 1..{MAX_BLOCKS}"),
        ({"first_epoch": -1}, "first_epoch is -1; allowed: 0..4294967295"),
        ({"first_epoch": 1 << 32}, "first_epoch is 4294967296"),
        ({"padding_expert_id": 0}, "padding_expert_id is 0, which is a real expert"),
        ({"padding_expert_id": 7}, "padding_expert_id is 7, which is a real expert"),
        ({"padding_expert_id": 1 << 31}, "padding_expert_id is 2147483648"),
        ({"timeout_s": -1.0}, "timeout_s is -1.0; allowed: seconds"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"timeout_s": float("inf")}, "timeout_s is inf"),
        ({"init_timeout_s": "5"}, "init_timeout_s is '5'"),
        ({"expert_to_rank": (0, 1)}, "expert_to_rank has 2 entries; it needs num_experts = 8"),
        ({"layout": "expert_major"}, "layout is 'expert_major'; allowed: DispatchLayout.EXPERT_MAJOR"),
        ({"combine_mode": None}, "combine_mode is None; allowed: CombineMode.LOCAL_REDUCE"),
        ({"payload": torch.bfloat16}, "payload is torch.bfloat16; allowed: Payload.BF16"),
        ({"mode": "low_latency"}, "mode is 'low_latency'; allowed: DispatchMode.LOW_LATENCY"),
        ({"recv_id_space": 0}, "recv_id_space is 0; allowed: ExpertIdSpace.LOCAL"),
        ({"copy_path": "tma"}, "copy_path is 'tma'; allowed: CopyPath.AUTO"),
        ({"weight_mode": "in_runner"}, "weight_mode is 'in_runner'; allowed: None, WeightMode.IN_COMBINE"),
    ],
)
def test_refused(settings: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        make(**settings)
    assert isinstance(caught.value, DispatcherError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_experts": MAX_EXPERTS},
        {"num_experts": 1, "num_topk": MAX_TOPK},  # more picks than experts: they repeat
        {"hidden": 8},
        {"hidden": 4, "payload": Payload.FP32},
        {"hidden": 7392},
        {"hidden": 1 << 20},
        {"num_slots": 8},
        {"num_blocks": MAX_BLOCKS},
        {"first_epoch": (1 << 32) - 1},
        {"padding_expert_id": 8},
        {"padding_expert_id": -(1 << 31)},
        {"timeout_s": 0},
        {"expert_to_rank": [0, 1] * 4},
    ],
)
def test_accepted(settings: dict[str, object]):
    make(**settings)


def test_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().hidden = 128
    with pytest.raises(TypeError):
        DispatcherConfig(8, 2, 64, 4)


def test_weight_mode_default_and_the_illegal_choice():
    for layout in DispatchLayout:
        for combine_mode in CombineMode:
            is_runner_sum = (layout, combine_mode) == (DispatchLayout.RANK_MAJOR, CombineMode.LOCAL_REDUCE)
            expected = WeightMode.IN_RUNNER if is_runner_sum else WeightMode.IN_COMBINE
            assert make(layout=layout, combine_mode=combine_mode).weight_mode is expected
            make(layout=layout, combine_mode=combine_mode, weight_mode=WeightMode.IN_RUNNER)
            if is_runner_sum:
                with pytest.raises(ConfigError, match=r"weight_mode is IN_COMBINE.*weight_mode=IN_RUNNER"):
                    make(layout=layout, combine_mode=combine_mode, weight_mode=WeightMode.IN_COMBINE)
            else:
                make(layout=layout, combine_mode=combine_mode, weight_mode=WeightMode.IN_COMBINE)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 2), (32, 3), (2, 4), (1, 1), (128, 24), (7, 8)])
def test_owners_are_contiguous_blocks(num_experts: int, num_ranks: int):
    config = make(num_experts=num_experts)
    owners = config.owners(num_ranks)
    assert len(owners) == num_experts
    assert list(owners) == sorted(owners)
    counts = [owners.count(rank) for rank in range(num_ranks)]
    assert sum(counts) == num_experts
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
    for rank in range(num_ranks):
        assert config.local_experts(rank, num_ranks) == tuple(i for i, owner in enumerate(owners) if owner == rank)


def test_owners_of_an_explicit_map():
    config = make(expert_to_rank=[1, 0, 1, 1, 0, 2, 2, 0])
    assert config.expert_to_rank == (1, 0, 1, 1, 0, 2, 2, 0)
    assert config.owners(3) == config.expert_to_rank
    assert [config.local_experts(rank, 4) for rank in range(4)] == [(1, 4, 7), (0, 2, 3), (5, 6), ()]
    with pytest.raises(ConfigError, match=re.escape("expert_to_rank[5] is 2; allowed: 0..1 in a group of 2")):
        config.owners(2)
    with pytest.raises(ConfigError, match=re.escape("expert_to_rank[3] is -1")):
        make(expert_to_rank=[0, 0, 0, -1, 0, 0, 0, 0]).owners(2)


def test_row_bytes_and_dtypes():
    assert [make(payload=payload).row_bytes for payload in Payload] == [128, 128, 256]
    assert [payload.dtype for payload in Payload] == [torch.bfloat16, torch.float16, torch.float32]


def test_to_dict_is_json_and_tells_every_setting_apart():
    """Ranks compare these: each setting that is not equal must show."""
    base = make()
    changes: dict[str, object] = {
        "num_experts": 9,
        "num_topk": 3,
        "hidden": 128,
        "max_tokens_per_rank": 5,
        "layout": DispatchLayout.RANK_MAJOR,
        "combine_mode": CombineMode.DIRECT_SEND,
        "weight_mode": WeightMode.IN_RUNNER,
        "payload": Payload.FP16,
        "expert_to_rank": (0,) * 8,
        "padding_expert_id": -2,
        "recv_id_space": ExpertIdSpace.GLOBAL,
        "num_slots": 2,
        "num_blocks": 4,
        "copy_path": CopyPath.PLAIN,
        "timeout_s": 1.0,
        "init_timeout_s": 1.0,
        "first_epoch": 1,
        "check_ids": True,
        "allow_shared_device": True,
    }
    only_one_value = {"mode"}
    assert len(DispatchMode) == 1
    assert changes.keys() | only_one_value == {field.name for field in dataclasses.fields(base)}
    for name, value in changes.items():
        text = json.loads(json.dumps(make(**{name: value}).to_dict()))
        assert text != json.loads(json.dumps(base.to_dict())), name
