"""Whether a request fits into a model's context."""

from podium.errors import InputError
from podium.records import Request


def check_room(request: Request, max_context_tokens: int) -> None:
    """Refuses a request whose longest answer does not fit. An engine would cut the answer, or write beyond the context
    that the model was trained for."""
    length, longest = len(request.token_ids), request.sampling.max_new_tokens
    if length + longest > max_context_tokens:
        raise InputError(
            f"{request.label} has {length} tokens and may get {longest} more; the engine's context has "
            f"{max_context_tokens}; shorten the prompt or lower max_new_tokens"
        )
