# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Random shapes, routes and settings; a failure shrinks to the smallest case."""

from __future__ import annotations

import dataclasses

import checks
import pytest
import torch
from cases import VARIANTS, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher import MAX_RANKS

from mscclpp_dispatcher import ExpertIdSpace, Payload

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A small case of any kind."""
    num_ranks = draw(st.sampled_from([num for num in (2, 4, 1, 3) if num <= MAX_RANKS]))
    num_tokens = tuple(draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks)))
    num_experts = draw(st.integers(1, 12))
    num_topk = draw(st.integers(1, 6))
    capacity = max(*num_tokens, 1) + draw(st.integers(0, 3))
    rows = st.tuples(*[st.integers(-1, num_experts - 1)] * num_topk)
    ids = tuple(tuple(draw(st.lists(rows, min_size=num, max_size=num))) for num in num_tokens)
    is_mapped = draw(st.booleans())
    owners = st.lists(st.integers(0, num_ranks - 1), min_size=num_experts, max_size=num_experts)
    num_in_flight = draw(st.integers(1, 2))
    return Case(
        name="hypothesis",
        num_tokens=num_tokens,
        capacity=capacity,
        active=draw(st.sampled_from([None, max(*num_tokens, 1)])),
        hidden=4 * draw(st.sampled_from([2, 4, 6, 34])),
        num_topk=num_topk,
        num_experts=num_experts,
        payload=draw(st.sampled_from(Payload)),
        expert_to_rank=tuple(draw(owners)) if is_mapped else None,
        padding_expert_id=draw(st.sampled_from([-1, -5, num_experts, num_experts + 9])),
        recv_id_space=draw(st.sampled_from(ExpertIdSpace)),
        first_epoch=draw(st.sampled_from([0, 2**31 - 1, 2**32 - 2])),
        id_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        has_weights=draw(st.booleans()),
        ids=ids,
        data=draw(st.sampled_from(["random_exact", "normal"])),
        x_form=draw(st.sampled_from(["contiguous", "row_stride", "column_slice", "transposed"])),
        is_split=draw(st.booleans()),
        is_in_place=draw(st.booleans()),
        num_in_flight=num_in_flight,
        rotates=draw(st.booleans()),
        num_rounds=2 * num_in_flight,
    )


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_any_case(run_ranks, variant: str, case: Case):
    case = dataclasses.replace(case, **VARIANTS[variant])
    run_ranks(case.num_ranks, checks.run_case, case)
