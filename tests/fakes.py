"""Stand-ins with the same interface as the real parts: an engine that answers from a script, and so on."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from podium.records import Answer, EngineTraits, Request
from podium.stages import OnTokens


class FakeEngine:
    """Answers `reply(request)` = (ids, logprobs); notes what it was given. An exception in place of them is raised."""

    traits = EngineTraits(channels=("shared",), keeps_order=True)

    def __init__(self, reply: Callable[[Request], tuple[tuple[int, ...], tuple[float, ...]]]) -> None:
        self.policy_version: int | None = 0
        self.requests: list[Request] = []
        self.loaded: list[int] = []
        self.released: list[str] = []
        self.num_outstanding = 0
        self._reply = reply

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Answer:
        self.requests.append(request)
        self.num_outstanding += 1
        try:
            await self.turn(request)
            ids, logprobs = self._reply(request)
        finally:
            self.num_outstanding -= 1
        if on_tokens is not None:
            on_tokens(ids)
        return Answer(ids, logprobs, "stop", (self.policy_version or 0,) * 2)

    async def turn(self, request: Request) -> None:
        """Waits until the request is answered: here until all requests of the same turn are outstanding."""
        await asyncio.sleep(0)

    def release(self, name: str) -> None:
        self.released.append(name)

    def close(self) -> None:
        pass

    async def load_folder(self, folder: Any, version: int) -> None:
        raise NotImplementedError

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    async def load_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self.loaded.append(version)
        self.policy_version = version


class FakeTokenizer:
    """One token a character code."""

    all_special_tokens: Sequence[str] = ()

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int]:
        return [ord(token) for token in tokens]

    def __len__(self) -> int:
        return 128

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]
