# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Training in one process, and the checkpoint that the ranks load."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time

import torch

from mscclpp_dispatcher.demo.corpus import Corpus, batch
from mscclpp_dispatcher.demo.model import ModelConfig, MoeTransformer
from mscclpp_dispatcher.demo.progress import Bars

NUM_SEQUENCES = 16
LEARNING_RATE = 7e-3
WARMUP_STEPS = 20
BALANCE_FACTOR = 0.01
SLOW_MARGIN = 0.1
"""A machine is too slow if the time budget is spent this much further than the steps."""


@dataclasses.dataclass(frozen=True)
class TrainFigures:
    """Held-out loss in nats per byte before and after training, and what it took."""

    start_loss: float
    end_loss: float
    num_steps: int
    seconds: float


@torch.no_grad()
def held_out_loss(model: MoeTransformer, corpus: Corpus, device: torch.device) -> float:
    """Mean over four fixed batches, nats per byte."""
    generator = torch.Generator().manual_seed(1)
    losses = [
        model.loss(batch(corpus.held_out, NUM_SEQUENCES, model.config.context, generator, device))[0] for _ in range(4)
    ]
    return torch.stack(losses).mean().item()


def train(
    config: ModelConfig, corpus: Corpus, *, num_steps: int, max_seconds: float, seed: int, device: torch.device
) -> tuple[MoeTransformer, TrainFigures]:
    """Trains for ``num_steps`` steps, or fewer if ``max_seconds`` (seconds) end first.

    The learning rate falls with the steps, so that equal seeds give equal weights; on a machine too slow
    for them it falls with the time, so that it ends low all the same.
    """
    torch.manual_seed(seed)
    model = MoeTransformer(config).to(device)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    start_loss = held_out_loss(model, corpus, device)
    begin = time.perf_counter()
    step = 0
    with Bars() as bars:
        bar = bars.add("training", num_steps)
        while step < num_steps:
            time_spent = (time.perf_counter() - begin) / max_seconds
            if time_spent >= 1.0:
                break
            spent = step / num_steps if time_spent < step / num_steps + SLOW_MARGIN else time_spent
            rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * math.cos(spent * math.pi / 2))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, balance = model.loss(batch(corpus.train, NUM_SEQUENCES, config.context, generator, device))
            optimizer.zero_grad(set_to_none=True)
            (loss + BALANCE_FACTOR * balance).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 10 == 0 or step == num_steps:
                bars.set(bar, step, f"loss {loss.item():.2f}")
    seconds = time.perf_counter() - begin
    return model, TrainFigures(start_loss, held_out_loss(model, corpus, device), step, seconds)


def save_checkpoint(path: pathlib.Path, model: MoeTransformer, figures: TrainFigures) -> None:
    """Writes sizes, figures and weights (on the CPU) so that ``load_checkpoint`` can read them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    torch.save(
        {"config": dataclasses.asdict(model.config), "figures": dataclasses.asdict(figures), "weights": weights}, path
    )


def load_checkpoint(path: pathlib.Path, config: ModelConfig) -> tuple[dict[str, torch.Tensor], TrainFigures]:
    """Weights as mapped from the file (only the parts that are used get read) and the figures of their training.

    Raises:
        ValueError: the file was made with other sizes than ``config``.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if saved["config"] != dataclasses.asdict(config):
        raise ValueError(
            f"{path} was trained with {saved['config']}, but the options ask for {dataclasses.asdict(config)}; give "
            "the same sizes, or another --checkpoint path"
        )
    return saved["weights"], TrainFigures(**saved["figures"])
