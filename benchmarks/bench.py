# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Times LL dispatch and combine beside a plain copy of the same bytes, after checking the results.

    python benchmarks/bench.py --ranks 2 4 8 --json results.json

On a GPU a CUDA graph of ``--pairs`` dispatch+combine pairs is replayed ``--repeats`` times; a figure is
the median over replays of the slowest rank. ``dispatch_us`` is the time of a pair whose combine is only
the handshake, less half of ``empty_pair_us`` (a pair without rows); ``combine_us`` is the rest of the
pair. With fewer GPUs than ranks the ranks share a GPU (start MPS first: benchmarks/mps.sh); such figures
are bound by that GPU's memory and say nothing about NVLink. On the CPU engine the same cases run smaller
and eager, and dispatch and combine are timed apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from cases import CASES, BenchCase

from mscclpp_dispatcher import CopyPath, Dispatcher, reference
from mscclpp_dispatcher.reference import ScalingExperts, TokenBatch

# Time for the host to enqueue everything that a measurement needs, before the GPU starts on it.
_HEAD_START_CYCLES = 2_000_000


@dataclasses.dataclass(frozen=True)
class Options:
    pairs: int
    repeats: int
    copy_path: CopyPath
    num_blocks: int | None


class Workbench:
    """One rank's tensors for a case, and the operations that are timed."""

    def __init__(self, case: BenchCase, dispatcher: Dispatcher) -> None:
        self.case, self.dispatcher = case, dispatcher
        config, device, rank, num_ranks = dispatcher.config, dispatcher.device, dispatcher.rank, dispatcher.num_ranks
        generator = torch.Generator().manual_seed(1000 + rank)
        # Sums of these are exact in bf16 in any order.
        token, column = torch.arange(case.num_tokens)[:, None], torch.arange(case.hidden)[None]
        x = ((5 * rank + 3 * token + column) % 9 - 4).to(case.payload.dtype)
        ids = torch.stack(
            [torch.randperm(case.num_experts, generator=generator)[: case.num_topk] for _ in range(case.num_tokens)]
        )
        weights = torch.where((token + torch.arange(case.num_topk)[None]) % 2 == 0, 1.0, 0.5)
        batch = TokenBatch(x, ids, weights)
        nothing = TokenBatch(x[:0], ids[:0], weights[:0])
        own_batch_alone = [batch if peer == rank else nothing for peer in range(num_ranks)]
        self.num_bytes_sent = reference.bytes_moved(config, own_batch_alone).dispatch
        self.expected = reference.round_trip(config, num_ranks, batch).to(device)
        self.experts = ScalingExperts(config, dispatcher.local_experts, device)
        self.x, self.ids, self.weights = x.to(device), ids.to(device), weights.to(device)
        self.out = torch.empty_like(self.x)
        output, handle = dispatcher.dispatch(self.x, self.ids, self.weights)
        # The buffer that combine reads in place.
        self.expert_output = self.experts(output, out=dispatcher.expert_output_buffer(handle))
        dispatcher.combine(self.expert_output, handle, self.out)

    def pair(self) -> None:
        _, handle = self.dispatcher.dispatch(self.x, self.ids, self.weights)
        self.dispatcher.combine(self.expert_output, handle, self.out)

    def abandoned_pair(self, num_tokens: int) -> None:
        _, handle = self.dispatcher.dispatch(self.x[:num_tokens], self.ids[:num_tokens], self.weights[:num_tokens])
        self.dispatcher.abandon(handle)

    def check(self) -> None:
        """One full round with the experts, bit-exact."""
        self.out.fill_(float("nan"))
        output, handle = self.dispatcher.dispatch(self.x, self.ids, self.weights)
        self.experts(output, out=self.expert_output)
        self.dispatcher.combine(self.expert_output, handle, self.out)
        self.dispatcher.synchronize()
        if not torch.equal(self.out, self.expected):
            raise AssertionError(f"rank {self.dispatcher.rank}: {self.case.name}: combine is not exact")


def _capture(action, times: int) -> torch.cuda.CUDAGraph:
    action()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            action()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph, options: Options, meet) -> list[float]:
    """Microseconds of each replay on this rank; ``meet`` makes the ranks start together on the device."""
    times = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(options.repeats + 3):
        dist.barrier()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        meet()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times[3:]


def _slowest_median(times: list[float]) -> float:
    gathered = [torch.zeros(len(times), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor(times, dtype=torch.float64))
    return statistics.median(torch.stack(gathered).max(0).values.tolist())


def _measure_cuda(bench: Workbench, options: Options) -> dict[str, float]:
    figures = {}
    graph = _capture(bench.pair, options.pairs)
    figures["pair_us"] = _slowest_median(_replay_us(graph, options, bench.pair)) / options.pairs
    del graph

    # Shares of dispatch and combine: a pair whose combine carries no rows, and one without any rows.
    graph = _capture(lambda: bench.abandoned_pair(bench.case.num_tokens), options.pairs)
    without_combine = _slowest_median(_replay_us(graph, options, bench.pair)) / options.pairs
    graph = _capture(lambda: bench.abandoned_pair(0), options.pairs)
    figures["empty_pair_us"] = _slowest_median(_replay_us(graph, options, bench.pair)) / options.pairs
    figures["dispatch_us"] = without_combine - figures["empty_pair_us"] / 2
    figures["combine_us"] = figures["pair_us"] - figures["dispatch_us"]
    del graph

    num_bytes = bench.num_bytes_sent
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=bench.x.device)
    target = torch.empty_like(source)
    graph = _capture(lambda: target.copy_(source), options.pairs)
    figures["copy_us"] = _slowest_median(_replay_us(graph, options, bench.pair)) / options.pairs

    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(options.pairs):
        bench.pair()
    host_us = (time.perf_counter() - start) * 1e6 / options.pairs
    torch.cuda.synchronize()
    figures["eager_host_us"] = _slowest_median([host_us])
    return figures


def _measure_cpu(bench: Workbench, options: Options) -> dict[str, float]:
    times: dict[str, list[float]] = {"pair_us": [], "dispatch_us": [], "combine_us": [], "copy_us": []}
    source = torch.ones(bench.num_bytes_sent, dtype=torch.uint8)
    target = torch.empty_like(source)
    for _ in range(options.repeats):
        dist.barrier()
        begin = time.perf_counter()
        _, handle = bench.dispatcher.dispatch(bench.x, bench.ids, bench.weights)
        middle = time.perf_counter()
        bench.dispatcher.combine(bench.expert_output, handle, bench.out)
        end = time.perf_counter()
        target.copy_(source)
        copied = time.perf_counter()
        for name, seconds in zip(times, (end - begin, middle - begin, end - middle, copied - end), strict=True):
            times[name].append(seconds * 1e6)
    return {name: _slowest_median(values) for name, values in times.items()}


def _run_rank(rank: int, num_ranks: int, store: str, cases: list[BenchCase], options: Options, queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    is_cuda = torch.cuda.is_available()
    settings: dict[str, object] = {"timeout_s": 30.0, "copy_path": options.copy_path, "num_blocks": options.num_blocks}
    if is_cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        settings["allow_shared_device"] = num_ranks > torch.cuda.device_count()
        if options.num_blocks is None and settings.get("allow_shared_device"):
            # Nothing but these kernels runs here, so they may take all SMs but a few.
            num_sms = torch.cuda.get_device_properties(rank % torch.cuda.device_count()).multi_processor_count
            settings["num_blocks"] = (num_sms - 4) * torch.cuda.device_count() // num_ranks
    for original in cases:
        case = original if is_cuda else original.scaled_for_cpu()
        with Dispatcher(case.config(**settings)) as dispatcher:
            bench = Workbench(case, dispatcher)
            bench.check()
            figures = (_measure_cuda if is_cuda else _measure_cpu)(bench, options)
            bench.check()
            num_bytes = _slowest_median([float(bench.num_bytes_sent)])
            if rank == 0:
                queue.put(
                    {
                        "case": case.name,
                        "num_ranks": num_ranks,
                        "shape": {
                            "num_tokens": case.num_tokens,
                            "hidden": case.hidden,
                            "num_topk": case.num_topk,
                            "num_experts": case.num_experts,
                            "payload": case.payload.value,
                        },
                        "bytes_each_way_per_rank": int(num_bytes),
                        "region_bytes": dispatcher.buffer_sizes()["total"],
                        **{name: round(value, 2) for name, value in figures.items()},
                    }
                )
            dist.barrier()
    dist.destroy_process_group()


def _machine(commit: str | None, arguments: str) -> dict[str, object]:
    is_cuda = torch.cuda.is_available()
    if commit is None:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = git.stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if is_cuda else platform.processor() or platform.machine(),
        "num_devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "commit": commit or "unknown",
        "command": f"benchmarks/bench.py {arguments}",
    }


def _print_table(results: list[dict]) -> None:
    print(
        f"{'case':<30}{'R':>3}{'pair us':>10}{'dispatch':>10}{'combine':>10}{'copy':>8}{'pair/2copies':>14}"
        f"{'host us':>9}"
    )
    for result in results:
        ratio = result["pair_us"] / (2 * result["copy_us"])
        host = f"{result['eager_host_us']:.1f}" if "eager_host_us" in result else "-"
        print(
            f"{result['case']:<30}{result['num_ranks']:>3}{result['pair_us']:>10.1f}{result['dispatch_us']:>10.1f}"
            f"{result['combine_us']:>10.1f}{result['copy_us']:>8.1f}{ratio:>14.2f}{host:>9}"
        )


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--cases", nargs="*", help="names of cases; default all")
    parser.add_argument("--pairs", type=int, default=20, help="pairs per graph")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--copy-path", choices=[path.value for path in CopyPath], default=CopyPath.AUTO.value)
    parser.add_argument("--num-blocks", type=int, help="of each kernel; default: the engine's choice, or all SMs")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--commit", help="of the measured tree, where git cannot tell")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.cases or case.name in args.cases]
    if not cases:
        parser.error(f"no such case; allowed: {', '.join(case.name for case in CASES)}")
    options = Options(args.pairs, args.repeats, CopyPath(args.copy_path), args.num_blocks)
    results = []
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as directory:
            queue = mp.get_context("spawn").SimpleQueue()
            arguments = (num_ranks, f"{directory}/store", cases, options, queue)
            mp.spawn(_run_rank, arguments, nprocs=num_ranks)
            while not queue.empty():
                results.append(queue.get())
    if torch.cuda.is_available() and torch.cuda.device_count() < max(args.ranks):
        print("several ranks share one GPU: figures are bound by its memory, they are not NVLink figures")
    _print_table(results)
    if args.json:
        given = {
            name: value for name, value in vars(args).items() if name not in ("json", "commit") and value is not None
        }
        arguments = " ".join(f"--{name.replace('_', '-')} {_words(value)}" for name, value in given.items())
        args.json.write_text(json.dumps({**_machine(args.commit, arguments), "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
