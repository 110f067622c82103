# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Captured round trips: each replay is exact on new tokens, routes and numbers of tokens.

MSCCLPP_DISPATCHER_TEST_REPLAYS sets the length of the long runs (default 500 replays).
"""

from __future__ import annotations

import dataclasses
import os

import checks
import pytest
import torch
from cases import PATHS, VARIANTS, exact_rows
from launcher import Rank
from replays import StaticTrips, delay, make_batch

from mscclpp_dispatcher import ConfigError, DispatcherConfig, reference
from mscclpp_dispatcher.reference import ScalingExperts, TokenBatch

pytestmark = [pytest.mark.gpu]

NUM_REPLAYS = int(os.environ.get("MSCCLPP_DISPATCHER_TEST_REPLAYS", "500"))
LIMIT_S = 60.0
TOKENS = (8, 3, 0, 5, 8, 1, 7, 2)  # of rank 0, 1, ...


def make_config(variant: str, num_ranks: int, **settings: object) -> DispatcherConfig:
    defaults: dict[str, object] = {
        "num_experts": 4 * num_ranks + 1,
        "num_topk": 4,
        "hidden": 512,
        "max_tokens_per_rank": 8,
    }
    return DispatcherConfig(**{**defaults, **VARIANTS[variant], **settings})


def ranks_and_paths():
    return pytest.mark.parametrize(
        ("num_ranks", "variant"), [(num_ranks, variant) for num_ranks in (2, 4, 8) for variant in PATHS]
    )


# ---------------------------------------------------------------------- replays


def _replay(context: Rank, config: DispatcherConfig, num_trips: int, num_rounds: int, options: dict) -> None:
    with context.dispatcher(config) as dispatcher:
        trips = StaticTrips(context, dispatcher, TOKENS[: context.num_ranks], num_trips, **options)
        replay = trips.record()
        for round_idx in range(1, num_rounds + 1):
            trips.load(round_idx)
            delay(context, round_idx)
            replay()
            trips.check()
        num_trips_done = (num_rounds + 1) * num_trips
        num_slots = config.num_slots
        epochs = [dispatcher.epoch(slot) for slot in range(num_slots)]
        assert epochs == [(config.first_epoch + num_trips_done // num_slots) % 2**32] * num_slots


@ranks_and_paths()
@pytest.mark.parametrize("num_trips", [1, 2])
def test_replays(run_ranks, num_ranks: int, variant: str, num_trips: int):
    run_ranks(num_ranks, _replay, make_config(variant, num_ranks), num_trips, 12, {}, limit_s=LIMIT_S)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(("num_trips", "num_rounds"), [(7, 6), (61, 3)])
@pytest.mark.parametrize("variant", ["expert_reduce", "rank_reduce_runner"])
def test_many_layers_in_one_graph(run_ranks, num_ranks: int, num_trips: int, num_rounds: int, variant: str):
    config = make_config(variant, num_ranks)
    run_ranks(num_ranks, _replay, config, num_trips, num_rounds, {}, limit_s=LIMIT_S)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weight_modes(run_ranks, variant: str):
    run_ranks(2, _replay, make_config(variant, 2), 3, 4, {}, limit_s=LIMIT_S)


@pytest.mark.parametrize("variant", PATHS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("split", {"is_split": True}),
        ("in_place", {"is_in_place": True}),
        ("two_in_flight", {"num_in_flight": 2}),
        ("two_in_flight_split", {"num_in_flight": 2, "is_split": True, "is_in_place": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_halves_buffers_and_slots(run_ranks, variant: str, name: str, options: dict):
    config = make_config(variant, 4, num_slots=options.get("num_in_flight", 1))
    run_ranks(4, _replay, config, 4, 6, options, limit_s=LIMIT_S)


@ranks_and_paths()
def test_epoch_wraps_in_replays(run_ranks, num_ranks: int, variant: str):
    config = make_config(variant, num_ranks, first_epoch=2**32 - 5)
    run_ranks(num_ranks, _replay, config, 2, 6, {}, limit_s=LIMIT_S)


# ---------------------------------------------------------------------- graphs and eager calls mixed


def _interleave(context: Rank, config: DispatcherConfig, schedule: str) -> None:
    with context.dispatcher(config) as dispatcher:
        tokens = TOKENS[: context.num_ranks]
        one, two, eager = (StaticTrips(context, dispatcher, tokens, num_trips) for num_trips in (1, 2, 1))
        launches = {"A": (one, one.record()), "B": (two, two.record()), "e": (eager, eager.launch)}
        for round_idx, name in enumerate(schedule):
            trips, launch = launches[name]
            trips.load(100 + round_idx)
            delay(context, round_idx)
            launch()
            trips.check()


@ranks_and_paths()
def test_two_graphs_and_eager_calls(run_ranks, num_ranks: int, variant: str):
    config = make_config(variant, num_ranks, first_epoch=2**32 - 9)
    run_ranks(num_ranks, _interleave, config, "ABeBAeeABBAAe", limit_s=LIMIT_S)


def _one_eager(context: Rank, config: DispatcherConfig, num_trips: int) -> None:
    with context.dispatcher(config) as dispatcher:
        trips = StaticTrips(context, dispatcher, TOKENS[: context.num_ranks], num_trips)
        replay = trips.record()
        for round_idx in range(1, 2 * context.num_ranks + 1):
            trips.load(round_idx)
            delay(context, round_idx // 2)
            if round_idx % context.num_ranks == context.rank:
                trips.launch()
            else:
                replay()
            trips.check()


@ranks_and_paths()
def test_one_rank_is_eager_while_the_others_replay(run_ranks, num_ranks: int, variant: str):
    run_ranks(num_ranks, _one_eager, make_config(variant, num_ranks), 3, limit_s=LIMIT_S)


def _replay_without_waiting(context: Rank, config: DispatcherConfig, num_rounds: int) -> None:
    """Several rounds are queued at once, each with its own captured tensors, one rank late in turn."""
    with context.dispatcher(config) as dispatcher:
        all_trips = [StaticTrips(context, dispatcher, TOKENS[: context.num_ranks], 1) for _ in range(num_rounds)]
        replays = [trips.record() for trips in all_trips]
        for turn in range(2):
            for round_idx, trips in enumerate(all_trips):
                trips.load(turn, round_idx)
            for round_idx, replay in enumerate(replays):
                delay(context, round_idx)
                replay()
            for trips in all_trips:
                trips.check()


@ranks_and_paths()
def test_replays_queued_behind_a_late_rank(run_ranks, num_ranks: int, variant: str):
    run_ranks(num_ranks, _replay_without_waiting, make_config(variant, num_ranks), 8, limit_s=LIMIT_S)


# ---------------------------------------------------------------------- long runs


def _generate(static: TokenBatch, rank: int, step: int, num_experts: int, generator: torch.Generator) -> None:
    """New exact tokens, routes and a number of tokens, all made on the device."""
    num_tokens, num_topk = static.topk_ids.shape
    device = static.x.device
    static.x.copy_(exact_rows(rank, num_tokens, static.x.shape[1], step, device))
    order = torch.rand((num_tokens, num_experts), device=device, generator=generator).argsort(dim=1)
    is_masked = torch.rand((num_tokens, num_topk), device=device, generator=generator) < 0.2
    num_live = torch.randint(num_tokens + 1, (1,), device=device, generator=generator)
    is_padding = torch.arange(num_tokens, device=device) >= num_live
    static.topk_ids.copy_(torch.where(is_masked | is_padding[:, None], -1, order[:, :num_topk]))
    is_whole = torch.rand((num_tokens, num_topk), device=device, generator=generator) < 0.5
    static.topk_weights.copy_(torch.where(is_whole, 1.0, 0.5))


def _expected(static: TokenBatch) -> torch.Tensor:
    """Profile X is exact in any order, so one product gives the bits."""
    factors = torch.where(static.topk_ids >= 0, static.topk_weights * (1 + static.topk_ids % 2), 0.0)
    return (factors.sum(dim=1, keepdim=True) * static.x.float()).to(static.x.dtype)


def _long_run(context: Rank, config: DispatcherConfig, num_trips: int, num_replays: int) -> tuple[int, int]:
    """Unequal elements over all replays, and elements compared."""
    with context.dispatcher(config) as dispatcher:
        device = dispatcher.device
        generator = torch.Generator(device).manual_seed(context.rank)
        trips = StaticTrips(context, dispatcher, (8,) * context.num_ranks, num_trips)
        replay = trips.record()
        num_unlike = torch.zeros((), dtype=torch.int64, device=device)
        num_nonzero = torch.zeros((), dtype=torch.int64, device=device)
        for step in range(num_replays):
            for static in trips.inputs:
                _generate(static, context.rank, step, config.num_experts, generator)
            if step % 5 == 0:
                delay(context, step // 5, 100_000)
            replay()
            for static, out in zip(trips.inputs, trips.outs, strict=True):
                expected = _expected(static)
                num_unlike += (out != expected).sum()
                num_nonzero += (expected != 0).sum()
                out.fill_(float("nan"))
        dispatcher.synchronize()
        return int(num_unlike), int(num_nonzero)


@pytest.mark.slow
@ranks_and_paths()
def test_long_replay(run_ranks, num_ranks: int, variant: str):
    config = make_config(variant, num_ranks, first_epoch=2**32 - 100)
    results = run_ranks(num_ranks, _long_run, config, 1, NUM_REPLAYS, limit_s=30 + 0.1 * NUM_REPLAYS)
    assert [num_unlike for num_unlike, _ in results] == [0] * num_ranks
    assert all(num_nonzero > NUM_REPLAYS * config.hidden for _, num_nonzero in results)


# ---------------------------------------------------------------------- field reports


def _padded_replays(context: Rank, config: DispatcherConfig) -> tuple[list[int], list[int]]:
    """Rows received when padding has a valid id of weight 0, and when it has -1."""
    received: tuple[list[int], list[int]] = ([], [])
    with context.dispatcher(config) as dispatcher:
        trips = StaticTrips(context, dispatcher, (8,) * context.num_ranks, 1)
        replay = trips.record()
        for round_idx in range(4):
            kept = []
            for kind in range(2):
                batches = [make_batch(config, 8, 8, 10, round_idx, rank) for rank in range(context.num_ranks)]
                for batch in batches:
                    batch.topk_ids[3:] = -1 if kind else 7
                    batch.topk_weights[3:] = 0.0
                trips.set_batches(batches)
                replay()
                trips.check()
                kept.append(trips.outs[0].clone())
                received[kind].append(trips.num_received_rows())
                moved = reference.bytes_moved(config, batches).dispatch // config.row_bytes
                received[kind].append(moved)
            checks.assert_equal("rows 0..2", kept[0][:3], kept[1][:3])
    return received


@pytest.mark.parametrize("variant", PATHS)
def test_b10_padding_slots_in_a_graph(run_ranks, variant: str):
    """Padded slots held garbage ids with weight 0. Either way the real rows are exact; -1 sends nothing."""
    results = run_ranks(2, _padded_replays, make_config(variant, 2, num_experts=16), limit_s=LIMIT_S)
    for kind in range(2):
        for i in range(0, 8, 2):
            assert sum(received[kind][i] for received in results) == results[0][kind][i + 1]
    assert all(with_id > without for with_id, without in zip(results[0][0][1::2], results[0][1][1::2], strict=True))


def _replay_equals_eager(context: Rank, config: DispatcherConfig, num_trips: int) -> None:
    counts = [(8, 8), (3, 8), (0, 5), (8, 0), (1, 1), (0, 0), (5, 2), (8, 7), (2, 8), (0, 1), (4, 4), (8, 8)]
    with context.dispatcher(config) as dispatcher, context.dispatcher(config) as other:
        captured = StaticTrips(context, dispatcher, (8, 8), num_trips)
        eager = StaticTrips(context, other, (8, 8), num_trips)
        replay = captured.record()
        for round_idx, live in enumerate(counts):
            for trips, launch in ((captured, replay), (eager, eager.launch)):
                trips.load(42, round_idx, num_live=lambda rank, trip_idx: live[(rank + trip_idx) % 2])  # noqa: B023
                launch()
                trips.check()
            for trip_idx in range(num_trips):
                checks.assert_equal(f"trip {trip_idx}", captured.outs[trip_idx], eager.outs[trip_idx])


@pytest.mark.parametrize("num_trips", [1, 2])
@pytest.mark.parametrize("variant", PATHS)
def test_b42_replays_equal_eager(run_ranks, variant: str, num_trips: int):
    """A replay reused the round's number and took old flags for new ones."""
    run_ranks(2, _replay_equals_eager, make_config(variant, 2), num_trips, limit_s=LIMIT_S)


def _graphs_by_batch_size(context: Rank, config: DispatcherConfig) -> None:
    with context.dispatcher(config) as dispatcher:
        by_size = {
            size: StaticTrips(context, dispatcher, (size,) * context.num_ranks, 1, active=size) for size in (1, 2, 4, 8)
        }
        replays = {size: trips.record() for size, trips in by_size.items()}
        for round_idx, size in enumerate((8, 1, 4, 1, 2, 8, "eager", 1)):
            if size == "eager":
                trips = StaticTrips(context, dispatcher, (3,) * context.num_ranks, 1, active=5)
                launch = trips.launch
            else:
                trips, launch = by_size[size], replays[size]
            trips.load(43, round_idx)
            launch()
            trips.check()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("variant", PATHS)
def test_b43_graphs_of_several_batch_sizes(run_ranks, num_ranks: int, variant: str):
    """Several graphs over one buffer, each with its batch size as capacity, gave wrong counts."""
    run_ranks(num_ranks, _graphs_by_batch_size, make_config(variant, num_ranks), limit_s=LIMIT_S)


def _made_in_a_capture(context: Rank, config: DispatcherConfig) -> None:
    graph = torch.cuda.CUDAGraph()
    value = torch.zeros(1, device=context.device)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        value += 1
        with pytest.raises(ConfigError, match="inside a CUDA graph capture; make it before"):
            context.dispatcher(config)
    graph.replay()  # the capture was not invalidated
    assert value.item() == 1
    with context.dispatcher(config) as dispatcher:  # its first call is captured
        experts = ScalingExperts(config, dispatcher.local_experts, dispatcher.device)
        batches = [make_batch(config, 8, 8, 44, rank) for rank in range(context.num_ranks)]
        static = dataclasses.replace(
            batches[context.rank],
            **{
                field.name: getattr(batches[context.rank], field.name).to(context.device)
                for field in dataclasses.fields(TokenBatch)
            },
        )
        out = torch.empty_like(static.x)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            output, handle = dispatcher.dispatch(static.x, static.topk_ids, static.topk_weights)
            dispatcher.combine(experts(output), handle, out)
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            dispatcher.synchronize()
            checks.assert_equal("out", out, reference.round_trip(config, context.num_ranks, batches[context.rank]))


@pytest.mark.parametrize("variant", PATHS)
def test_b44_first_use_in_a_capture(run_ranks, variant: str):
    """The first use, inside a capture, allocated and synchronised, and failed with an unrelated message."""
    run_ranks(2, _made_in_a_capture, make_config(variant, 2), limit_s=LIMIT_S)
