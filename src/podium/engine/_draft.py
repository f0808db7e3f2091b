"""The answer to one request while its rollouts end one by one, in whatever order."""

from collections.abc import Sequence

from podium.records import Answer, FinishReason, Request


class Draft:
    """`version` is that of the weights when its first token was written."""

    def __init__(self, request: Request, version: int) -> None:
        self._request, self._version = request, version
        self._rollouts: dict[int, tuple[tuple[int, ...], tuple[float, ...], FinishReason, tuple[int, int]]] = {}

    def add(
        self,
        sample: int,
        ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: FinishReason,
        version: int,
        first_version: int | None = None,
    ) -> None:
        """`version` is that of the weights now, when its last token is there; `first_version` where this rollout began
        with other weights than the draft."""
        first = self._version if first_version is None else first_version
        self._rollouts[sample] = (tuple(ids), tuple(logprobs), finish_reason, (first, version))

    @property
    def is_whole(self) -> bool:
        return len(self._rollouts) == len(self._request.seeds)

    def answer(self) -> Answer:
        ids, logprobs, reasons, versions = zip(*(self._rollouts[k] for k in range(len(self._rollouts))), strict=True)
        return Answer(self._request.key, ids, logprobs, reasons, versions)
