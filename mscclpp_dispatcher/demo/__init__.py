# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""A small language model decoded with expert parallelism: ``python -m mscclpp_dispatcher.demo --ranks 4``.

The files, in the order of the run: ``corpus`` (bytes to learn from), ``model`` (the layers),
``train`` (one process), ``decode`` (the step that every rank runs), ``exchange`` (how the rows reach
the experts: the dispatcher, or all ranks in one process), ``worker`` (the rank processes), ``report``
(figures and the plot).
"""
