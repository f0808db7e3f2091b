"""The judge asks a real `podium serve` in another process: the second server of a run, which is never trained."""

import re
from collections.abc import Iterator

import pytest

from podium.reward.judge import fenced, filled, mark_of
from tests.builders import make_prompt, make_rollout
from tests.reward.test_judge import judged
from tests.server.serving import Running, serving

TEMPLATE = "{answer}\n{question}"
TEXTS = ("#### 3", "#### 4", "no idea")
OPTIONS = {
    "model": "embedded",
    "api_key_env": "JUDGE_KEY",
    "template": TEMPLATE,
    "score_pattern": r"(\d)",
    "highest": 9.0,
    "request": {"temperature": 0.0, "max_tokens": 24},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("judge"), "--model.device=cpu", tcp=True) as running:
        yield running


def reply(server: Running, text: str) -> str:
    """What the served model says to the judge's question about an answer."""
    prompt, rollout = make_prompt(answer="3"), make_rollout(text)
    mark = mark_of(prompt, rollout)
    content = filled(TEMPLATE, {"question": prompt.question, "answer": fenced(text, mark)})
    body = {"model": "embedded", "messages": [{"role": "user", "content": content}], **OPTIONS["request"]}
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_a_served_model_judges(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", server.token)
    digits = [re.findall(r"\d", reply(server, text)) for text in TEXTS]
    assert all(digits), "the embedded model answers sums with digits, whatever stands before them"
    group = judged(f"{server.url}/v1", *TEXTS, **OPTIONS)
    assert group.rewards == pytest.approx([int(found[-1]) / 9 for found in digits])
    assert group.reward_failures == {}
    assert group.reward_counts["judge_requests"] == 3
    assert group.reward_counts["judge_tokens_out"] > 0


def test_without_its_token_the_judge_abstains_and_says_why(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    group = judged(f"{server.url}/v1", "#### 3", **OPTIONS)
    assert group.rewards == (None,)
    assert "401" in next(iter(group.reward_failures))
