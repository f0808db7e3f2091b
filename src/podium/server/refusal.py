"""An answer that is not 200: its status and what the client is told."""

from typing import Any


class Refusal(Exception):
    """`message` goes to the client, so it holds no secret and no path of this machine."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.message}
