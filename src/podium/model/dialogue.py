"""The token ids between two turns of the policy: the end of its turn, what answers it, the header of its next turn.

What the policy wrote is never rendered again. A bridge is the difference between a chat that is rendered with
and without the new messages, so any chat template serves. A template whose difference depends on what stands before it
cannot continue a conversation token by token; such a model is refused before a run starts.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any

from podium.errors import InputError
from podium.model.chat import Message, applied, encoded

PROBES = ("7", "x = 1\n\nyes", "Two words.")
"""Texts with which bridges are checked, as answers of the policy and as messages to it."""
QUESTION: Mapping[str, str] = {"role": "user", "content": "?"}


class Dialogue:
    """Bridges for one tokenizer. Raises `InputError` if its chat template cannot continue a conversation."""

    def __init__(self, tokenizer: Any, stop_ids: Collection[int] = ()) -> None:
        """`stop_ids` end a turn: the template's own end and others, such as the end of a call."""
        self._tokenizer, self._stop_ids = tokenizer, frozenset(stop_ids)
        self.tool_role = "tool" if self._shows_tools() else "user"
        """The role of a tool's result: some templates know no tools."""
        for answer in PROBES:
            for text in PROBES:
                for role in dict.fromkeys((self.tool_role, "user")):
                    self._check(answer, {"role": role, "content": text})

    def bridge(self, messages: Sequence[Message], last_id: int | None) -> tuple[int, ...]:
        """Ids from the end of the policy's turn to the beginning of its next one, with `messages` between them.

        `last_id` is the last id that the policy wrote. If it ended its turn itself, with whichever stop id, the turn is
        not ended twice.
        """
        texts = [message["content"] for message in messages]
        mark = next(number for number in map(str, count(73 * 10**7)) if not any(number in text for text in texts))
        turns = [QUESTION, {"role": "assistant", "content": mark}, *messages]
        ids = encoded(self._tokenizer, turns, after=mark)
        ends_twice = ids[:1] == (last_id,) or (last_id in self._stop_ids and ids[:1] and ids[0] in self._stop_ids)
        return ids[1:] if ends_twice else ids

    def _shows_tools(self) -> bool:
        """Whether the template writes the result of a tool."""
        try:
            return PROBES[2] in applied(self._tokenizer, [QUESTION, {"role": "tool", "content": PROBES[2]}])
        except InputError:
            return False

    def _check(self, answer: str, message: Message) -> None:
        """The rendered chat goes on where the question ended, and after the answer with the bridge, as text and as ids.
        What stands between question and answer may differ: in a prompt, some templates open the thinking there."""
        begun = applied(self._tokenizer, [QUESTION], with_header=False)
        whole = applied(self._tokenizer, [QUESTION, {"role": "assistant", "content": answer}, message])
        end = whole.find(answer, len(begun)) + len(answer)
        ids = [
            self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in (whole[:end], whole)
        ]
        is_continued = whole.startswith(begun) and ids[1][: len(ids[0])] == ids[0]
        if not is_continued or tuple(ids[1][len(ids[0]) :]) != self.bridge([message], None):
            raise InputError(
                "this model's chat template cannot continue a conversation: what it writes between two turns depends "
                f"on the turns (tried: {answer!r}, answered by {message!r}); use rollout.name = 'single_turn', or "
                "another model or template"
            )
