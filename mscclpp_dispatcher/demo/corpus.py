# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Text that every machine with Python has: the sources of the standard library, as bytes."""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig

import torch

HELD_OUT_EVERY = 10
"""Every tenth file is kept from training; loss is measured there and prompts are cut from it."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Byte tokens.

    Attributes:
        train: uint8 ``[num_bytes]``, on the CPU.
        held_out: uint8 ``[num_bytes]``, from other files than ``train``.
        num_files: files read for both.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    num_files: int


def load_corpus(max_bytes: int = 4_000_000) -> Corpus:
    """Reads the standard library's top-level ``.py`` files by name, until ``max_bytes`` bytes.

    Raises:
        FileNotFoundError: this Python came without its sources.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    num_bytes = num_files = 0
    for path in sorted(folder.glob("*.py")):
        text = path.read_bytes()
        if not text or num_bytes + len(text) > max_bytes:
            continue
        parts[num_files % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(text)
        num_bytes += len(text)
        num_files += 1
    if not parts[1]:
        raise FileNotFoundError(
            f"{folder} holds {num_files} .py files; the demo learns from the standard library's sources and needs at "
            f"least {HELD_OUT_EVERY} of them"
        )
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return Corpus(train=train, held_out=held_out, num_files=num_files)


def batch(
    text: torch.Tensor, num_sequences: int, num_bytes: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Random windows of ``text``: int64 ``[num_sequences, num_bytes + 1]`` on ``device``."""
    starts = torch.randint(0, text.numel() - num_bytes, (num_sequences, 1), generator=generator)
    return text[starts + torch.arange(num_bytes + 1)].to(device, torch.int64)


def prompts(text: torch.Tensor, num_prompts: int, num_bytes: int) -> torch.Tensor:
    """Windows that begin at a ``def`` line, spread evenly over ``text``: uint8 ``[num_prompts, num_bytes]``.

    Prompts repeat when the text holds fewer ``def`` lines than ``num_prompts``.
    """
    data = bytes(text.tolist())
    starts = []
    position = data.find(b"\n    def ")
    while position >= 0 and position + 1 + num_bytes <= len(data):
        starts.append(position + 1)
        position = data.find(b"\n    def ", position + 1)
    if not starts:
        raise ValueError(f"the held-out text has no method of {num_bytes} bytes or more to cut prompts from")
    chosen = [starts[prompt_idx * len(starts) // num_prompts] for prompt_idx in range(num_prompts)]
    return torch.stack([text[start : start + num_bytes] for start in chosen])
