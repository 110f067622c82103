# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The exceptions that the dispatcher raises; each docstring says what the caller does next."""


class DispatcherError(Exception):
    """Base of every error below; catch this one to catch them all."""


class ConfigError(DispatcherError, ValueError):
    """A setting is out of range, or the ranks disagree on it.

    Raised while a config or a dispatcher is made, on every rank. Change the named setting and make
    the dispatcher again.
    """


class InputError(DispatcherError, ValueError):
    """A tensor given to a call has a wrong dtype, shape, stride, device or value.

    Raised before anything is sent. The dispatcher is unchanged: repeat the call with valid input.
    On a GPU a bad expert id in device memory is dropped by the kernel and reported by the next call.
    """


class CapacityError(InputError):
    """More tokens than ``max_tokens_per_rank`` or more dispatches in flight than ``num_slots``.

    Raised before anything is sent. Split the batch, or make the dispatcher with a larger setting.
    """


class HandleError(DispatcherError, RuntimeError):
    """A handle is foreign, stale or already consumed, or the dispatcher is destroyed.

    Raised before anything is sent. Other live handles stay valid.
    """


class PeerTimeoutError(DispatcherError, TimeoutError):
    """A rank did not do its part within the time limit.

    The outputs of the interrupted call are invalid. Either call ``reset()`` on all ranks, or
    ``destroy()`` (which waits for no peer) and exit.

    Attributes:
        ranks: the ranks, in the group's numbering, that held up the exchange.
        phase: ``"dispatch"``, ``"combine"``, or the name of a step of ``initialize``.
        epoch: the round that was waited for (low 32 bits), or None during ``initialize``.
        seen_epoch: the last round seen from the first of ``ranks``, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: tuple[int, ...] = (),
        phase: str = "",
        epoch: int | None = None,
        seen_epoch: int | None = None,
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.phase = phase
        self.epoch = epoch
        self.seen_epoch = seen_epoch
