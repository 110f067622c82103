# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""A byte-level transformer with a mixture of experts in every block.

The dense part (embedding, attention, router, head) computes in float32 and lies on every rank; the
experts' inputs and outputs are bfloat16 rows, the dispatcher's payload. Shapes: B sequences, S
context, H hidden, E experts in all, L experts held here, F inner size of an expert, K top-k.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
NUM_HEADS = 4


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes; saved with the weights and compared when they are loaded."""

    hidden: int = 64
    num_layers: int = 2
    num_experts: int = 8
    num_topk: int = 2
    context: int = 128

    @property
    def inner(self) -> int:
        """F: inner size of an expert."""
        return 2 * self.hidden


class Experts(nn.Module):
    """The experts of one block that this process holds.

    Attributes:
        w_in, w_out: ``[L, H, F]`` and ``[L, F, H]``, float32 to train; ``freeze`` makes them bfloat16.
    """

    def __init__(self, config: ModelConfig, num_held: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(num_held, config.hidden, config.inner))
        self.w_out = nn.Parameter(torch.empty(num_held, config.inner, config.hidden))
        nn.init.normal_(self.w_in, std=config.hidden**-0.5)
        nn.init.normal_(self.w_out, std=config.inner**-0.5)

    def freeze(self) -> None:
        """Rounds the weights to the payload's bfloat16; from here on only ``forward`` is used."""
        for weight in (self.w_in, self.w_out):
            weight.requires_grad_(False)
            rounded = weight.data.to(torch.bfloat16)
            # CPUs without bfloat16 units multiply float32 about 10 times faster; the values are the same.
            weight.data = rounded.float() if rounded.device.type == "cpu" else rounded

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Every held expert on its padded rows: bfloat16 ``[L, rows, H]`` to the same shape.

        The shapes do not depend on the routing, so the step can be captured in a CUDA graph. Rows
        never mix: what stands in the unused ones has no effect on the others.

        Args:
            out: where to write, such as ``Dispatcher.expert_output_buffer``; None allocates.
        """
        if x.device.type == "cpu":
            rows = torch.bmm(functional.silu(torch.bmm(x.float(), self.w_in)), self.w_out)
            return rows.to(x.dtype) if out is None else out.copy_(rows)
        return torch.bmm(functional.silu(torch.bmm(x, self.w_in)), self.w_out, out=out)

    def train_forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Float32 rows ``[N, H]`` through their own experts, all held here: ids and weights ``[N, K]``."""
        order = ids.flatten().argsort(stable=True)
        token_of = order // ids.shape[1]
        counts = torch.bincount(ids.flatten(), minlength=self.w_in.shape[0]).tolist()
        pieces = [
            functional.silu(rows @ self.w_in[expert_idx]) @ self.w_out[expert_idx]
            for expert_idx, rows in enumerate(x[token_of].split(counts))
        ]
        weighted = torch.cat(pieces) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token_of, weighted)


class Block(nn.Module):
    """Attention, then a mixture of experts; both add to the residual stream."""

    def __init__(self, config: ModelConfig, num_held: int) -> None:
        super().__init__()
        self.config = config
        self.norm_attention = nn.LayerNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.project = nn.Linear(config.hidden, config.hidden, bias=False)
        self.norm_experts = nn.LayerNorm(config.hidden)
        self.router = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.experts = Experts(config, num_held)

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkv = self.qkv(self.norm_attention(x))
        return tuple(part.unflatten(-1, (NUM_HEADS, -1)) for part in qkv.chunk(3, dim=-1))

    def attend_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention over whole sequences ``[B, S, H]``, for training."""
        q, k, v = (part.transpose(1, 2) for part in self._heads(x))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.project(mixed.transpose(1, 2).flatten(2))

    def attend_step(
        self, x: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """One token of each sequence, ``[B, H]``, against the whole static cache.

        Args:
            k_cache, v_cache: float32 ``[B, heads, S, H / heads]``; entry ``position`` is written.
            position: int64 ``[1]``; later entries of the cache are masked.
        """
        q, k, v = (part.unsqueeze(2) for part in self._heads(x))
        k_cache.index_copy_(2, position, k)
        v_cache.index_copy_(2, position, v)
        scores = q @ k_cache.transpose(2, 3) * q.shape[-1] ** -0.5
        is_future = torch.arange(k_cache.shape[2], device=x.device) > position
        mixed = scores.masked_fill(is_future, float("-inf")).softmax(-1) @ v_cache
        return x + self.project(mixed.flatten(1))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows for the experts ``[..., H]``, their ids (int64) and weights (float32) ``[..., K]``, and logits."""
        rows = self.norm_experts(x)
        logits = self.router(rows)
        best, ids = logits.topk(self.config.num_topk, dim=-1)
        return rows, ids, best.softmax(-1), logits


class MoeTransformer(nn.Module):
    """The language model; ``num_held`` experts of each block are stored (all of them to train)."""

    def __init__(self, config: ModelConfig, num_held: int | None = None) -> None:
        super().__init__()
        self.config = config
        num_held = config.num_experts if num_held is None else num_held
        self.tokens = nn.Embedding(VOCABULARY, config.hidden)
        self.positions = nn.Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(Block(config, num_held) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Residual stream ``[..., H]`` to scores of the next byte ``[..., 256]``."""
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross entropy in nats per byte of ``[B, S + 1]``, and the router's balance loss (1 = even)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        balance = x.new_zeros(())
        for block in self.blocks:
            x = block.attend_sequence(x)
            rows, ids, weights, router_logits = block.route(x.flatten(0, 1))
            x = x + block.experts.train_forward(rows, ids, weights).view_as(x)
            share = torch.bincount(ids.flatten(), minlength=self.config.num_experts) / ids.numel()
            balance = balance + self.config.num_experts * (share * router_logits.softmax(-1).mean(0)).sum()
        loss = functional.cross_entropy(self.logits(x).flatten(0, 1), targets.flatten())
        return loss, balance / len(self.blocks)

    @staticmethod
    def for_rank(
        config: ModelConfig, weights: dict[str, torch.Tensor], held: tuple[int, ...], device: torch.device
    ) -> MoeTransformer:
        """The frozen model of one rank: all dense weights, and of the experts only ``held`` (global ids)."""
        model = MoeTransformer(config, len(held))
        index = torch.tensor(held, dtype=torch.int64)
        model.load_state_dict({name: value[index] if ".experts." in name else value for name, value in weights.items()})
        model.requires_grad_(False).to(device).eval()
        for block in model.blocks:
            block.experts.freeze()
        return model
