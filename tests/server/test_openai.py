"""The real `openai` client talks to a real `podium serve` of a trained run."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from podium.export import export
from podium.model.load import EMBEDDED
from tests.exporting import QUESTIONS, greedy, plain_model, trained_run
from tests.server.serving import Running, serving


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("openai"))


@pytest.fixture(scope="module")
def server(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("server"), model=str(run), tcp=True) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.token, max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, question: str = QUESTIONS[0], **others):
    return client.chat.completions.create(
        **({"model": "run", "messages": [{"role": "user", "content": question}]} | others)
    )


def test_the_served_run_is_listed_by_a_name_that_tells_no_path(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["run"]
    assert client.models.retrieve("run").owned_by == "podium"


def test_greedy_answers_are_those_of_the_merged_model(client: openai.OpenAI, run: Path, tmp_path: Path) -> None:
    export(str(run), tmp_path / "merged", merge=True)
    model, tokenizer = plain_model(tmp_path / "merged")
    expected = [tokenizer.decode(ids, skip_special_tokens=True) for ids in greedy(model, tokenizer)]
    made = [ask(client, question, temperature=0, max_tokens=24) for question in QUESTIONS]
    assert [each.choices[0].message.content for each in made] == expected
    assert {each.choices[0].finish_reason for each in made} == {"stop"}


def test_tokens_are_counted(client: openai.OpenAI) -> None:
    made = ask(client, temperature=0, logprobs=True)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    assert made.usage is not None
    assert made.usage.completion_tokens == len(made.choices[0].logprobs.content)
    turns = [{"role": "user", "content": QUESTIONS[0]}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert made.usage.prompt_tokens == len(ids)
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens


def test_logprobs_belong_to_their_tokens(client: openai.OpenAI) -> None:
    made = ask(client, temperature=1.0, seed=3, logprobs=True).choices[0]
    tokens = made.logprobs.content
    written = "".join(each.token for each in tokens)
    assert written.startswith(made.message.content)
    assert all(each.logprob <= 1e-6 for each in tokens)
    assert bytes(tokens[0].bytes).decode() == tokens[0].token
    assert ask(client, logprobs=False).choices[0].logprobs is None


def test_the_same_seed_gives_the_same_answers_and_n_gives_several(client: openai.OpenAI) -> None:
    one, two = (ask(client, n=6, temperature=1.5, seed=11) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices]
    assert [choice.index for choice in one.choices] == list(range(6))
    assert len(set(texts)) > 1
    other = [choice.message.content for choice in ask(client, n=6, temperature=1.5, seed=12345).choices]
    assert other != texts


def test_a_small_top_p_is_greedy(client: openai.OpenAI) -> None:
    sharp = ask(client, temperature=2.0, top_p=1e-6, seed=5).choices[0].message.content
    assert sharp == ask(client, temperature=0).choices[0].message.content


def test_an_answer_is_cut_at_its_longest_and_says_so(client: openai.OpenAI) -> None:
    for key in ("max_tokens", "max_completion_tokens"):
        made = ask(client, temperature=0, **{key: 3})
        assert made.choices[0].finish_reason == "length"
        assert made.usage.completion_tokens == 3


def test_an_answer_ends_before_its_stop_text(client: openai.OpenAI) -> None:
    whole = ask(client, temperature=0).choices[0].message.content
    assert "\n####" in whole
    for stop in ("\n####", ["nothing like it", "\n####"]):
        made = ask(client, temperature=0, stop=stop).choices[0]
        assert made.message.content == whole.partition("\n####")[0]
        assert made.finish_reason == "stop"


def test_a_stream_holds_the_same_answers(client: openai.OpenAI) -> None:
    whole = ask(client, n=3, temperature=1.0, seed=7)
    chunks = list(ask(client, n=3, temperature=1.0, seed=7, stream=True, stream_options={"include_usage": True}))
    texts, reasons = dict.fromkeys(range(3), ""), {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert [texts[index] for index in range(3)] == [choice.message.content for choice in whole.choices]
    assert [reasons[index] for index in range(3)] == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_content_may_come_in_parts_and_developers_are_the_system(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": QUESTIONS[0][:8]}, {"type": "text", "text": QUESTIONS[0][8:]}]
    made = ask(client, messages=[{"role": "user", "content": parts}], temperature=0)
    assert made.choices[0].message.content == ask(client, temperature=0).choices[0].message.content


@pytest.mark.parametrize(
    ("others", "param", "message"),
    [
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ; give one"),
        ({"max_tokens": 10_000}, "max_tokens", "more than the context of 512"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": "1" * 600}]}, "messages", "the context has 512"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "frequency_penalty is not supported here; leave it out"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs", "top_logprobs is not supported here"),
        ({"response_format": {"type": "json_object"}}, "response_format", "is not supported here"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools", "is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_in_openais_shape(
    client: openai.OpenAI, others: dict, param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **others)
    assert message in caught.value.body["message"]
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_labels_and_values_that_ask_for_nothing_are_taken(client: openai.OpenAI) -> None:
    assert ask(client, user="me", frequency_penalty=0, metadata={"a": "b"}, max_tokens=4).choices


def test_another_models_name_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-4")
    assert caught.value.code == "model_not_found"
    assert caught.value.body["message"] == "the model served here is 'run'"


def test_a_wrong_key_is_refused_in_openais_shape(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong" * 5, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            ask(client)
        assert caught.value.body["type"] == "authentication_error"
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_an_unknown_path_is_told_in_openais_shape_there_and_in_ours_elsewhere(server: Running) -> None:
    with server.client() as client:
        assert client.post("/v1/embeddings", json={}).json()["error"]["type"] == "not_found_error"
        assert client.post("/nothing", json={}).json() == {"error": "Not Found"}


def test_people_may_ask_while_a_run_owns_the_weights(server: Running, client: openai.OpenAI) -> None:
    with server.client() as plain:
        assert plain.post("/claim", json={"run": "mine", "scope": "run"}).status_code == 200
        assert ask(client, max_tokens=2).system_fingerprint == "policy-version-0"
        assert plain.post("/release", json={"run": "mine"}).status_code == 200


@pytest.mark.parametrize(
    "content", [b"{", b"", b"nope", b'{"model": "run", "messages": [{"role": "user", "content": "\\ud800"}]}']
)
def test_a_body_that_is_no_request_is_the_clients_error(server: Running, content: bytes) -> None:
    with server.client() as client:
        headers = {"content-type": "application/json"}
        answer = client.post("/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]
        text = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
        assert client.post("/generate", content=text, headers=headers).status_code == 422


@pytest.mark.parametrize("temperature", [1e-40, 1e-9, 0.0009])
def test_a_temperature_that_no_float_can_divide_by_is_refused(client: openai.OpenAI, temperature: float) -> None:
    with pytest.raises(openai.BadRequestError, match=r"at least 0\.001"):
        ask(client, temperature=temperature)
