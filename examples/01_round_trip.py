# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""One dispatch and one combine: tokens travel to their experts and come back as a weighted sum.

Run it either way:
    torchrun --nproc-per-node 2 examples/01_round_trip.py
    python examples/01_round_trip.py            (starts its own two ranks)
"""

import os

import torch
import torch.distributed as dist

from mscclpp_dispatcher import Dispatcher, DispatcherConfig

NUM_TOKENS, HIDDEN, NUM_EXPERTS, NUM_TOPK = 5, 64, 8, 2


def main() -> None:
    dist.init_process_group("gloo")  # only to find each other; rows do not travel through it
    rank, num_gpus = dist.get_rank(), torch.cuda.device_count()
    if num_gpus:
        torch.cuda.set_device(rank % num_gpus)
    config = DispatcherConfig(
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=HIDDEN,
        max_tokens_per_rank=16,  # the capacity: equal on all ranks, allocated once
        allow_shared_device=num_gpus < dist.get_world_size(),
    )
    with Dispatcher(config) as dispatcher:
        torch.manual_seed(rank)
        device = dispatcher.device
        x = torch.randn(NUM_TOKENS, HIDDEN).to(device, torch.bfloat16)
        topk_ids = torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(NUM_TOPK).indices.to(device)
        topk_weights = torch.full((NUM_TOKENS, NUM_TOPK), 0.5, device=device)

        recv, handle = dispatcher.dispatch(x, topk_ids, topk_weights)
        # recv.recv_x is [local experts, ranks * capacity, hidden]; row counts are in num_recv_tokens_per_expert.
        scale = torch.tensor([1.0 + expert for expert in dispatcher.local_experts], device=device)
        expert_output = (recv.recv_x * scale[:, None, None]).to(torch.bfloat16)  # expert e multiplies by 1 + e
        out = dispatcher.combine(expert_output, handle)

        expected = x.float() * (1.0 + topk_ids).mul(topk_weights).sum(1, keepdim=True)
        error = ((out.float() - expected).abs().max() / expected.abs().max()).item()
        print(f"rank {rank}: rows per expert {recv.num_recv_tokens_per_expert.tolist()}, relative error {error:.4f}")
        assert error < 0.02  # bfloat16 rounding
    dist.destroy_process_group()


def start(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    main()


if __name__ == "__main__":
    main() if "RANK" in os.environ else torch.multiprocessing.spawn(start, nprocs=2)
