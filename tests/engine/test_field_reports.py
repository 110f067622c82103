# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Faults that users of expert parallelism have reported: tokens, ids, shapes and capacity.

The numbers are those of the project's list of field reports; each test's docstring says what went
wrong there. Where the report concerns another engine, its input is given to this one.
"""

from __future__ import annotations

import dataclasses

import checks
import pytest
import torch
from cases import (
    EXPERT_MAJOR,
    PATHS,
    RANK_MAJOR,
    Case,
    each_variant,
    exact_rows,
    exact_weights,
)
from launcher import Rank

from mscclpp_dispatcher import CapacityError, ConfigError, DispatcherConfig, InputError, PeerTimeoutError, reference
from mscclpp_dispatcher.reference import ScalingExperts, TokenBatch

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]

RANK_PATHS = ("rank_reduce_runner", "rank_direct")
BF16 = torch.bfloat16


def exact_batch(rank: int, ids: torch.Tensor, hidden: int, round_idx: int = 0) -> TokenBatch:
    """Profile X with the given ids."""
    x = exact_rows(rank, ids.shape[0], hidden, round_idx).to(BF16)
    return TokenBatch(x, ids, exact_weights(*ids.shape))


def case_tests(cases: list[Case]):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


# ---------------------------------------------------------------------- idle and empty ranks


@case_tests(
    each_variant(
        "B01", PATHS, num_tokens=(8, 0, 0, 3), hidden=2048, num_topk=8, num_experts=32, data="exact", num_rounds=4
    )
)
def test_b01_ranks_without_tokens(run_ranks, case: Case):
    """A rank with an empty batch made the exchange fail."""
    run_ranks(case.num_ranks, checks.run_case, case)


def _null_pointers(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as dispatcher:
        device = dispatcher.device
        for round_idx in range(3):
            batch = case.batches(round_idx)[context.rank]
            arguments = checks.to_device(batch, device)
            if batch.num_tokens == 0:
                arguments = (
                    torch.empty((0, case.hidden), dtype=BF16, device=device),
                    torch.empty((0, case.num_topk), dtype=torch.int64, device=device),
                    torch.empty((0, case.num_topk), dtype=torch.float32, device=device),
                )
                assert all(tensor.data_ptr() == 0 for tensor in arguments)
            output, handle = dispatcher.dispatch(*arguments)
            experts = ScalingExperts(dispatcher.config, dispatcher.local_experts, device)
            out = dispatcher.combine(experts(output), handle)
            dispatcher.synchronize()
            assert tuple(out.shape) == (batch.num_tokens, case.hidden)
            checks.assert_equal("out", out, reference.round_trip(case.config(), case.num_ranks, batch))


@case_tests(each_variant("B01", PATHS, num_tokens=(3, 0), id_dtype=torch.int64))
def test_b01_null_pointers_of_empty_tensors(run_ranks, case: Case):
    run_ranks(case.num_ranks, _null_pointers, case)


@case_tests(
    each_variant(
        "B02",
        ("expert_reduce", "rank_reduce_runner"),
        num_tokens=(0, *[17] * 7),
        hidden=4096,
        num_topk=8,
        num_experts=64,
        data="exact",
        num_rounds=8,
        limit_s=60,
    )
)
def test_b02_each_rank_idle_in_turn(run_ranks, case: Case):
    """A rank with no tokens skipped the exchange of counts; the others waited for ever."""
    run_ranks(case.num_ranks, checks.run_case, case, limit_s=case.limit_s)


@case_tests(
    each_variant("B03", PATHS, num_tokens=(16,) * 4, num_topk=2, routing="not_last_rank", hidden=2048, data="exact")
)
def test_b03_rank_that_receives_nothing(run_ranks, case: Case):
    """Null pointers of empty receive buffers were asserted against."""
    last = reference.dispatch(case.config(), case.batches(0))[-1]
    assert not bool(checks.is_valid_row(case.config(), last).any())
    run_ranks(case.num_ranks, checks.run_case, case)


@case_tests(
    each_variant(
        "B04",
        ("expert_reduce", "expert_direct", "rank_direct"),
        num_tokens=(64,) * 8,
        hidden=4096,
        num_topk=1,
        num_experts=8,
        routing="all_to_0",
        data="exact",
        num_rounds=1,
        limit_s=60,
    )
)
def test_b04_every_token_to_one_expert(run_ranks, case: Case):
    """Seven of eight ranks receive nothing; the shape of an empty buffer was refused."""
    received = [
        checks.is_valid_row(case.config(), output) for output in reference.dispatch(case.config(), case.batches(0))
    ]
    assert [int(is_valid.sum()) for is_valid in received] == [512, *[0] * 7]
    run_ranks(case.num_ranks, checks.run_case, case, limit_s=case.limit_s)


# ---------------------------------------------------------------------- -1, padding and sentinels

_B07_IDS = ((-1, 3, -1, 7), (-1, -1, -1, -1), (0, 1, 2, 3))


@case_tests(each_variant("B07", num_tokens=(3, 3), num_experts=8, ids=(_B07_IDS, _B07_IDS), hidden=2048, data="exact"))
def test_b07_no_expert_in_any_column(run_ranks, case: Case):
    """-1 was used as an index; it sends nothing and adds nothing."""
    batch = case.batches(0)[0]
    assert bool((reference.round_trip(case.config(), 2, batch)[1] == 0).all())
    run_ranks(case.num_ranks, checks.run_case, case)


@pytest.mark.parametrize("padding", [16, -1])
@pytest.mark.parametrize("variant", RANK_PATHS)
def test_b08_padding_is_the_chosen_id(run_ranks, variant: str, padding: int):
    """Padding rows indexed an expert map and hit the last expert."""
    (case,) = each_variant(
        "B08", (variant,), num_tokens=(3, 1, 0, 2), active=4, capacity=8, num_topk=2, padding_expert_id=padding
    )
    run_ranks(case.num_ranks, checks.run_case, case)


@pytest.mark.parametrize("padding", [0, 7, 15])
def test_b08_padding_that_is_an_expert_is_refused(padding: int):
    with pytest.raises(ConfigError, match=rf"padding_expert_id is {padding}.*num_experts \(16\)"):
        DispatcherConfig(num_experts=16, num_topk=2, hidden=64, max_tokens_per_rank=4, padding_expert_id=padding)


@pytest.mark.parametrize("variant", PATHS)
def test_b09_rows_of_a_larger_round_do_not_come_back(run_ranks, variant: str):
    """Old ids past the received count looked valid, and a consumer of the whole buffer routed them."""
    (case,) = each_variant("B09", (variant,), num_tokens=(64, 64), num_experts=8)
    full = [exact_batch(rank, torch.arange(4).repeat(64, 1), case.hidden) for rank in range(2)]
    few = [
        exact_batch(0, torch.tensor([[4, 1, 7, 2]] * 2), case.hidden, 1),
        exact_batch(1, full[1].topk_ids[:0], case.hidden),
    ]
    run_ranks(2, checks.run_rounds, case.config(), [full, few, full, few])


def _local_ids(context: Rank, config: DispatcherConfig) -> tuple[list, list]:
    ids = torch.tensor([[0, 5, 9, 15]])
    with context.dispatcher(config) as dispatcher:
        batch = exact_batch(context.rank, ids, config.hidden)
        output, handle = dispatcher.dispatch(*checks.to_device(batch, dispatcher.device))
        dispatcher.synchronize()
        seen = (output.recv_topk_ids if config.layout is RANK_MAJOR else output.num_recv_tokens_per_expert).tolist()
        experts = ScalingExperts(config, dispatcher.local_experts, dispatcher.device)
        out = dispatcher.combine(experts(output), handle)
        dispatcher.synchronize()
        checks.assert_equal("out", out, reference.round_trip(config, context.num_ranks, batch))
    return seen


def test_b11_foreign_picks_do_not_become_expert_0(run_ranks):
    """Picks of other ranks were masked with 0, so both ranks computed expert 0."""
    settings = {"num_experts": 16, "num_topk": 4, "hidden": 2048, "max_tokens_per_rank": 1}
    rank_major = DispatcherConfig(**settings, layout=RANK_MAJOR)
    seen = run_ranks(2, _local_ids, rank_major)
    assert seen == [[[0, 5, -1, -1]] * 2, [[-1, -1, 1, 7]] * 2]
    counts = run_ranks(2, _local_ids, DispatcherConfig(**settings))
    assert counts == [[2, 0, 0, 0, 0, 2, 0, 0], [0, 2, 0, 0, 0, 0, 0, 2]]


def _half_padded(config: DispatcherConfig, round_idx: int) -> list[TokenBatch]:
    batches = []
    for rank in range(4):
        order = torch.rand((64, config.num_experts), generator=torch.Generator().manual_seed(rank + 10 * round_idx))
        ids = order.argsort(dim=1)[:, : config.num_topk]
        if rank > 0:
            ids[32:] = -1
        batches.append(exact_batch(rank, ids, config.hidden, round_idx))
    return batches


def _touched_rows(context: Rank, config: DispatcherConfig, rounds: list[list[TokenBatch]]) -> tuple[int, list[int]]:
    """Rows of recv_x that the second round wrote, and what was counted per local expert."""
    with context.dispatcher(config) as dispatcher:
        experts = ScalingExperts(config, dispatcher.local_experts, dispatcher.device)
        for round_idx, batches in enumerate(rounds):
            trip = checks.RoundTrip(context=context, dispatcher=dispatcher, batches=batches)
            trip.dispatch()
            trip.receive()
            num_touched = int((trip.output.recv_x != -99).any(dim=-1).sum())
            counts = trip.output.num_recv_tokens_per_expert
            counts = [] if counts is None else counts.tolist()
            trip.combine(experts, fill=-99.0 if round_idx == 0 else None)
    return num_touched, counts


@pytest.mark.parametrize("variant", ["expert_reduce", "rank_direct"])
def test_b12_padded_tokens_are_not_sent(run_ranks, variant: str):
    """Padded tokens with an invalid id all went to rank 0."""
    (case,) = each_variant("B12", (variant,), num_tokens=(64,) * 4, num_topk=8, num_experts=32)
    config = case.config()
    rounds = [_half_padded(config, round_idx) for round_idx in range(2)]
    results = run_ranks(4, _touched_rows, config, rounds)
    moved = reference.bytes_moved(config, rounds[1])
    assert sum(num_touched for num_touched, _ in results) * config.row_bytes == moved.dispatch
    histogram = torch.cat([batch.topk_ids.flatten() for batch in rounds[1]])
    histogram = torch.bincount(histogram[histogram >= 0], minlength=32)
    assert int(histogram.sum()) == (64 + 3 * 32) * 8
    if config.layout is EXPERT_MAJOR:
        assert [count for _, counts in results for count in counts] == histogram.tolist()


# ---------------------------------------------------------------------- duplicates and id kinds


def _nan_row(context: Rank, config: DispatcherConfig, ids: torch.Tensor) -> None:
    batch = exact_batch(context.rank, ids, config.hidden)
    batch.x[3] = float("nan")
    without = TokenBatch(batch.x[:3], batch.topk_ids[:3], batch.topk_weights[:3])
    with context.dispatcher(config) as dispatcher:
        experts = ScalingExperts(config, dispatcher.local_experts, dispatcher.device)
        outs = []
        for given in (batch, without, batch):
            output, handle = dispatcher.dispatch(*checks.to_device(given, dispatcher.device))
            outs.append(dispatcher.combine(experts(output), handle))
        dispatcher.synchronize()
    checks.assert_equal("rows 0..2, first round", outs[0][:3], outs[1])
    checks.assert_equal("rows 0..2, third round", outs[2][:3], outs[1])
    assert bool(outs[0][3].isnan().all())
    checks.assert_equal("out", outs[1], reference.round_trip(config, context.num_ranks, without))


@pytest.mark.parametrize("variant", PATHS)
def test_b13_nan_row_of_one_repeated_expert(run_ranks, variant: str):
    """NaN logits of graph padding gave ids [0]*8; the duplicates overran expert 0's rows."""
    (case,) = each_variant("B13", (variant,), num_tokens=(4,) * 4, num_topk=8, num_experts=32, hidden=2048)
    order = torch.rand((4, 32), generator=torch.Generator().manual_seed(13)).argsort(dim=1)
    ids = order[:, :8].clone()
    ids[3] = 0
    run_ranks(4, _nan_row, case.config(), ids)


@pytest.mark.parametrize("variant", ["expert_reduce", "expert_direct", "rank_reduce_runner", "rank_direct"])
def test_b13_repeated_expert_counts_each_time(run_ranks, variant: str):
    (case,) = each_variant("B13", (variant,), num_tokens=(2, 2), num_topk=8, num_experts=32, hidden=64)
    ids = torch.zeros((2, 8), dtype=torch.int64)
    batches = [exact_batch(rank, ids, 64) for rank in range(2)]
    weights = exact_weights(2, 8).sum(dim=1)
    expected = (batches[0].x.float() * weights[:, None]).to(BF16)  # expert 0 returns its row
    checks.assert_equal("reference", reference.round_trip(case.config(), 2, batches[0]), expected)
    run_ranks(2, checks.run_rounds, case.config(), [batches])


def _id_dtypes(context: Rank, config: DispatcherConfig) -> None:
    ids = torch.tensor([[0, 3, -1, 7], [1, 2, 3, 4], [7, 6, 5, 4], [0, 0, 1, 1], [-1, -1, -1, 2]])
    refused = {
        torch.uint32: ids.clamp(min=0).to(torch.uint32),
        torch.int16: ids.to(torch.int16),
        torch.float32: ids.float(),
    }
    with context.dispatcher(config) as dispatcher:
        device = dispatcher.device
        outs = {}
        for dtype in (torch.int32, torch.int64):
            for wrong, values in refused.items():
                batch = exact_batch(context.rank, values, config.hidden)
                with pytest.raises(InputError, match=rf"topk_ids has dtype {wrong}.*torch.int32, torch.int64"):
                    dispatcher.dispatch(*checks.to_device(batch, device))
            batches = [exact_batch(rank, ids.to(dtype), config.hidden) for rank in range(context.num_ranks)]
            outs[dtype] = checks.run_round(context, dispatcher, batches)
        checks.assert_equal("int64 against int32", outs[torch.int64], outs[torch.int32])


@pytest.mark.parametrize("variant", PATHS)
def test_b14_id_dtypes(run_ranks, variant: str):
    """int64 ids where int32 was required and the reverse, found only deep inside."""
    (case,) = each_variant("B14", (variant,), num_tokens=(5, 5), num_experts=8)
    run_ranks(2, _id_dtypes, case.config())


@case_tests(each_variant("B15", num_tokens=(33, 7, 0, 64), num_topk=8, num_experts=32, routing="masked", data="normal"))
def test_b15_counts_are_of_the_ids_received(run_ranks, case: Case):
    """Counts were taken from another list than the ids."""
    if case.layout is EXPERT_MAJOR:
        batches = case.batches(0)
        for rank, output in enumerate(reference.dispatch(case.config(), batches)):
            ids = torch.cat([batch.topk_ids.flatten() for batch in batches])
            histogram = [int((ids == expert_idx).sum()) for expert_idx in case.config().local_experts(rank, 4)]
            assert output.num_recv_tokens_per_expert.tolist() == histogram
    run_ranks(case.num_ranks, checks.run_case, case)


@case_tests(each_variant("B16", num_tokens=(8,) * 3, num_experts=32, hidden=2048, data="exact"))
def test_b16_experts_not_a_multiple_of_ranks(run_ranks, case: Case):
    """Floor division left experts without an owner."""
    owners = case.config().owners(3)
    assert [owners.count(rank) for rank in range(3)] == [11, 11, 10]
    run_ranks(case.num_ranks, checks.run_case, case)


def test_b16_every_expert_has_one_owner():
    config = DispatcherConfig(num_experts=128, num_topk=2, hidden=64, max_tokens_per_rank=1)
    local = [config.local_experts(rank, 24) for rank in range(24)]
    assert sorted(sum(local, ())) == list(range(128))
    assert {len(experts) for experts in local} == {5, 6}


def test_b17_ranks_choose_different_replicas(run_ranks):
    """Replicas of an expert were picked per rank, and outputs were summed twice."""
    ids = (((3, 0, 5, 9), (1, 3, 2, 15)), ((17, 0, 5, 9), (1, 17, 2, 15)))  # 17 is a replica of 3
    for case in each_variant(
        "B17",
        num_tokens=(2, 2),
        num_experts=20,
        expert_to_rank=(*[0] * 8, *[1] * 8, 1, 0, 1, 0),
        ids=ids,
        data="exact",
        rotates=False,
    ):
        logical = dataclasses.replace(case, ids=(ids[0], ids[0]))
        for rank in range(2):
            physical_out, logical_out = (
                reference.round_trip(each.config(), 2, each.batches(0)[rank]) for each in (case, logical)
            )
            checks.assert_equal("replica against original", physical_out, logical_out)
        run_ranks(2, checks.run_case, case)


# ---------------------------------------------------------------------- capacity and token counts


def _too_many_tokens(context: Rank, case: Case, num_excess: int) -> None:
    config = dataclasses.replace(case.config(), timeout_s=2.0)
    with context.dispatcher(config) as dispatcher:
        checks.run_round(context, dispatcher, case.batches(0))
        ids = torch.zeros((128 + num_excess if context.rank == 0 else 128, config.num_topk), dtype=torch.int64)
        batch = checks.to_device(exact_batch(context.rank, ids, config.hidden), dispatcher.device)
        if context.rank == 0:
            with pytest.raises(CapacityError, match=rf"{128 + num_excess} tokens.*128.*max_tokens_per_rank"):
                dispatcher.dispatch(*batch)
        else:
            with pytest.raises(PeerTimeoutError) as caught:
                dispatcher.dispatch(*batch)
                dispatcher.synchronize()
            assert caught.value.ranks == (0,)
        dispatcher.reset()
        checks.run_round(context, dispatcher, case.batches(1))


@pytest.mark.parametrize("variant", PATHS)
def test_b18_more_tokens_than_capacity(run_ranks, variant: str):
    """A prompt longer than the capacity met a bare assertion, and the other ranks hung."""
    (case,) = each_variant("B18", (variant,), num_tokens=(128,) * 4, num_experts=8, num_topk=2)
    run_ranks(4, _too_many_tokens, case, 1)


def _unlike_active(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as dispatcher:
        for round_idx in range(2):
            batch = case.batches(round_idx)[context.rank]
            with pytest.raises(InputError, match=r"active_tokens_per_rank differs: .*rank \d.* \d.*same value"):
                dispatcher.dispatch(
                    *checks.to_device(batch, dispatcher.device), active_tokens_per_rank=batch.num_tokens
                )
                dispatcher.synchronize()
            if dispatcher.device.type == "cuda":  # the launch is over when the host learns of it
                dispatcher.reset()
            checks.run_round(context, dispatcher, case.batches(round_idx), active=9)


@pytest.mark.parametrize("variant", PATHS)
def test_b21_ranks_pass_unlike_active_tokens(run_ranks, variant: str):
    """Each rank sized the batch from its own count, so strides differed and rows were garbage."""
    (case,) = each_variant("B21", (variant,), num_tokens=(5, 9, 2, 7), rotates=False, routing="masked")
    run_ranks(4, _unlike_active, case)


@case_tests(
    [
        *each_variant("B22", RANK_PATHS[:1], num_tokens=(1000, 37, 512, 1), num_topk=8, num_experts=64, hidden=1024),
        *each_variant("B22", ("expert_reduce",), num_tokens=(1000, 37, 512, 1), num_topk=8, num_experts=64, hidden=64),
    ]
)
def test_b22_very_uneven_tokens(run_ranks, case: Case):
    """Uneven counts gave wrong rows without an error."""
    case = dataclasses.replace(case, data="exact", num_rounds=2)
    run_ranks(case.num_ranks, checks.run_case, case, limit_s=60)


def _one_expert_counts(context: Rank, case: Case) -> tuple[list, list]:
    with context.dispatcher(case.config()) as dispatcher:
        trip = checks.RoundTrip(context=context, dispatcher=dispatcher, batches=case.batches(0))
        trip.dispatch()
        trip.receive()
        result = trip.output.num_recv_tokens_per_expert.tolist(), trip.output.src_offsets.tolist()
        trip.combine(ScalingExperts(dispatcher.config, dispatcher.local_experts, dispatcher.device))
    return result


@pytest.mark.parametrize("variant", ["expert_reduce", "expert_direct"])
def test_b24_one_expert_gets_every_token(run_ranks, variant: str):
    """The receive capacity was too small when one expert got everything."""
    (case,) = each_variant("B24", (variant,), num_tokens=(128,) * 4, num_topk=1, num_experts=8, routing="all_to_5")
    results = run_ranks(4, _one_expert_counts, case)
    assert [counts for counts, _ in results] == [[0, 0], [0, 0], [0, 512], [0, 0]]
    assert results[2][1] == [[0] * 5, [0, 128, 256, 384, 512]]
    assert all(offsets == [[0] * 5] * 2 for rank, (_, offsets) in enumerate(results) if rank != 2)


# ---------------------------------------------------------------------- strides


@pytest.mark.parametrize("x_form", ["row_stride", "column_slice", "transposed"])
@pytest.mark.parametrize("variant", PATHS)
def test_b35_x_that_is_not_contiguous(run_ranks, variant: str, x_form: str):
    """A non-contiguous input met an assertion, or was read as if it were contiguous."""
    (case,) = each_variant("B35", (variant,), num_tokens=(8, 8), hidden=2048, data="exact", x_form=x_form)
    run_ranks(2, checks.run_case, case)


def test_b35_ids_and_weights_that_are_not_contiguous(run_ranks):
    for case in each_variant("B35", PATHS, num_tokens=(8, 8), num_rounds=1):
        run_ranks(2, _strided_routes, case)


def _strided_routes(context: Rank, case: Case) -> None:
    batch = case.batches(0)[context.rank]
    config = case.config()
    with context.dispatcher(config) as dispatcher:
        x, ids, weights = checks.to_device(batch, dispatcher.device)
        ids, weights = ids.t().contiguous().t(), weights.repeat_interleave(2, dim=1)[:, ::2]
        assert not ids.is_contiguous() and not weights.is_contiguous()
        output, handle = dispatcher.dispatch(x, ids, weights)
        experts = ScalingExperts(config, dispatcher.local_experts, dispatcher.device)
        out = dispatcher.combine(experts(output), handle)
        dispatcher.synchronize()
        checks.assert_equal("out", out, reference.round_trip(config, context.num_ranks, batch))
