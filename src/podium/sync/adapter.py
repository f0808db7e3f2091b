"""Sync through a LoRA folder: a few megabytes per push, and the engine's base model never changes.

For engines in other processes or on other machines, which read the folder that the run writes. The parity check follows
each push.
"""

from podium.sync.disk import Disk


class Adapter(Disk):
    """Works like `disk`, but writes only the adapter, because only the adapter is trained."""
