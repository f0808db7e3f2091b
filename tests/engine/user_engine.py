"""An engine of one's own in one file: `engine.name = "tests/engine/user_engine.py:MyEngine"`.

Plain and slow: every request is written by itself, token by token, so its tokens depend on nothing else.
"""

import torch
from transformers import DynamicCache

from podium.errors import InputError
from podium.model.device_thread import on_device_thread
from podium.model.forward import sequence_logprobs
from podium.records import Answer, EngineTraits


class MyEngine:
    traits = EngineTraits(channels=("shared",), shares_weights=True, keeps_order=True)

    def __init__(self, policy, snapshot=False):
        if snapshot:
            raise InputError("MyEngine samples with the trainer's own weights: set run.sync_every = 1, run.max_lag = 0")
        self.policy_version, self._policy = None, policy

    async def generate(self, request, on_tokens=None):
        how, ids, logprobs, versions = request.sampling, list(request.token_ids), [], []
        if len(ids) + how.max_new_tokens > self._policy.max_context_tokens:
            raise InputError(f"{request.label}: the model's context of {self._policy.max_context_tokens} is too short")
        generator, cache, new = torch.Generator().manual_seed(request.seed), DynamicCache(), ids
        while len(logprobs) < how.max_new_tokens and not (logprobs and ids[-1] in how.stop_ids):
            token, logprob, version = await on_device_thread(self._next, new, cache, how, generator)  # cancelled here
            new, ids, logprobs, versions = [token], [*ids, token], [*logprobs, logprob], [*versions, version]
            if on_tokens is not None:
                on_tokens(new)
        reason = "stop" if ids[-1] in how.stop_ids else "length"
        return Answer(tuple(ids[-len(logprobs) :]), tuple(logprobs), reason, (versions[0], versions[-1]))

    @torch.no_grad()
    def _next(self, ids, cache, how, generator):
        read = torch.tensor([ids], device=self._policy.device)
        logits = self._policy.model(read, past_key_values=cache, use_cache=True).logits[0, -1].float().cpu()
        ordered, places = (logits / (how.temperature or 1.0)).sort(descending=True)
        ordered[how.top_k or len(ordered) :] = -torch.inf
        if how.top_p is not None:  # the fewest tokens whose probability reaches it, and always the first
            is_beyond = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) >= how.top_p
            ordered[1:] = ordered[1:].masked_fill(is_beyond[1:], -torch.inf)
        place = 0 if how.temperature == 0 else int(ordered.softmax(-1).multinomial(1, generator=generator))
        return int(places[place]), float(ordered.log_softmax(-1)[place]), self.policy_version

    def release(self, name):
        """Nothing is kept for a group."""

    async def score(self, token_ids):
        return await on_device_thread(sequence_logprobs, self._policy.model, list(token_ids))

    async def load_weights(self, weights, version):
        self.policy_version = version  # the weights are the trainer's own

    def close(self):
        """Nothing was started."""
