"""Stand-ins with the same interface as the real parts: an engine that answers from a script, and so on."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from podium.records import Answer, Request, Sampling


class FakeEngine:
    """Answers `reply(request, sample index)` = (ids, logprobs); notes what it was given."""

    def __init__(self, reply: Callable[[Request, int], tuple[tuple[int, ...], tuple[float, ...]]]) -> None:
        self.policy_version: int | None = 0
        self.requests: list[Request] = []
        self.loaded: list[int] = []
        self._reply = reply

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        for request in requests:
            self.requests.append(request)
            ids, logprobs = zip(*(self._reply(request, k) for k in range(len(request.seeds))), strict=True)
            yield Answer(
                request.key, ids, logprobs, ("stop",) * len(ids), ((self.policy_version or 0,) * 2,) * len(ids)
            )

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
