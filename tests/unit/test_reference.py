# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The reference against loops that follow the definitions word by word."""

from __future__ import annotations

import dataclasses
import inspect
from fractions import Fraction

import checks
import pytest
import torch
from cases import CASES, DIRECT_SEND, EXPERT_MAJOR, IN_RUNNER, LOCAL_REDUCE, RANK_MAJOR, VARIANTS, Case, each_variant

from mscclpp_dispatcher import DispatcherConfig, ExpertIdSpace, Payload, reference
from mscclpp_dispatcher.reference import ScalingExperts, TokenBatch

SMALL = [
    case
    for routing in ("distinct", "masked", "repeated")
    for data in ("random_exact", "normal")
    for case in each_variant(
        f"{routing}-{data}",
        num_tokens=(5, 0, 3),
        capacity=6,
        hidden=8,
        num_topk=4,
        num_experts=7,
        routing=routing,
        data=data,
        expert_to_rank=(0, 1, 0, 2, 1, 0, 1),
    )
]


def small_cases():
    return pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


def routes(batch: TokenBatch) -> list[list[tuple[int, float]]]:
    """(expert, weight) of each k of each token, without the ks that have none."""
    return [
        [(expert_idx, weight) for expert_idx, weight in zip(ids, weights, strict=True) if expert_idx >= 0]
        for ids, weights in zip(batch.topk_ids.tolist(), batch.weights.tolist(), strict=True)
    ]


def float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


# ---------------------------------------------------------------------- dispatch


@small_cases()
def test_dispatch(case: Case):
    config, batches, active = case.config(), case.batches(1), 6
    owners = config.owners(3)
    for rank, output in enumerate(reference.dispatch(config, batches)):
        local_experts = [expert_idx for expert_idx in range(7) if owners[expert_idx] == rank]
        assert output.num_tokens_per_rank.tolist() == [batch.num_tokens for batch in batches]
        if config.layout is EXPERT_MAJOR:
            _check_expert_major(config, batches, output, local_experts)
        else:
            _check_rank_major(config, batches, output, local_experts, active)


def _check_expert_major(config, batches, output, local_experts):
    assert output.recv_topk_ids is None
    assert tuple(output.recv_x.shape) == (len(local_experts), 3 * 6, 8)
    for local_idx, expert_idx in enumerate(local_experts):
        rows, weights, offsets = [], [], [0]
        for batch in batches:
            for token, token_routes in enumerate(routes(batch)):
                mine = [weight for each, weight in token_routes if each == expert_idx]
                if mine:
                    total = 0.0
                    for weight in mine:
                        total = float32(total + weight)
                    rows.append(batch.x[token].tolist())
                    weights.append(total)
            offsets.append(len(rows))
        assert output.num_recv_tokens_per_expert[local_idx].item() == len(rows)
        assert output.src_offsets[local_idx].tolist() == offsets
        assert output.recv_x[local_idx, : len(rows)].tolist() == rows
        if config.weight_mode is IN_RUNNER:
            assert output.recv_topk_weights[local_idx, : len(rows)].tolist() == weights
        else:
            assert output.recv_topk_weights is None


def _check_rank_major(config, batches, output, local_experts, active):
    assert output.num_recv_tokens_per_expert is None and output.src_offsets is None
    for src_rank, batch in enumerate(batches):
        for token in range(active):
            row = src_rank * active + token
            ids, weights = output.recv_topk_ids[row].tolist(), output.recv_topk_weights[row].tolist()
            if token >= batch.num_tokens:
                assert (ids, weights) == ([-1] * 4, [0.0] * 4)
                continue
            for k in range(4):
                given = int(batch.topk_ids[token, k])
                if given in local_experts:
                    assert (ids[k], weights[k]) == (local_experts.index(given), batch.weights[token, k].item())
                else:
                    assert (ids[k], weights[k]) == (-1, 0.0)
            if any(expert_idx in local_experts for expert_idx, _ in routes(batch)[token]):
                assert output.recv_x[row].tolist() == batch.x[token].tolist()


def test_dispatch_with_global_ids_and_another_padding():
    config = DispatcherConfig(
        num_experts=4,
        num_topk=3,
        hidden=8,
        max_tokens_per_rank=4,
        layout=RANK_MAJOR,
        recv_id_space=ExpertIdSpace.GLOBAL,
        padding_expert_id=4,
    )
    batches = [
        TokenBatch(torch.ones(1, 8, dtype=torch.bfloat16), torch.tensor([ids])) for ids in ([3, -1, 0], [2, 2, 1])
    ]
    first, second = reference.dispatch(config, batches, active_tokens_per_rank=2)
    assert first.recv_topk_ids.tolist() == [[4, 4, 0], [4, 4, 4], [4, 4, 1], [4, 4, 4]]
    assert second.recv_topk_ids.tolist() == [[3, 4, 4], [4, 4, 4], [2, 2, 4], [4, 4, 4]]
    assert second.recv_topk_weights.tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]]


# ---------------------------------------------------------------------- combine


def _random_expert_outputs(config: DispatcherConfig, num_ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    rows = num_ranks * config.max_tokens_per_rank
    outputs = []
    for rank in range(num_ranks):
        if config.layout is EXPERT_MAJOR:
            shape = (len(config.local_experts(rank, num_ranks)), rows, config.hidden)
        elif config.combine_mode is DIRECT_SEND:
            shape = (rows, config.num_topk, config.hidden)
        else:
            shape = (rows, config.hidden)
        outputs.append(torch.randn(shape, generator=generator).to(config.payload.dtype))
    return outputs


class _Sum:
    """A row summed in float32: each product and each sum rounded apart."""

    def __init__(self, hidden: int) -> None:
        self.row = [0.0] * hidden

    def add(self, weight: float, row: list[float]) -> None:
        self.row = [float32(total + float32(weight * value)) for total, value in zip(self.row, row, strict=True)]

    def rounded(self, dtype: torch.dtype) -> list[float]:
        return torch.tensor(self.row, dtype=torch.float32).to(dtype).tolist()


def _brute_combine(config, batches, expert_outputs, src_rank) -> list[list[float]]:
    owners, active, dtype = config.owners(len(batches)), config.max_tokens_per_rank, config.payload.dtype
    positions = {}  # (expert, source rank, token) -> row, EXPERT_MAJOR
    for expert_idx in range(config.num_experts):
        row = 0
        for rank, batch in enumerate(batches):
            for token, token_routes in enumerate(routes(batch)):
                if expert_idx in [each for each, _ in token_routes]:
                    positions[expert_idx, rank, token] = row
                    row += 1
    batch = batches[src_rank]
    result = []
    for token in range(batch.num_tokens):
        terms = []  # (rank, weight, row), in the order of k
        seen = set()
        for k, (expert_idx, weight) in enumerate(
            zip(batch.topk_ids[token].tolist(), batch.weights[token].tolist(), strict=True)
        ):
            if expert_idx < 0:
                continue
            rank = owners[expert_idx]
            weight = 1.0 if config.weight_mode is IN_RUNNER else weight
            if config.layout is EXPERT_MAJOR:
                if config.weight_mode is IN_RUNNER and expert_idx in seen:
                    continue
                seen.add(expert_idx)
                local_idx = config.local_experts(rank, len(batches)).index(expert_idx)
                row = expert_outputs[rank][local_idx, positions[expert_idx, src_rank, token]]
            elif config.combine_mode is DIRECT_SEND:
                row = expert_outputs[rank][src_rank * active + token, k]
            else:
                row = expert_outputs[rank][src_rank * active + token]
            terms.append((rank, weight, row.tolist()))
        total = _Sum(config.hidden)
        if config.combine_mode is DIRECT_SEND:
            for _, weight, row in terms:
                total.add(weight, row)
        else:
            for rank in dict.fromkeys(rank for rank, _, _ in terms):
                mine = [(weight, row) for owner, weight, row in terms if owner == rank]
                if config.layout is RANK_MAJOR:
                    total.add(1.0, mine[0][1])
                    continue
                partial = _Sum(config.hidden)
                for weight, row in mine:
                    partial.add(weight, row)
                total.add(1.0, partial.rounded(dtype))
        result.append(total.rounded(dtype))
    return result


@small_cases()
def test_combine_of_unrelated_rows(case: Case):
    config, batches = case.config(), case.batches(2)
    expert_outputs = _random_expert_outputs(config, 3)
    outs = reference.combine(config, batches, expert_outputs)
    for rank, out in enumerate(outs):
        assert out.dtype is config.payload.dtype
        assert out.tolist() == _brute_combine(config, batches, expert_outputs, rank), f"rank {rank}"


def test_first_occurrence_decides_the_order_of_ranks():
    """2**24 absorbs 1 in float32, so the sum shows the order of its addends."""
    config = DispatcherConfig(num_experts=3, num_topk=3, hidden=4, max_tokens_per_rank=1, payload=Payload.FP32)
    outputs = [torch.full((1, 3, 4), value) for value in (2.0**24, 1.0, 1.0)]
    for ids, expected in (([1, 2, 0], 2.0**24 + 2), ([0, 1, 2], 2.0**24), ([1, 0, 2], 2.0**24)):
        batches = [TokenBatch(torch.ones(1, 4), torch.tensor([ids])) for _ in range(3)]
        assert reference.combine(config, batches, outputs)[0][0, 0].item() == expected


# ---------------------------------------------------------------------- experts and round trips


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.hidden <= 64 and max(case.num_tokens) <= 16], ids=lambda case: case.name
)
def test_round_trip_is_dispatch_experts_combine(case: Case):
    config, batches = case.config(), case.batches(0)
    keywords = {"active_tokens_per_rank": case.active}
    expert_outputs = []
    for rank, output in enumerate(reference.dispatch(config, batches, **keywords)):
        experts = ScalingExperts(config, config.local_experts(rank, case.num_ranks), "cpu")
        expert_outputs.append(experts(output))
        written = torch.empty_like(expert_outputs[-1])
        assert experts(output, out=written) is written
        checks.assert_equal("out=", written, expert_outputs[-1])
    for rank, out in enumerate(reference.combine(config, batches, expert_outputs, **keywords)):
        checks.assert_equal(f"rank {rank}", out, reference.round_trip(config, case.num_ranks, batches[rank]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_topk", [1, 4, 16])
def test_profile_x_is_exact_in_every_variant(variant: str, num_topk: int):
    """The same bits from every layout and mode as from exact fractions."""
    for payload in Payload:
        (case,) = each_variant(
            "exact", (variant,), num_tokens=(6, 9), num_topk=num_topk, num_experts=32, data="exact", payload=payload
        )
        case = dataclasses.replace(case, hidden=16, routing="distinct")
        batch = case.batches(1)[1]
        for token, row in enumerate(reference.round_trip(case.config(), 2, batch).tolist()):
            factor = sum(Fraction(weight) * (1 + expert_idx % 2) for expert_idx, weight in routes(batch)[token])
            assert row == [float(factor * Fraction(value)) for value in batch.x[token].tolist()]


@small_cases()
def test_float64_round_trip_and_its_bound(case: Case):
    batch = case.batches(1)[0]
    total, magnitude = reference.round_trip_float64(batch)
    for token, token_routes in enumerate(routes(batch)):
        for column, value in enumerate(batch.x[token].tolist()):
            addends = [weight * (1 + expert_idx % 2) * value for expert_idx, weight in token_routes]
            assert total[token, column].item() == pytest.approx(sum(addends), abs=1e-12)
            assert magnitude[token, column].item() == pytest.approx(sum(map(abs, addends)), abs=1e-12)


def test_float64_bound_finds_a_wrong_weight():
    (case,) = each_variant("bound", ("expert_reduce",), num_tokens=(8,), data="normal")
    batch = case.batches(0)[0]
    out = reference.round_trip(case.config(), 1, batch)
    checks.assert_close_to_float64("out", out, case.config(), batch)
    batch.topk_weights[3, 1] *= 1.05
    with pytest.raises(AssertionError, match="rounding error"):
        checks.assert_close_to_float64("out", out, case.config(), batch)


# ---------------------------------------------------------------------- bytes and inputs


def test_bytes_moved():
    """Token 0: experts 0, 1 (rank 0) and 2 (rank 1); token 1: expert 3 three times; token 2: none."""
    ids = torch.tensor([[0, 1, 2], [3, 3, 3], [-1, -1, -1]])
    batches = [TokenBatch(torch.zeros(3, 8, dtype=torch.bfloat16), ids), TokenBatch(torch.zeros(0, 8), ids[:0])]
    expected = {  # rows sent, rows returned
        "expert_reduce": (4, 3),
        "expert_reduce_runner": (4, 3),
        "expert_direct": (4, 6),
        "expert_direct_runner": (4, 4),
        "rank_reduce_runner": (3, 3),
        "rank_direct": (3, 6),
        "rank_direct_runner": (3, 6),
    }
    assert expected.keys() == VARIANTS.keys()
    for variant, (num_sent, num_returned) in expected.items():
        config = DispatcherConfig(num_experts=4, num_topk=3, hidden=8, max_tokens_per_rank=3, **VARIANTS[variant])
        assert reference.bytes_moved(config, batches) == reference.BytesMoved(16 * num_sent, 16 * num_returned), variant


def test_inputs_are_not_changed():
    for case in each_variant("const", num_tokens=(4, 3), routing="repeated"):
        batches, again = case.batches(0), case.batches(0)
        outputs = reference.dispatch(case.config(), batches)
        rows = [
            ScalingExperts(case.config(), case.config().local_experts(rank, 2), "cpu")(output)
            for rank, output in enumerate(outputs)
        ]
        reference.combine(case.config(), batches, rows)
        reference.round_trip(case.config(), 2, batches[0])
        for batch, same in zip(batches, again, strict=True):
            for field in ("x", "topk_ids", "topk_weights"):
                checks.assert_equal(field, getattr(batch, field), getattr(same, field))


def test_public_names_are_documented():
    for name, value in vars(reference).items():
        if not name.startswith("_") and getattr(value, "__module__", "") == reference.__name__:
            assert inspect.getdoc(value), name


def test_local_reduce_rounds_each_rank_apart():
    """1 + 2**-8 lies half-way between two bfloat16: the first rank's partial row loses it."""
    ids, weights = torch.tensor([[0, 1, 2]]), torch.tensor([[1.0, 2.0**-8, 2.0**-8]])
    batch = TokenBatch(torch.ones(1, 8, dtype=torch.bfloat16), ids * 2, weights)
    outs = {}
    for mode in (LOCAL_REDUCE, DIRECT_SEND):
        config = DispatcherConfig(num_experts=6, num_topk=3, hidden=8, max_tokens_per_rank=1, combine_mode=mode)
        outs[mode] = reference.round_trip(dataclasses.replace(config, expert_to_rank=(0, 0, 0, 0, 1, 1)), 2, batch)
    assert outs[LOCAL_REDUCE][0, 0].item() == 1.0
    assert outs[DIRECT_SEND][0, 0].item() == 1.0 + 2.0**-7
