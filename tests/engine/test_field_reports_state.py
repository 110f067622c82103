# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Faults that users of expert parallelism have reported: order, handles, overlap, streams and life cycle."""

from __future__ import annotations

import gc
import os
import pathlib
import random
import time

import checks
import pytest
import torch
from cases import PATHS, Case, each_variant
from launcher import DEVICE_TYPE, Rank, segments_of

from mscclpp_dispatcher import CapacityError, Dispatcher, DispatcherConfig, HandleError, reference
from mscclpp_dispatcher.reference import ScalingExperts, TokenBatch

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


# ---------------------------------------------------------------------- ranks that run ahead


def _late_rank(context: Rank, case: Case) -> None:
    rounds = [case.batches(round_idx)[context.rank] for round_idx in range(case.num_rounds)]

    def delay(round_idx: int) -> None:
        if context.rank == 0 and round_idx % 10 == 9:
            if context.device.type == "cuda":
                torch.cuda._sleep(10_000_000)
            else:
                time.sleep(0.005)

    checks.run_unsynchronized(context, case.config(), rounds, delay)


@pytest.mark.parametrize("variant", PATHS)
def test_b05_ranks_that_receive_nothing_run_ahead(run_ranks, variant: str):
    """A rank that received nothing overwrote buffers that a peer had not read."""
    (case,) = each_variant(
        "B05", (variant,), num_tokens=(4,) * 4, num_topk=2, num_experts=8, routing="not_last_rank", num_rounds=200
    )
    run_ranks(4, _late_rank, case)


def _random_delays(context: Rank, case: Case, seed: int) -> None:
    rounds = [case.batches(round_idx)[context.rank] for round_idx in range(case.num_rounds)]
    chance = random.Random(seed + context.rank)

    def delay(_: int) -> None:
        if chance.random() < 0.05:
            if context.device.type == "cuda":
                torch.cuda._sleep(chance.randrange(1_000_000))
            else:
                time.sleep(0.002 * chance.random())

    checks.run_unsynchronized(context, case.config(), rounds, delay)


@pytest.mark.parametrize("capacity", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_b31_many_rounds_of_one_token(run_ranks, num_ranks: int, capacity: int):
    """Blocks took the round's number from memory that another block was changing; some waited for ever."""
    num_rounds = 2000 if DEVICE_TYPE == "cuda" else 400 // num_ranks
    for case in each_variant("B31", PATHS, num_tokens=(capacity,) * num_ranks, num_rounds=num_rounds):
        run_ranks(num_ranks, _random_delays, case, 31, limit_s=40)


# ---------------------------------------------------------------------- streams


def _three_streams(context: Rank, case: Case) -> None:
    config = case.config()
    rounds = [case.batches(round_idx)[context.rank] for round_idx in range(case.num_rounds)]
    stream_a, stream_b = torch.cuda.Stream(), torch.cuda.Stream()
    with context.dispatcher(config) as dispatcher:
        experts = ScalingExperts(config, dispatcher.local_experts, dispatcher.device)
        inputs = [checks.to_device(batch, dispatcher.device) for batch in rounds]
        torch.cuda.synchronize()
        outs = []
        for x, ids, weights in inputs:
            with torch.cuda.stream(stream_a):
                output, handle = dispatcher.dispatch(x, ids, weights)
            stream_b.wait_stream(stream_a)
            with torch.cuda.stream(stream_b):
                torch.cuda._sleep(100_000)
                rows = experts(output)
            stream_a.wait_stream(stream_b)
            with torch.cuda.stream(stream_a):
                rows.record_stream(stream_a)
                outs.append(dispatcher.combine(rows, handle))
        dispatcher.synchronize()
        for round_idx, (out, batch) in enumerate(zip(outs, rounds, strict=True)):
            checks.assert_equal(f"out of round {round_idx}", out, reference.round_trip(config, 2, batch))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE_TYPE != "cuda", reason="streams are CUDA's")
@pytest.mark.parametrize("variant", PATHS)
def test_b33_experts_on_another_stream(run_ranks, variant: str):
    """Launches went to a stream that was not the caller's, and finished events fired early."""
    (case,) = each_variant("B33", (variant,), num_tokens=(8, 5), num_rounds=500)
    run_ranks(2, _three_streams, case, limit_s=30)


# ---------------------------------------------------------------------- several dispatches in flight


def _overlap_on_one_object(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as dispatcher:
        experts = ScalingExperts(dispatcher.config, dispatcher.local_experts, dispatcher.device)
        for round_idx in range(0, case.num_rounds, 2):
            trips = [
                checks.RoundTrip(context=context, dispatcher=dispatcher, batches=case.batches(round_idx + i))
                for i in range(2)
            ]
            for trip in trips:
                trip.dispatch()
            third = checks.to_device(trips[0].batch, dispatcher.device)
            with pytest.raises(CapacityError, match=r"num_slots = 2"):
                dispatcher.dispatch(*third)
            for trip in trips if round_idx % 4 == 0 else trips[::-1]:
                trip.receive()
                trip.combine(experts)


@pytest.mark.parametrize("variant", PATHS)
def test_b40_two_batches_in_flight(run_ranks, variant: str):
    """Clearing the next buffer wiped the flags of the batch in flight."""
    (case,) = each_variant("B40", (variant,), num_tokens=(8, 8), num_in_flight=2, num_rounds=12)
    run_ranks(2, _overlap_on_one_object, case)


def _overlap_of_two_objects(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as first, context.dispatcher(case.config()) as second:
        for round_idx in range(0, case.num_rounds, 2):
            trips = [
                checks.RoundTrip(context=context, dispatcher=dispatcher, batches=case.batches(round_idx + i))
                for i, dispatcher in enumerate((first, second))
            ]
            for trip in trips:
                trip.dispatch()
            for trip in trips:
                trip.receive()
            for trip in trips:
                trip.combine(ScalingExperts(case.config(), first.local_experts, first.device))


@pytest.mark.parametrize("variant", PATHS)
def test_b40_two_objects_of_one_group(run_ranks, variant: str):
    (case,) = each_variant("B40", (variant,), num_tokens=(8, 8), num_rounds=12, data="tagged")
    run_ranks(2, _overlap_of_two_objects, case)


def _beyond_the_slots(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as dispatcher:
        experts = ScalingExperts(dispatcher.config, dispatcher.local_experts, dispatcher.device)
        for round_idx in range(3):
            trip = checks.RoundTrip(context=context, dispatcher=dispatcher, batches=case.batches(round_idx))
            trip.dispatch()
            with pytest.raises(CapacityError, match=r"dispatch called while .* not combined.*num_slots = 1"):
                dispatcher.dispatch_send(*checks.to_device(trip.batch, dispatcher.device))
            trip.receive()
            trip.combine(experts)


@pytest.mark.parametrize("variant", PATHS)
def test_b40_dispatch_beyond_the_slots(run_ranks, variant: str):
    (case,) = each_variant("B40", (variant,), num_tokens=(8, 8))
    run_ranks(2, _beyond_the_slots, case)


# ---------------------------------------------------------------------- handles


def _wrong_handles(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as first, context.dispatcher(case.config()) as second:
        experts = ScalingExperts(case.config(), first.local_experts, first.device)
        trips = [
            checks.RoundTrip(context=context, dispatcher=dispatcher, batches=case.batches(i))
            for i, dispatcher in enumerate((first, second))
        ]
        for trip in trips:
            trip.dispatch()
        rows = [experts(trip.output) for trip in trips]
        with pytest.raises(HandleError, match="handle is None"):
            first.combine(rows[0], None)
        for i, dispatcher in enumerate((second, first)):
            with pytest.raises(HandleError, match="belongs to another dispatcher"):
                dispatcher.combine(rows[i], trips[i].handle)
        for trip in trips:
            trip.receive()
            trip.combine(experts)
        for i, dispatcher in enumerate((first, second)):
            with pytest.raises(HandleError, match="is consumed"):
                dispatcher.combine(rows[i], trips[i].handle)
        checks.run_round(context, first, case.batches(2))
        with pytest.raises(HandleError, match="is consumed"):  # the slot serves another dispatch by now
            first.combine(rows[0], trips[0].handle)
        checks.run_round(context, second, case.batches(3))


@pytest.mark.parametrize("variant", PATHS)
def test_b41_wrong_handles(run_ranks, variant: str):
    """Handles that were empty, stale or another object's were taken."""
    (case,) = each_variant("B41", (variant,), num_tokens=(5, 8))
    run_ranks(2, _wrong_handles, case)


def _two_routings(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as dispatcher:
        experts = ScalingExperts(dispatcher.config, dispatcher.local_experts, dispatcher.device)
        for round_idx in range(0, 6, 2):
            trips = [
                checks.RoundTrip(
                    context=context, dispatcher=dispatcher, batches=case.batches(round_idx + i), is_split=True
                )
                for i in range(2)
            ]
            trips[0].dispatch()
            trips[1].dispatch()
            for trip in reversed(trips):
                trip.receive()
            for trip in trips:
                trip.combine(experts)


@pytest.mark.parametrize("variant", PATHS)
def test_b41_second_dispatch_keeps_the_routing_of_the_first(run_ranks, variant: str):
    """Preparing batch B overwrote batch A's routing."""
    (case,) = each_variant("B41", (variant,), num_tokens=(5, 8), num_in_flight=2, routing="repeated")
    run_ranks(2, _two_routings, case)


# ---------------------------------------------------------------------- life cycle


def _alternate(context: Rank, cases: list[Case]) -> None:
    dispatchers = [context.dispatcher(case.config()) for case in cases]
    for round_idx in range(10):
        for case, dispatcher in zip(cases, dispatchers, strict=True):
            checks.run_round(context, dispatcher, case.batches(round_idx))
    for dispatcher in dispatchers if context.rank == 0 else reversed(dispatchers):
        dispatcher.destroy()


def test_b46_objects_of_unlike_layout_in_one_process(run_ranks):
    """Two objects in one process collided in the names of their shared segments."""
    cases = each_variant("B46", PATHS, num_tokens=(8, 3), data="tagged")
    run_ranks(2, _alternate, cases)


def _two_jobs(context: Rank, case: Case) -> None:
    """Ranks 0, 1 are one job and ranks 2, 3 another."""
    job, rank = divmod(context.rank, 2)
    group = context.group(f"job{job}", rank=rank, num_ranks=2)
    inner = Rank(rank, 2, context.device, context.store)
    with Dispatcher(case.config(), group, device=context.device) as dispatcher:
        for round_idx in range(10):
            checks.run_round(inner, dispatcher, case.batches(round_idx + 20 * job))


@pytest.mark.skipif(DEVICE_TYPE == "cuda", reason="the CUDA engine needs a ProcessGroup")
@pytest.mark.parametrize("variant", PATHS)
def test_b46_two_jobs_on_one_host(run_ranks, variant: str):
    (case,) = each_variant("B46", (variant,), num_tokens=(8, 3), data="tagged")
    run_ranks(4, _two_jobs, case)


def _resident_bytes() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _num_open_files() -> int:
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def _num_mappings() -> int:
    return pathlib.Path("/proc/self/maps").read_text().count("mscclpp_dispatcher")


def _create_and_destroy(context: Rank, config: DispatcherConfig, num_cycles: int, max_delay_s: float) -> None:
    chance = random.Random(context.rank)
    before = None
    for cycle in range(num_cycles):
        if cycle == 3:  # allocators have reached their size
            gc.collect()
            before = _num_open_files(), _num_mappings(), _resident_bytes()
        time.sleep(chance.random() * max_delay_s)
        dispatcher = context.dispatcher(config)
        ids = torch.tensor([[0, 1], [1, 2]])
        batches = [
            TokenBatch(torch.full((2, config.hidden), float(rank + cycle % 4), dtype=torch.bfloat16), ids)
            for rank in range(context.num_ranks)
        ]
        checks.run_round(context, dispatcher, batches)
        time.sleep(chance.random() * max_delay_s)
        dispatcher.destroy()
    context.barrier()
    gc.collect()
    if context.device.type == "cpu":
        after = _num_open_files(), _num_mappings(), _resident_bytes()
        assert after[0] == before[0], f"open files: {before[0]} before, {after[0]} after"
        assert after[1] == before[1], f"mapped segments: {before[1]} before, {after[1]} after"
        assert after[2] < before[2] + (16 << 20), f"resident bytes: {before[2]} before, {after[2]} after"
        assert not segments_of([os.getpid()])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_b46_create_and_destroy_at_unlike_speed(run_ranks):
    """Memory was freed while peers still had it mapped, and leaked from each object."""
    num_cycles = 10 if DEVICE_TYPE == "cuda" else 50
    config = DispatcherConfig(num_experts=4, num_topk=2, hidden=1024, max_tokens_per_rank=128)
    run_ranks(2, _create_and_destroy, config, num_cycles, 0.2, limit_s=60)
