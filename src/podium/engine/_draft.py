"""The answer to one request while its rollouts end one by one, in whatever order."""

from collections.abc import Sequence

from podium.records import Answer, FinishReason, Request


class Draft:
    def __init__(self, request: Request) -> None:
        self._request = request
        self._rollouts: dict[int, tuple[tuple[int, ...], tuple[float, ...], FinishReason]] = {}

    def add(self, sample: int, ids: Sequence[int], logprobs: Sequence[float], finish_reason: FinishReason) -> None:
        self._rollouts[sample] = (tuple(ids), tuple(logprobs), finish_reason)

    @property
    def is_whole(self) -> bool:
        return len(self._rollouts) == len(self._request.seeds)

    def answer(self, version: int) -> Answer:
        ids, logprobs, reasons = zip(*(self._rollouts[k] for k in range(len(self._rollouts))), strict=True)
        return Answer(self._request.key, ids, logprobs, reasons, version)
