# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Dispatch, experts and combine captured in one CUDA graph and replayed with new inputs.

Every replay is a round of its own: nothing is counted on the host, so ranks may replay at their own
pace. Without a GPU the same step runs eagerly.
    torchrun --nproc-per-node 2 examples/02_cuda_graph.py
    python examples/02_cuda_graph.py            (starts its own two ranks)
"""

import os

import torch
import torch.distributed as dist

from mscclpp_dispatcher import Dispatcher, DispatcherConfig

NUM_TOKENS, HIDDEN, NUM_EXPERTS, NUM_TOPK, NUM_REPLAYS = 4, 64, 8, 2, 20


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_gpus = dist.get_rank(), torch.cuda.device_count()
    if num_gpus:
        torch.cuda.set_device(rank % num_gpus)
    config = DispatcherConfig(
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=HIDDEN,
        max_tokens_per_rank=NUM_TOKENS,
        allow_shared_device=num_gpus < dist.get_world_size(),
    )
    with Dispatcher(config) as dispatcher:  # made before any capture: it allocates everything
        device = dispatcher.device
        x = torch.zeros(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)  # static inputs of the graph
        topk_ids = torch.zeros(NUM_TOKENS, NUM_TOPK, dtype=torch.int64, device=device)
        out = torch.empty_like(x)

        def step() -> None:
            recv, handle = dispatcher.dispatch(x, topk_ids)
            dispatcher.combine(recv.recv_x * 2, handle, out=out)

        replay = step
        if dispatcher.capabilities.is_capturable:
            step()  # warm-up: a real round, so every rank makes it
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # recorded only: nothing is sent
                step()
            replay = graph.replay
        for round_idx in range(NUM_REPLAYS):
            x.fill_(rank + round_idx)
            topk_ids.copy_(torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(NUM_TOPK).indices)
            replay()
            assert (out == 2 * NUM_TOPK * (rank + round_idx)).all(), f"rank {rank}, round {round_idx}"
        dispatcher.synchronize()  # raises what a kernel reported, such as a bad id
        print(f"rank {rank}: {NUM_REPLAYS} rounds exact, {'replayed' if replay is not step else 'eager'} on {device}")
    dist.destroy_process_group()


def start(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    main()


if __name__ == "__main__":
    main() if "RANK" in os.environ else torch.multiprocessing.spawn(start, nprocs=2)
