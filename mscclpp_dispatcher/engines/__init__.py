# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Engines: the code that moves the bytes."""
