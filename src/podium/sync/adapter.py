"""Sync by a LoRA folder: a few megabytes a push, and the engine's base model is never touched.

For engines in other processes or on other machines, which read the folder that the run writes. Each push is followed
by the parity probe.
"""

from podium.sync.disk import Disk


class Adapter(Disk):
    """The way of `disk`; what is written is the adapter, because only that is trained."""
