# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""MoE token dispatch and combine for expert parallelism."""

from mscclpp_dispatcher.api import Dispatcher
from mscclpp_dispatcher.bootstrap import StoreGroup
from mscclpp_dispatcher.config import (
    NO_EXPERT,
    CombineMode,
    CopyPath,
    DispatcherConfig,
    DispatchLayout,
    DispatchMode,
    ExpertIdSpace,
    Payload,
    WeightMode,
)
from mscclpp_dispatcher.engine import Capabilities
from mscclpp_dispatcher.errors import (
    CapacityError,
    ConfigError,
    DispatcherError,
    HandleError,
    InputError,
    PeerTimeoutError,
)
from mscclpp_dispatcher.types import DispatchHandle, DispatchOutput

__all__ = [
    "NO_EXPERT",
    "Capabilities",
    "CapacityError",
    "CombineMode",
    "ConfigError",
    "CopyPath",
    "DispatchHandle",
    "DispatchLayout",
    "DispatchMode",
    "DispatchOutput",
    "Dispatcher",
    "DispatcherConfig",
    "DispatcherError",
    "ExpertIdSpace",
    "HandleError",
    "InputError",
    "Payload",
    "PeerTimeoutError",
    "StoreGroup",
    "WeightMode",
]
