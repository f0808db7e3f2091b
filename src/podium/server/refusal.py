"""An answer that is not 200: its status and what the client is told."""

from typing import Any

OPENAI_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """`message` goes to the client, so it holds no secret and no path of this machine. `param` and `code` are for
    OpenAI's clients: the field at fault, and a word for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.message}

    @property
    def openai_body(self) -> dict[str, Any]:
        kind = OPENAI_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body_at(self, path: str) -> dict[str, Any]:
        """In the shape that clients of that path expect."""
        return self.openai_body if path.startswith("/v1/") else self.body
