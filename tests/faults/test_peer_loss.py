# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Ranks that die, stop, come late or never come: the others name them, within the limit, and go on."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import checks
import pytest
import torch
from cases import PATHS, Case, each_variant
from launcher import Rank, RanksFailedError, segments_of

from mscclpp_dispatcher import DispatcherConfig, HandleError, PeerTimeoutError
from mscclpp_dispatcher.reference import ScalingExperts

pytestmark = [pytest.mark.cpu]

LIMIT_S = 3.0
SLACK_S = 3.0  # for a busy machine, on top of the limit


@dataclasses.dataclass(frozen=True)
class Loss:
    """What a survivor saw."""

    ranks: tuple[int, ...]
    phase: str
    epoch: int | None
    seen_epoch: int | None
    message: str
    seconds: float
    is_out_nan: bool = True


def _loss(failure: PeerTimeoutError, begin: float, out: torch.Tensor | None = None) -> Loss:
    return Loss(
        failure.ranks,
        failure.phase,
        failure.epoch,
        failure.seen_epoch,
        str(failure),
        time.monotonic() - begin,
        out is None or bool(out.isnan().all()),
    )


def _check_losses(losses: list[Loss | None], lost: int, phase: str | None = None) -> None:
    survivors = [loss for rank, loss in enumerate(losses) if rank != lost]
    assert all(loss is not None for loss in survivors)
    for loss in survivors:
        assert loss.ranks == (lost,), loss.message
        assert f"rank {lost}" in loss.message
        assert phase is None or loss.phase == phase, loss.message
        assert loss.seconds < LIMIT_S + SLACK_S, loss.message
        assert loss.is_out_nan


def _config(**settings: object) -> DispatcherConfig:
    defaults = {"num_experts": 8, "num_topk": 2, "hidden": 64, "max_tokens_per_rank": 8, "timeout_s": LIMIT_S}
    return DispatcherConfig(**{**defaults, **settings})


def _case(variant: str, num_ranks: int = 4) -> Case:
    (case,) = each_variant("faults", (variant,), num_tokens=(4, 8, 3, 6)[:num_ranks], num_experts=8, num_topk=2)
    return case


def _with_limit(case: Case, **settings: float) -> DispatcherConfig:
    return dataclasses.replace(case.config(), **{"timeout_s": LIMIT_S, **settings})


# ---------------------------------------------------------------------- while the dispatcher is made


def _never_made(context: Rank, lost: int) -> Loss | None:
    if context.rank == lost:
        return None
    begin = time.monotonic()
    with pytest.raises(PeerTimeoutError) as caught:
        context.dispatcher(_config(init_timeout_s=LIMIT_S))
    return _loss(caught.value, begin)


@pytest.mark.parametrize("lost", [0, 3])
def test_b45_rank_that_never_makes_its_dispatcher(fresh_pool, lost: int):
    pool = fresh_pool(4)
    losses = pool.run(_never_made, lost, limit_s=20)
    _check_losses(losses, lost)
    assert all(loss.epoch is None for rank, loss in enumerate(losses) if rank != lost)
    assert not segments_of(pool.pids)


def _dies_while_made(context: Rank, lost: int) -> Loss | None:
    if context.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    return _never_made(context, lost)


def test_b45_rank_that_died_before(fresh_pool):
    pool = fresh_pool(4)
    _check_losses(pool.run(_dies_while_made, 2, limit_s=20, expect_lost=[2]), 2)


# ---------------------------------------------------------------------- between dispatch and combine


def _leave(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        os._exit(0)


def _lost_before_combine(context: Rank, case: Case, lost: int, how: str) -> Loss | None:
    dispatcher = context.dispatcher(_with_limit(case))
    experts = ScalingExperts(dispatcher.config, dispatcher.local_experts, dispatcher.device)
    for round_idx in range(6):
        checks.run_round(context, dispatcher, case.batches(round_idx))
    trip = checks.RoundTrip(context=context, dispatcher=dispatcher, batches=case.batches(6))
    trip.dispatch()
    trip.receive()
    rows = experts(trip.output)
    if context.rank == lost:
        _leave(how)
    out = torch.zeros((trip.batch.num_tokens, case.hidden), dtype=torch.bfloat16)
    begin = time.monotonic()
    with pytest.raises(PeerTimeoutError) as caught:
        dispatcher.combine(rows, trip.handle, out)
    loss = _loss(caught.value, begin, out)
    with pytest.raises(PeerTimeoutError) as again:  # until reset or destroy
        dispatcher.dispatch(*checks.to_device(trip.batch, dispatcher.device))
    assert again.value.ranks == loss.ranks
    begin = time.monotonic()
    dispatcher.destroy()
    assert time.monotonic() - begin < 1.0, "destroy waited"
    with pytest.raises(HandleError, match="destroyed"):
        dispatcher.dispatch(*checks.to_device(trip.batch, dispatcher.device))
    return loss


@pytest.mark.parametrize(
    ("variant", "how"), [*((variant, "kill") for variant in PATHS), ("rank_direct", "stop"), ("rank_direct", "exit")]
)
def test_b45_rank_lost_between_dispatch_and_combine(fresh_pool, variant: str, how: str):
    pool = fresh_pool(4)
    losses = pool.run(_lost_before_combine, _case(variant), 2, how, limit_s=20, expect_lost=[2])
    _check_losses(losses, 2, "combine")
    assert {loss.epoch for loss in losses if loss} == {7}
    assert {loss.seen_epoch for loss in losses if loss} == {6}
    assert not segments_of(pool.pids)


def _lost_before_dispatch(context: Rank, case: Case, lost: int, how: str) -> Loss | None:
    dispatcher = context.dispatcher(_with_limit(case))
    for round_idx in range(5):
        checks.run_round(context, dispatcher, case.batches(round_idx))
    if context.rank == lost:
        _leave(how)
    begin = time.monotonic()
    with pytest.raises(PeerTimeoutError) as caught:
        dispatcher.dispatch(*checks.to_device(case.batches(5)[context.rank], dispatcher.device))
    dispatcher.destroy()
    return _loss(caught.value, begin)


@pytest.mark.parametrize(("lost", "how"), [(1, "kill"), (1, "stop"), (1, "exit"), (0, "kill"), (3, "kill")])
def test_b86_only_the_lost_rank_is_named(fresh_pool, lost: int, how: str):
    """Survivors blamed each other: a rank that waits for the dead one looks late, too."""
    losses = fresh_pool(4).run(_lost_before_dispatch, _case("expert_reduce"), lost, how, limit_s=20, expect_lost=[lost])
    _check_losses(losses, lost, "dispatch")


def _split_with_lost(context: Rank, case: Case, lost: int) -> Loss | None:
    dispatcher = context.dispatcher(_with_limit(case))
    trip = checks.RoundTrip(context=context, dispatcher=dispatcher, batches=case.batches(0), is_split=True)
    if context.rank == lost:
        return None
    begin = time.monotonic()
    with pytest.raises(PeerTimeoutError) as caught:
        trip.dispatch()
        trip.receive()
    dispatcher.destroy()
    return _loss(caught.value, begin)


@pytest.mark.parametrize("variant", PATHS)
def test_rank_that_makes_no_call_is_named_by_the_split_halves(fresh_pool, variant: str):
    _check_losses(fresh_pool(4).run(_split_with_lost, _case(variant), 1, limit_s=20), 1, "dispatch")


# ---------------------------------------------------------------------- processes end


def _raises_on_loss(context: Rank, case: Case) -> None:
    dispatcher = context.dispatcher(_with_limit(case, timeout_s=1.0))
    checks.run_round(context, dispatcher, case.batches(0))
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dispatcher.dispatch(*checks.to_device(case.batches(1)[context.rank], dispatcher.device))
    except PeerTimeoutError:
        raise SystemExit(3) from None  # with the dispatcher alive: its destructor must not hang


def test_survivors_exit_with_a_live_dispatcher(fresh_pool):
    pool = fresh_pool(3)
    with pytest.raises(RanksFailedError, match="the process ended"):
        pool.run(_raises_on_loss, _case("expert_reduce", 3), limit_s=20)
    assert pool.exit_codes(10) == [3, -signal.SIGKILL, 3]
    assert not segments_of(pool.pids)


def _two_rounds(context: Rank, case: Case) -> None:
    with context.dispatcher(case.config()) as dispatcher:
        for round_idx in range(2):
            checks.run_round(context, dispatcher, case.batches(round_idx))


def _killed_in_a_round(context: Rank, case: Case) -> None:
    dispatcher = context.dispatcher(case.config())
    checks.run_round(context, dispatcher, case.batches(0))
    os.kill(os.getpid(), signal.SIGKILL)


def test_b89_killed_runs_leave_no_segments(fresh_pool, run_ranks):
    """Segments of crashed runs filled shared memory; here a healthy job lives beside them."""
    healthy, crashing = _case("rank_direct", 2), _case("expert_reduce", 2)
    for _ in range(3):
        pool = fresh_pool(2)
        pool.run(_killed_in_a_round, crashing, limit_s=20, expect_lost=[0, 1])
        run_ranks(2, _two_rounds, healthy)
        pool.exit_codes(5)
        assert not segments_of(pool.pids)


# ---------------------------------------------------------------------- ranks that fall out of step


def _skips_a_step(context: Rank, case: Case) -> Loss:
    with context.dispatcher(_with_limit(case, timeout_s=2.0)) as dispatcher:
        for round_idx in range(5):
            checks.run_round(context, dispatcher, case.batches(round_idx))
        if context.rank == 1:
            time.sleep(3.0)  # nothing scheduled; its next call comes when rank 0 has given up
        begin = time.monotonic()
        with pytest.raises(PeerTimeoutError) as caught:
            output, handle = dispatcher.dispatch(*checks.to_device(case.batches(5)[context.rank], dispatcher.device))
            experts = ScalingExperts(dispatcher.config, dispatcher.local_experts, dispatcher.device)
            dispatcher.combine(experts(output), handle)
        loss = _loss(caught.value, begin)
        dispatcher.reset()
        for round_idx in range(6, 9):
            checks.run_round(context, dispatcher, case.batches(round_idx))
    return loss


@pytest.mark.parametrize("variant", PATHS)
def test_b06_rank_that_skips_a_step(fresh_pool, variant: str):
    """A rank with nothing scheduled skipped the step; its next call paired with another round's."""
    first, second = fresh_pool(2).run(_skips_a_step, _case(variant, 2), limit_s=30)
    assert (first.ranks, first.phase, first.epoch, first.seen_epoch) == ((1,), "dispatch", 6, 5)
    assert "rank 1" in first.message and "6" in first.message and "5" in first.message
    assert second.ranks == (0,), "the late rank must not get data of a round that rank 0 gave up"
    assert (second.phase, second.epoch) == ("combine", 6)


def _reset_alone(context: Rank) -> Loss | None:
    with context.dispatcher(_config(init_timeout_s=1.0)) as dispatcher:
        if context.rank == 1:
            return None
        begin = time.monotonic()
        with pytest.raises(PeerTimeoutError, match="rank 1") as caught:
            dispatcher.reset()
        return _loss(caught.value, begin)


def test_reset_is_collective_and_bounded(fresh_pool):
    loss, _ = fresh_pool(2).run(_reset_alone, limit_s=20)
    assert loss.ranks == (1,)


def _recover_with_handles_in_flight(context: Rank, case: Case) -> None:
    with context.dispatcher(_with_limit(case, timeout_s=1.0)) as dispatcher:
        held = None
        if context.rank == 0:
            held = dispatcher.dispatch_send(*checks.to_device(case.batches(0)[0], dispatcher.device))
            with pytest.raises(PeerTimeoutError):
                dispatcher.dispatch_recv(held)
        dispatcher.reset()
        if held is not None:
            with pytest.raises(HandleError, match="is consumed"):
                dispatcher.dispatch_recv(held)
        for round_idx in range(3):
            checks.run_round(context, dispatcher, case.batches(round_idx))


@pytest.mark.parametrize("variant", ["rank_reduce_runner", "rank_direct"])
def test_reset_drops_the_handles_in_flight(fresh_pool, variant: str):
    fresh_pool(2).run(_recover_with_handles_in_flight, _case(variant, 2), limit_s=20)
