"""A model behind an OpenAI-compatible endpoint: a text in, its reply out, with retries, a bound and a bill.

Busy and broken servers (408, 425, 429, 5xx, no connection, no answer in time, no completion in the answer) are asked
again after a wait that doubles, or after what `Retry-After` says. Anything else fails at once. Requests, retries,
tokens and cost are counted; what a retry cost on the other side is not known.
"""

import asyncio
import json
import os
import random
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, cached_property
from typing import Annotated, Any

import httpx
from pydantic import Field

from podium.errors import InputError
from podium.reward._counts import count

MAX_REPLY_BYTES = 1 << 20
MAX_WAIT_S = 60.0
"""Longest wait between two tries, whatever a server asks for."""
OWN_FIELDS = ("model", "messages", "stream", "n")

BaseUrl = Annotated[str, Field(pattern=r"^https?://[^@\s]+$", description="such as https://host/v1")]
Model = Annotated[str, Field(min_length=1, description="as the endpoint calls it")]
ApiKeyEnv = Annotated[str | None, Field(description="environment variable that holds the key; None: no key is sent")]
Template = Annotated[str | None, Field(description="what the judge is asked; None: a text of Podium's")]
Request = Annotated[dict[str, Any], Field(description="further fields of each request")]
RequestTimeout = Annotated[float, Field(gt=0, description="seconds for one request")]
MaxTries = Annotated[int, Field(ge=1, description="requests for one rollout at most")]
RetryWait = Annotated[float, Field(ge=0, description="seconds before the second try; doubles from then on")]
Concurrency = Annotated[int, Field(ge=1, description="requests under way at most")]
Price = Annotated[float, Field(ge=0, description="of a million tokens, for reward/NAME_cost")]


class EndpointError(Exception):
    """No reply; the reason is for people."""


class BusyError(EndpointError):
    """Worth another try, after `wait_s` where the server says so."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True)
class Endpoint:
    """`name` is the reward's, for what it counts; the other fields are its options."""

    name: str
    base_url: str
    model: str
    api_key_env: str | None
    request: Mapping[str, Any]
    request_timeout_s: float
    max_tries: int
    retry_s: float
    concurrency: int
    price_in: float
    price_out: float

    def refuse(self) -> None:
        """Before the model loads: a key that is not there, fields that are not the user's."""
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            # the value is not shown: it may be the key itself
            raise InputError(
                f"reward {self.name!r}: api_key_env names no environment variable that is set; put the key into one "
                "and give its name, never the key"
            )
        for field in OWN_FIELDS:
            if field in self.request:
                raise InputError(f"reward {self.name!r}: request.{field} is set by Podium; remove it")

    async def ask(self, text: str) -> str:
        """The model's reply to one user turn."""
        async with self._slots, httpx.AsyncClient(verify=_tls(), timeout=self.request_timeout_s) as client:
            for attempt in range(1, self.max_tries + 1):
                count(f"{self.name}_requests")
                try:
                    async with asyncio.timeout(self.request_timeout_s):
                        return await self._ask_once(client, text)
                except (BusyError, TimeoutError, httpx.TransportError) as error:
                    if attempt == self.max_tries:
                        raise EndpointError(f"{self._described(error)}, {attempt} tries") from None
                    count(f"{self.name}_retries")
                    await asyncio.sleep(self._wait_s(error, attempt))
        raise AssertionError("max_tries is at least 1")

    @cached_property
    def _slots(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self.concurrency)

    async def _ask_once(self, client: httpx.AsyncClient, text: str) -> str:
        body = {**self.request, "model": self.model, "messages": [{"role": "user", "content": text}]}
        headers = {"Content-Type": "application/json"}
        if self.api_key_env is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.api_key_env]}"
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        async with client.stream("POST", url, content=json.dumps(body).encode(), headers=headers) as response:
            content = b""
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > MAX_REPLY_BYTES:
                    raise EndpointError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
        if response.status_code in (408, 425, 429) or response.status_code >= 500:
            raise BusyError(f"status {response.status_code}", _retry_after(response.headers.get("Retry-After")))
        if response.status_code != 200:
            raise EndpointError(f"status {response.status_code}: {self._without_key(content)}")
        return self._reply(content)

    def _reply(self, content: bytes) -> str:
        """The text of a completion, its tokens counted."""
        try:
            completion = json.loads(content)
            reply = completion["choices"][0]["message"]["content"]
            assert isinstance(reply, str)
        except (ValueError, LookupError, TypeError, AssertionError, RecursionError):
            raise BusyError("an answer that is no chat completion") from None
        match completion.get("usage"):
            case {"prompt_tokens": int(tokens_in), "completion_tokens": int(tokens_out)}:
                count(f"{self.name}_tokens_in", tokens_in)
                count(f"{self.name}_tokens_out", tokens_out)
                count(f"{self.name}_cost", (tokens_in * self.price_in + tokens_out * self.price_out) / 1e6)
            case _:
                count(f"{self.name}_replies_without_usage")  # its tokens and cost are not in the sums
        return reply

    def _wait_s(self, error: Exception, attempt: int) -> float:
        """Doubling, with a random part: clients that failed together must not come back together."""
        asked = getattr(error, "wait_s", None)
        wait = self.retry_s * 2 ** (attempt - 1) * random.Random().uniform(0.5, 1.0) if asked is None else asked
        return min(wait, MAX_WAIT_S)

    def _described(self, error: Exception) -> str:
        if isinstance(error, (TimeoutError, httpx.TimeoutException)):
            return f"no answer within {self.request_timeout_s:g} s"
        return str(error) if isinstance(error, BusyError) else f"no connection: {type(error).__name__}"

    def _without_key(self, content: bytes) -> str:
        text = content.decode(errors="replace")
        key = os.environ.get(self.api_key_env or "", "")
        return (text.replace(key, "…") if key else text)[:200]


def _retry_after(given: str | None) -> float | None:
    """Seconds, or a date, or nothing that makes sense."""
    if given is None:
        return None
    try:
        return max(0.0, float(given)) if given.strip().isdigit() else _seconds_until(parsedate_to_datetime(given))
    except (ValueError, TypeError):
        return None


def _seconds_until(date: datetime) -> float:
    aware = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())


@cache
def _tls() -> ssl.SSLContext:
    """Made once: it reads every certificate of the machine."""
    return ssl.create_default_context()
