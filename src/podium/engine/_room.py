"""Whether what is asked fits into a model's context, asked by engines before they begin."""

from collections.abc import Sequence

from podium.errors import InputError
from podium.records import Request, Sampling


def check_room(requests: Sequence[Request], sampling: Sampling, max_context_tokens: int) -> None:
    """Prompt and longest answer must fit: an engine would cut the answer, or write beyond what the model has learnt."""
    for request in requests:
        if len(request.token_ids) + sampling.max_new_tokens > max_context_tokens:
            raise InputError(
                f"prompt {request.key} has {len(request.token_ids)} tokens and may get {sampling.max_new_tokens} more; "
                f"the engine's context has {max_context_tokens}; shorten one of them"
            )
