# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Which ranks share a GPU, and how many blocks each may launch so that all that wait for each other are resident."""

from __future__ import annotations

import dataclasses

from mscclpp_dispatcher.config import DispatcherConfig
from mscclpp_dispatcher.errors import ConfigError

# Blocks that are chosen when the config leaves num_blocks open. Each holds a whole SM while it waits.
MAX_AUTO_BLOCKS = 64  # more do not speed up a decode batch; they only take SMs from the experts
MIN_AUTO_BLOCKS = 8  # so few that they never matter, yet enough to read one token's rows at once


@dataclasses.dataclass(frozen=True)
class GpuPlace:
    """Where a rank's GPU is.

    Attributes:
        host: identity of the machine.
        uuid: of the GPU.
        num_sms: its multiprocessors.
    """

    host: str
    uuid: str
    num_sms: int


def ranks_on_gpu(places: list[GpuPlace], rank: int) -> list[int]:
    """The ranks, ``rank`` included, that are on its GPU."""
    here = (places[rank].host, places[rank].uuid)
    return [peer for peer, place in enumerate(places) if (place.host, place.uuid) == here]


def choose_num_blocks(config: DispatcherConfig, places: list[GpuPlace]) -> list[int]:
    """Blocks of each rank's launches.

    Args:
        config: of the dispatcher.
        places: one per rank.

    Raises:
        ConfigError: ranks share a GPU without allow_shared_device, or num_blocks is more than can be
            resident at once.
    """
    return [_choose(config, places, rank) for rank in range(len(places))]


def _choose(config: DispatcherConfig, places: list[GpuPlace], rank: int) -> int:
    sharing, num_sms = ranks_on_gpu(places, rank), places[rank].num_sms
    if len(sharing) > 1 and not config.allow_shared_device:
        raise ConfigError(
            f"ranks {', '.join(map(str, sharing))} are all on GPU {places[rank].uuid}; give each rank its own GPU "
            "(torch.cuda.set_device), or set allow_shared_device=True for a test under MPS"
        )
    num_resident = len(sharing) * config.num_slots
    if config.num_blocks is None:
        # On a shared GPU the blocks of ranks that wait must leave room for the compute of ranks that have not come yet,
        # also for kernels launched as clusters, which need several free SMs side by side: half of the SMs.
        num_free_sms = num_sms // 2 if len(sharing) > 1 else 4
        # A block without tokens only writes and reads flags.
        num_useful = max(MIN_AUTO_BLOCKS, config.max_tokens_per_rank)
        return max(1, min(MAX_AUTO_BLOCKS, num_useful, (num_sms - num_free_sms) // num_resident))
    if config.num_blocks * num_resident > num_sms:
        raise ConfigError(
            f"num_blocks is {config.num_blocks}: with {len(sharing)} ranks on the GPU of rank {rank} and num_slots = "
            f"{config.num_slots}, {config.num_blocks * num_resident} blocks cannot be resident together on {num_sms} "
            f"SMs; allowed: at most {num_sms // num_resident}"
        )
    return config.num_blocks
