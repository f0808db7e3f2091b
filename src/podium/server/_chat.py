"""The body of OpenAI's /v1/chat/completions, and answers in its words.

What would change an answer and is not done here (tools, penalties, a grammar) is refused by its name; what only labels
the request is taken and ignored.
"""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from podium.errors import InputError
from podium.model.chat import render
from podium.records import Answer, Request, Sampling
from podium.server.refusal import Refusal
from podium.server.wire import Text, explained
from podium.temperature import Temperature

IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Labels of a request; no answer depends on them."""
NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "top_logprobs": 0, "tools": []}
NEUTRAL |= {"response_format": {"type": "text"}, "parallel_tool_calls": True, "tool_choice": "none"}
"""Values that ask for nothing."""


class Part(BaseModel):
    model_config = ConfigDict(strict=True)
    type: Literal["text"]
    text: Text


class Turn(BaseModel):
    model_config = ConfigDict(strict=True)
    role: Annotated[str, Field(max_length=64)]
    content: Text | Annotated[list[Part], Field(max_length=256)]

    def plain(self) -> dict[str, str]:
        """`developer` is OpenAI's newer name of `system`, which chat templates do not know."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Chat(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=256)]
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[Temperature, Field(le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def parse(cls, body: Any) -> "Chat":
        try:
            made = cls.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            raise Refusal(
                400, explained(error.errors()), param=str(first["loc"][0]) if first["loc"] else None
            ) from None
        for name, value in (made.model_extra or {}).items():
            if value is not None and name not in IGNORED and NEUTRAL.get(name, ...) != value:
                raise Refusal(400, f"{name} is not supported here; leave it out", param=name[:64])
        if None not in (made.max_tokens, made.max_completion_tokens) and made.max_tokens != made.max_completion_tokens:
            raise Refusal(400, "max_tokens and max_completion_tokens differ; give one", param="max_tokens")
        return made

    def prompt(self, tokenizer: Any) -> tuple[int, ...]:
        try:
            return render(tokenizer, [turn.plain() for turn in self.messages])
        except InputError as error:
            raise Refusal(400, str(error), param="messages") from None

    def requests(self, prompt: tuple[int, ...]) -> list[Request]:
        """One an answer, so that each can go out as soon as it is whole."""
        seeds = [secrets.randbits(63) if self.seed is None else (self.seed + k) % (1 << 63) for k in range(self.n or 1)]
        return [Request(key, prompt, (seed,)) for key, seed in enumerate(seeds)]

    def sampling(self, stop_ids: Sequence[int], room: int) -> Sampling:
        """`room`: tokens that the context has left, which is the default of the longest answer."""
        longest = self.max_completion_tokens or self.max_tokens or room
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(longest, temperature, None, None if self.top_p == 1 else self.top_p, tuple(stop_ids))

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def choice(answer: Answer, tokenizer: Any, stops: Sequence[str], with_logprobs: bool) -> dict[str, Any]:
    """One answer: its text without the text that ended it, and why it ended."""
    ids = answer.token_ids[0]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    ends = [text.index(stop) for stop in stops if stop in text]
    told = {"content": text[: min(ends)] if ends else text}
    logprobs = {"content": _logprobs(answer, tokenizer), "refusal": None} if with_logprobs else None
    return {"index": answer.key, **told, "logprobs": logprobs, "finish_reason": answer.finish_reasons[0]}


def _logprobs(answer: Answer, tokenizer: Any) -> list[dict[str, Any]]:
    tokens = [tokenizer.decode([i]) for i in answer.token_ids[0]]
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(tokens, answer.logprobs[0], strict=True)
    ]
