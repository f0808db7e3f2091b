"""Whether the model hub can be reached, asked before a library retries for half a minute."""

import os
import socket
from urllib.parse import urlsplit

CONNECT_S = 4.0


def hub_is_reachable() -> bool:
    """Behind a proxy it is taken to be: only the library knows the way."""
    from huggingface_hub import constants

    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection(
            (hub.hostname, hub.port or (80 if hub.scheme == "http" else 443)), timeout=CONNECT_S
        ).close()
    except OSError:
        return False
    return True
