"""What a judge is asked and what counts of its reply.

The answer under judgement was written by the policy, which is rewarded for whatever makes the judge say a high number.
So it stands between tags with a mark that it cannot know (a hash of itself), and a verdict counts only if it carries
that mark: quoting an answer that contains a verdict of its own does no harm.
"""

import asyncio
import hashlib
import json
import math
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Collection, Mapping
from typing import Any

from podium.errors import InputError
from podium.records import Prompt, Rollout

PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
MAX_REPLY_CHARACTERS = 20_000
"""The end of a longer reply counts."""


MAX_MATCH_S = 2.0
MATCHER = """
import json, re, sys
pattern, text = json.load(sys.stdin)
found = None
for found in re.finditer(pattern, text):
    pass
json.dump(None if found is None else found[1], sys.stdout)
"""


class NoVerdictError(Exception):
    """The reply holds no score that counts."""


def mark_of(prompt: Prompt, rollout: Rollout) -> str:
    """Eight signs that no text contains whose hash they are."""
    text = f"{prompt.question}\0{rollout.seed}\0{rollout.text}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=4).hexdigest()


def refuse_template(name: str, template: str, known: Collection[str]) -> None:
    """Before the model loads: placeholders that do not exist, an answer that is not shown."""
    for word in PLACEHOLDER.findall(template):
        if word not in known:
            raise InputError(
                f"reward {name!r}: {{{word}}} in its template is not known; known: "
                + ", ".join(f"{{{one}}}" for one in known)
            )
    if "{answer}" not in template:
        raise InputError(f"reward {name!r}: its template has no {{answer}}, so there is nothing to judge")


def filled(template: str, values: Mapping[str, str]) -> str:
    """Placeholders replaced in one pass: what stands in a value is never looked at, and nothing is evaluated."""
    return PLACEHOLDER.sub(lambda found: values[found[1]], template)


def fenced(text: str, mark: str) -> str:
    """The answer between tags that it cannot close."""
    return f"<answer-{mark}>\n{text}\n</answer-{mark}>"


def last_verdict(reply: str, key: str, mark: str | None) -> Any:
    """The value of `key` in the last JSON object of the reply that has it, and the mark where one is asked for."""
    reply = reply[-MAX_REPLY_CHARACTERS:]
    decoder = json.JSONDecoder()
    for start in reversed([found.start() for found in re.finditer(r"\{", reply)]):
        try:
            verdict, _ = decoder.raw_decode(reply, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(verdict, dict) and key in verdict and mark in (None, verdict.get("id")):
            return verdict[key]
    raise NoVerdictError(f"no verdict in the reply that ends with {reply[-60:]!r}")


async def last_match(reply: str, pattern: str, mark: str) -> str:
    """The first group of the last match; `{id}` in the pattern is the mark.

    Some patterns take for ever on some replies, so it is looked for in a process that can be killed.
    """
    given = json.dumps([pattern.replace("{id}", mark), reply[-MAX_REPLY_CHARACTERS:]]).encode()
    command = (sys.executable, "-I", "-S", "-c", MATCHER)
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    try:
        written, _ = await asyncio.wait_for(process.communicate(given), MAX_MATCH_S)
    except TimeoutError:
        raise NoVerdictError(f"score_pattern took longer than {MAX_MATCH_S:g} s on the reply") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = json.loads(written or b"null")
    if found is None:
        raise NoVerdictError(f"no verdict in the reply that ends with {reply[-60:]!r}")
    return found


def number(given: Any, lowest: float, highest: float) -> float:
    """A score within its range; some judges write numbers as texts."""
    try:
        score = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not lowest <= score <= highest:
        raise NoVerdictError(f"the score {given!r:.40} is no number from {lowest:g} to {highest:g}")
    return score
