"""What must be said to Ray before it is imported.

Ray's processes run whatever they are sent. A cluster of our own therefore listens on loopback only and asks for a
token, which nobody is told and which ends with this process.
"""

import importlib.util
import os
import secrets
import sys

from podium.errors import InputError

OWN = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # which means: one node, on loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # who asks for no GPU sees none
    "RAY_process_group_cleanup_enabled": "true",
    "RAY_worker_niceness": "0",  # they are the run, not something beside it
}
"""Read as Ray is imported, and by the processes that it starts."""


def prepare_import(address: str | None) -> None:
    """An `InputError` where Ray is not there, or not as it should be."""
    if importlib.util.find_spec("ray") is None:
        raise InputError("runtime.name = 'ray' needs Ray: pip install 'podium-rl[ray]'")
    if address is not None:
        if "://" in address:
            raise InputError(f"runtime.address = {address!r}: give 'auto' or host:port")
        return
    if "ray" in sys.modules and os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0":
        raise InputError(
            "ray was imported before podium could see to it that a cluster of the run's own is on loopback; set "
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before that import, or give runtime.address"
        )
    os.environ |= OWN
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
