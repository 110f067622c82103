# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Wrong arguments and wrong order: refused before anything is sent, and the next valid round is exact."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable

import checks
import pytest
import torch
from cases import PATHS, Case, each_variant
from launcher import DEVICE_TYPE, Rank

from mscclpp_dispatcher import (
    CapacityError,
    CombineMode,
    ConfigError,
    Dispatcher,
    DispatcherConfig,
    DispatchLayout,
    HandleError,
    InputError,
    Payload,
)
from mscclpp_dispatcher.reference import ScalingExperts

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]

BF16 = torch.bfloat16


def _case(variant: str, **fields: object) -> Case:
    (case,) = each_variant("misuse", (variant,), **{"num_tokens": (4, 8), "num_experts": 8, "num_topk": 2, **fields})
    return case


# ---------------------------------------------------------------------- dispatch


def _bad_dispatches(device: torch.device) -> list[tuple[type[Exception], str, tuple, dict]]:
    """Error, message and arguments of dispatches for hidden 64, 8 tokens, top-2 of 8 experts."""

    def x(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    def weights(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    elsewhere = torch.device("cpu" if device.type == "cuda" else "meta")
    return [
        (InputError, "x has dtype torch.float32.*bfloat16", (x(4, 64, dtype=torch.float32), ids(4, 2)), {}),
        (InputError, "x has dtype torch.float16.*bfloat16", (x(4, 64, dtype=torch.float16), ids(4, 2)), {}),
        (InputError, r"x has shape \[4, 63\].*64", (x(4, 63), ids(4, 2)), {}),
        (InputError, r"x has shape \[64\]", (x(64), ids(4, 2)), {}),
        (InputError, "x is a list", ([1.0], ids(4, 2)), {}),
        (InputError, "x is on ", (x(4, 64).to(elsewhere), ids(4, 2)), {}),
        (InputError, r"topk_ids has shape \[3, 2\].*4, 2", (x(4, 64), ids(3, 2)), {}),
        (InputError, r"topk_ids has shape \[4, 3\].*4, 2", (x(4, 64), ids(4, 3)), {}),
        (InputError, "topk_ids is on ", (x(4, 64), ids(4, 2).to(elsewhere)), {}),
        (InputError, r"topk_weights has shape \[4, 1\]", (x(4, 64), ids(4, 2), weights(4, 1)), {}),
        (InputError, "topk_weights has dtype torch.bfloat16", (x(4, 64), ids(4, 2), weights(4, 2, dtype=BF16)), {}),
        (CapacityError, "9 tokens.*at most 8.*max_tokens_per_rank", (x(9, 64), ids(9, 2)), {}),
        (
            CapacityError,
            "4 tokens.*at most 3.*active_tokens_per_rank",
            (x(4, 64), ids(4, 2)),
            {"active_tokens_per_rank": 3},
        ),
        (
            CapacityError,
            r"active_tokens_per_rank is 9.*1\.\.8.*max_tokens_per_rank",
            (x(4, 64), ids(4, 2)),
            {"active_tokens_per_rank": 9},
        ),
        (CapacityError, "active_tokens_per_rank is 0", (x(0, 64), ids(0, 2)), {"active_tokens_per_rank": 0}),
    ]


def _refused_dispatches(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as dispatcher:
        for round_idx, (error, message, arguments, keywords) in enumerate(_bad_dispatches(dispatcher.device)):
            for call in (dispatcher.dispatch, dispatcher.dispatch_send):
                with pytest.raises(error, match=message) as caught:
                    call(*arguments, **keywords)
                assert f"rank {context.rank}" in str(caught.value)
            checks.run_round(context, dispatcher, case.batches(round_idx))


@pytest.mark.parametrize("variant", PATHS)
def test_bad_arguments_of_dispatch(run_ranks, variant: str):
    run_ranks(2, _refused_dispatches, _case(variant))


def _refused_ids(context: Rank, case: Case, check_ids: bool) -> None:
    config = dataclasses.replace(case.config(), check_ids=check_ids)
    with context.dispatcher(config) as dispatcher:
        for round_idx, bad_id in enumerate((8, -2, 2**31 - 1, -(2**31))):
            batch = case.batches(round_idx)[context.rank]
            for dtype in (torch.int32, torch.int64):
                ids = batch.topk_ids.to(dtype).clone()
                ids[2, 1] = bad_id
                arguments = checks.to_device(dataclasses.replace(batch, topk_ids=ids), dispatcher.device)
                message = rf"topk_ids\[2, 1\] is {bad_id}.*0\.\.7.*num_experts = 8"
                with pytest.raises(InputError, match=message) as caught:
                    dispatcher.dispatch(*arguments)
                assert f"rank {context.rank}" in str(caught.value)
            checks.run_round(context, dispatcher, case.batches(round_idx))


@pytest.mark.parametrize("variant", PATHS)
def test_bad_ids_are_refused_before_sending(run_ranks, variant: str):
    run_ranks(2, _refused_ids, _case(variant), DEVICE_TYPE == "cuda")


def _dropped_ids(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as dispatcher:
        experts = ScalingExperts(dispatcher.config, dispatcher.local_experts, dispatcher.device)
        for round_idx, bad_id in enumerate((8, -2, 2**31 - 1, -(2**31))):
            batches = case.batches(round_idx)
            dropped = []
            for batch in batches:
                batch.topk_ids[2, 1] = -1
                ids = batch.topk_ids.clone()
                ids[2, 1] = bad_id
                dropped.append(dataclasses.replace(batch, topk_ids=ids))
            output, handle = dispatcher.dispatch(*checks.to_device(dropped[context.rank], dispatcher.device))
            torch.cuda.synchronize()
            checks.check_dispatch(dispatcher.config, output, batches, context.rank, None)
            rows = experts(output)
            message = rf"topk_ids\[2, 1\] is {bad_id}.*earlier dispatch"
            with pytest.raises(InputError, match=message):
                dispatcher.combine(rows, handle)
            out = dispatcher.combine(rows, handle)  # the handle is still good
            dispatcher.synchronize()
            expected = checks.reference.round_trip(dispatcher.config, 2, batches[context.rank])
            checks.assert_equal("out", out, expected)


@pytest.mark.skipif(DEVICE_TYPE != "cuda", reason="the CPU engine refuses bad ids before sending")
@pytest.mark.parametrize("variant", PATHS)
def test_bad_ids_on_the_device_are_dropped_and_reported(run_ranks, variant: str):
    run_ranks(2, _dropped_ids, _case(variant))


# ---------------------------------------------------------------------- combine


def _refused_combines(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as dispatcher:
        device = dispatcher.device
        experts = ScalingExperts(dispatcher.config, dispatcher.local_experts, device)
        for round_idx in range(2):
            trip = checks.RoundTrip(context=context, dispatcher=dispatcher, batches=case.batches(round_idx))
            trip.dispatch()
            trip.receive()
            rows = experts(trip.output)
            out = torch.empty((trip.batch.num_tokens, case.hidden), dtype=BF16, device=device)
            overlapping = rows.flatten()[: out.numel()].view(out.shape)
            refused: list[tuple[str, torch.Tensor, torch.Tensor | None]] = [
                ("expert_output has dtype torch.float32", rows.float(), None),
                ("expert_output has shape", rows[:-1], None),
                ("expert_output has shape", rows.flatten(), None),
                ("expert_output has strides", rows.transpose(0, 1).contiguous().transpose(0, 1), None),
                ("out has dtype", rows, out.float()),
                ("out has shape", rows, out[1:]),
                ("out has shape", rows, torch.cat([out, out[:1]])),
                ("out has strides", rows, out.t().contiguous().t()),
                ("out overlaps expert_output", rows, overlapping),
            ]
            for message, expert_output, given_out in refused:
                for call in (dispatcher.combine, dispatcher.combine_send):
                    with pytest.raises(InputError, match=message):
                        call(expert_output, trip.handle, given_out)
            trip.combine(experts)


@pytest.mark.parametrize("variant", PATHS)
def test_bad_arguments_of_combine(run_ranks, variant: str):
    run_ranks(2, _refused_combines, _case(variant))


# ---------------------------------------------------------------------- order of calls


def _wrong_order(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as dispatcher:
        experts = ScalingExperts(dispatcher.config, dispatcher.local_experts, dispatcher.device)

        def refused(call: Callable[[], object], message: str) -> None:
            with pytest.raises(HandleError, match=message):
                call()

        for round_idx in range(2):
            trip = checks.RoundTrip(
                context=context, dispatcher=dispatcher, batches=case.batches(round_idx), is_split=True
            )
            trip.dispatch()
            handle = trip.handle
            nothing = torch.zeros(1)
            refused(lambda: dispatcher.expert_output_buffer(handle), "is dispatch_sent")  # noqa: B023 - called at once
            refused(lambda: dispatcher.combine(nothing, handle), "is dispatch_sent")  # noqa: B023
            refused(lambda: dispatcher.combine_send(nothing, handle), "is dispatch_sent")  # noqa: B023
            refused(lambda: dispatcher.combine_recv(handle), "is dispatch_sent")  # noqa: B023
            trip.receive()
            refused(lambda: dispatcher.dispatch_recv(handle), "is dispatched")  # noqa: B023
            refused(lambda: dispatcher.combine_recv(handle), "is dispatched")  # noqa: B023
            trip.combine(experts)
            refused(lambda: dispatcher.combine_recv(handle), "is consumed")  # noqa: B023
            refused(lambda: dispatcher.expert_output_buffer(handle), "is consumed")  # noqa: B023
            refused(lambda: dispatcher.abandon(handle), "is consumed")  # noqa: B023
        refused(lambda: dispatcher.dispatch_recv(None), "handle is None")
        refused(lambda: dispatcher.combine_recv("handle"), "handle is 'handle'")


@pytest.mark.parametrize("variant", PATHS)
def test_halves_out_of_order(run_ranks, variant: str):
    run_ranks(2, _wrong_order, _case(variant))


def _abandoned(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as dispatcher:
        for round_idx in range(0, 6, 2):
            trip = checks.RoundTrip(context=context, dispatcher=dispatcher, batches=case.batches(round_idx))
            trip.dispatch()
            trip.receive()
            dispatcher.abandon(trip.handle)
            with pytest.raises(HandleError, match="is consumed"):
                dispatcher.abandon(trip.handle)
            checks.run_round(context, dispatcher, case.batches(round_idx + 1))


@pytest.mark.parametrize("variant", PATHS)
def test_abandon_ends_a_round(run_ranks, variant: str):
    run_ranks(2, _abandoned, _case(variant))


# ---------------------------------------------------------------------- life cycle


def _destroyed(context: Rank, case: Case) -> None:
    dispatcher = context.dispatcher(case.config())
    checks.run_round(context, dispatcher, case.batches(0))
    output, handle = dispatcher.dispatch(*checks.to_device(case.batches(1)[context.rank], dispatcher.device))
    context.barrier()
    begin = time.monotonic()
    dispatcher.destroy()
    dispatcher.destroy()
    assert time.monotonic() - begin < 2.0
    rows = torch.zeros(1)
    for call in (
        lambda: dispatcher.dispatch(rows, rows),
        lambda: dispatcher.dispatch_send(rows, rows),
        lambda: dispatcher.dispatch_recv(handle),
        lambda: dispatcher.combine(rows, handle),
        lambda: dispatcher.combine_send(rows, handle),
        lambda: dispatcher.combine_recv(handle),
        lambda: dispatcher.expert_output_buffer(handle),
        lambda: dispatcher.abandon(handle),
        dispatcher.synchronize,
        dispatcher.reset,
        dispatcher.buffer_sizes,
        dispatcher.epoch,
    ):
        with pytest.raises(HandleError, match="destroyed"):
            call()
    output.recv_x.float().sum()  # the memory lives on while a view does


@pytest.mark.parametrize("variant", PATHS)
def test_calls_after_destroy(run_ranks, variant: str):
    run_ranks(2, _destroyed, _case(variant))


def _with_statement(context: Rank, case: Case) -> None:
    with pytest.raises(ZeroDivisionError), context.dispatcher(case.config()) as dispatcher:
        checks.run_round(context, dispatcher, case.batches(0))
        raise ZeroDivisionError
    with pytest.raises(HandleError, match="destroyed"):
        dispatcher.synchronize()


def test_with_statement_destroys(run_ranks):
    run_ranks(2, _with_statement, _case("rank_direct"))


def _epochs(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as dispatcher:
        for round_idx in range(4):
            assert dispatcher.epoch() == (case.first_epoch + round_idx) % 2**32
            checks.run_round(context, dispatcher, case.batches(round_idx))
        dispatcher.reset()
        assert dispatcher.epoch() == case.first_epoch
        checks.run_round(context, dispatcher, case.batches(0))


def test_epoch_counts_rounds_and_wraps(run_ranks):
    run_ranks(2, _epochs, _case("expert_reduce", first_epoch=2**32 - 2))


def _sizes(context: Rank, config: DispatcherConfig) -> dict[str, int]:
    with context.dispatcher(config) as dispatcher:
        return dispatcher.buffer_sizes()


@pytest.mark.parametrize("num_slots", [1, 3])
def test_buffer_sizes(run_ranks, num_slots: int):
    settings = {"num_experts": 6, "num_topk": 4, "hidden": 512, "max_tokens_per_rank": 16, "num_slots": num_slots}
    rows = 2 * 16
    row_bytes = 512 * 2
    for layout, combine_mode, recv_rows, output_rows in (
        (DispatchLayout.EXPERT_MAJOR, CombineMode.LOCAL_REDUCE, 3 * rows, rows),
        (DispatchLayout.EXPERT_MAJOR, CombineMode.DIRECT_SEND, 3 * rows, 3 * rows),
        (DispatchLayout.RANK_MAJOR, CombineMode.LOCAL_REDUCE, rows, rows),
        (DispatchLayout.RANK_MAJOR, CombineMode.DIRECT_SEND, rows, 4 * rows),
    ):
        config = DispatcherConfig(layout=layout, combine_mode=combine_mode, **settings)
        for sizes in run_ranks(2, _sizes, config):
            assert sizes["recv_x"] == recv_rows * row_bytes * num_slots
            assert sizes["expert_output"] == output_rows * row_bytes * num_slots
            assert sizes["total"] == sum(value for name, value in sizes.items() if name != "total")


# ---------------------------------------------------------------------- ranks that disagree


def _disagree(context: Rank, configs: list[DispatcherConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        context.dispatcher(configs[context.rank])
    with context.dispatcher(configs[0]) as dispatcher:
        checks.run_round(context, dispatcher, _case("expert_reduce").batches(0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens_per_rank", 9),
        ("num_experts", 9),
        ("hidden", 128),
        ("num_topk", 3),
        ("layout", DispatchLayout.RANK_MAJOR),
        ("combine_mode", CombineMode.DIRECT_SEND),
        ("payload", Payload.FP16),
        ("num_slots", 2),
        ("first_epoch", 1),
        ("timeout_s", 7.0),
        ("expert_to_rank", (0, 0, 0, 0, 1, 1, 1, 1)),
    ],
)
def test_ranks_with_unlike_configs(run_ranks, field: str, value: object):
    config = _case("expert_reduce").config()
    unlike = dataclasses.replace(config, weight_mode=None, **{field: value})
    run_ranks(2, _disagree, [config, unlike], f"configs differ.*{field}: rank 1 has ")


def test_owner_outside_the_group(run_ranks):
    config = _case("expert_reduce").config()
    unlike = dataclasses.replace(config, expert_to_rank=(0, 1, 2, 0, 1, 0, 1, 0))
    message = re.escape("expert_to_rank[2] is 2; allowed: 0..1")
    run_ranks(2, _disagree_on_owner, config, unlike, message)


def _disagree_on_owner(context: Rank, config: DispatcherConfig, unlike: DispatcherConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        context.dispatcher(unlike)
    with context.dispatcher(config) as dispatcher:
        checks.run_round(context, dispatcher, _case("expert_reduce").batches(0))


def test_no_process_group():
    with pytest.raises(ConfigError, match=r"init_process_group"):
        Dispatcher(_case("expert_reduce").config(), device="cpu")
    with pytest.raises(ConfigError, match="config is a dict"):
        Dispatcher({}, device="cpu")
