"""Sync for an engine in the trainer's process, which is handed the trainer's tensors.

With full weights, engine and trainer share the same memory; an engine on a CPU packs its large layers again. An
adapter is added to the base weights in the engine's scratch copy. A snapshot engine copies all weights. The parity
check follows each push.
"""

from podium.sync import Channel


class Shared(Channel):
    """Works like every channel, without a detour: see `Channel._carry`."""
