# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Blocks of each rank, alone on its GPU and sharing one."""

from __future__ import annotations

import pytest

from mscclpp_dispatcher import ConfigError, DispatcherConfig
from mscclpp_dispatcher.engines.placement import GpuPlace, choose_num_blocks, ranks_on_gpu


def config(**settings: object) -> DispatcherConfig:
    return DispatcherConfig(
        **{"num_experts": 8, "num_topk": 2, "hidden": 64, "max_tokens_per_rank": 128, **settings}  # type: ignore[arg-type]
    )


def gpus(*uuids: str, num_sms: int = 132, host: str = "a") -> list[GpuPlace]:
    return [GpuPlace(host, uuid, num_sms) for uuid in uuids]


def test_ranks_are_grouped_by_host_and_gpu():
    places = gpus("x", "y", "x") + gpus("x", host="b")
    assert ranks_on_gpu(places, 0) == [0, 2]
    assert ranks_on_gpu(places, 1) == [1]
    assert ranks_on_gpu(places, 3) == [3]


@pytest.mark.parametrize(
    ("max_tokens", "num_slots", "num_sms", "expected"),
    [
        (128, 1, 132, 64),  # at most 64
        (24, 1, 132, 24),  # no more than tokens
        (1, 1, 132, 8),  # but eight
        (128, 4, 132, 32),  # 128 SMs over four slots
        (128, 8, 20, 2),
        (128, 8, 8, 1),  # never none
    ],
)
def test_one_rank_per_gpu(max_tokens, num_slots, num_sms, expected):
    places = gpus("x", "y", num_sms=num_sms)
    assert choose_num_blocks(config(max_tokens_per_rank=max_tokens, num_slots=num_slots), places) == [expected] * 2


@pytest.mark.parametrize(("num_ranks", "expected"), [(2, 33), (4, 16), (8, 8)])
def test_shared_gpu_leaves_half_of_its_sms(num_ranks, expected):
    places = gpus(*["x"] * num_ranks)
    assert choose_num_blocks(config(allow_shared_device=True), places) == [expected] * num_ranks


def test_each_rank_has_its_own_number():
    places = gpus("x", "x", "y")
    assert choose_num_blocks(config(allow_shared_device=True), places) == [33, 33, 64]


def test_b77_shared_gpu_needs_the_setting():
    with pytest.raises(ConfigError, match=r"ranks 0, 2 are all on GPU x; .*allow_shared_device=True"):
        choose_num_blocks(config(), gpus("x", "y", "x"))


def test_b77_blocks_that_cannot_be_resident_are_refused():
    settings = {"allow_shared_device": True, "num_slots": 2}
    assert choose_num_blocks(config(num_blocks=33, **settings), gpus("x", "x")) == [33, 33]
    message = r"num_blocks is 34: with 2 ranks .*num_slots = 2, 136 blocks cannot be resident .* allowed: at most 33"
    with pytest.raises(ConfigError, match=message):
        choose_num_blocks(config(num_blocks=34, **settings), gpus("x", "x"))
