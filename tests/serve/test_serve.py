"""`latte serve` through the real openai client: what it writes, and what it refuses."""

import asyncio
import json
import threading

import jax
import numpy as np
import openai
import pytest

from latte.config import MeshConfig
from latte.generate import Sampling, continuations, generate
from latte.mesh import make_mesh
from latte.run import open_run
from tests import definitions

PROMPTS = ["", "the cat sat on", "né", "a", "once upon a time there was a very long prompt " * 3]


@pytest.fixture(scope="session")
def opened(server):
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        _, tokenizer, model, _ = open_run(server.run_dir)
    return tokenizer, model


@pytest.fixture(scope="session")
def greedy(opened) -> dict[str, str]:
    """What `latte generate` writes after each prompt, alone."""
    tokenizer, model = opened
    pieces = generate(model, tokenizer, PROMPTS, tokens=20, sampling=Sampling(temperature=0))
    return dict(zip(PROMPTS, continuations(pieces, len(PROMPTS)), strict=True))


def complete(server, prompt, **settings):
    settings = {"max_tokens": 20, "temperature": 0, "model": "random", **settings}
    return server.client().completions.create(prompt=prompt, **settings)


def test_a_completion_is_what_generate_writes(server, greedy):
    for prompt in PROMPTS:
        answer = complete(server, prompt)
        assert answer.choices[0].text == greedy[prompt]
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens == 1 + len(prompt.encode())
        assert answer.usage.completion_tokens == 20


def test_requests_beside_each_other_are_as_if_alone(server, greedy):
    """Twelve at once in four slots, of several lengths and samplings."""

    async def ask() -> list:
        client = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0)
        asked = [
            client.completions.create(
                model="random",
                prompt=prompt,
                max_tokens=20 if i < 5 else 7 + i,
                temperature=0 if i < 5 else 1,
                seed=i,
            )
            for i, prompt in enumerate([*PROMPTS, *PROMPTS, "x", "y"])
        ]
        async with client:
            return await asyncio.gather(*asked)

    one, other = asyncio.run(ask()), asyncio.run(ask())
    assert [a.choices[0].text for a in one[:5]] == [greedy[prompt] for prompt in PROMPTS]
    assert [a.choices[0].text for a in one] == [a.choices[0].text for a in other]
    alone = complete(server, "y", temperature=1, seed=11, max_tokens=18)
    assert alone.choices[0].text == one[11].choices[0].text


def test_a_stream_is_the_same_in_pieces(server, greedy):
    stream = complete(server, PROMPTS[1], stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert len(texts) > 2
    assert "".join(texts) == greedy[PROMPTS[1]]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 20


def test_several_prompts_and_choices(server, greedy):
    answer = complete(server, PROMPTS[:2], n=2)
    expected = [greedy[prompt] for prompt in PROMPTS[:2] for _ in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    drawn = complete(server, "a", n=3, temperature=1.5, seed=1)
    assert len({choice.text for choice in drawn.choices}) == 3


def test_a_stop_string_ends_the_text_before_it(server, greedy):
    whole = greedy[PROMPTS[1]]
    stop = whole[5:8]
    expected = whole[: whole.index(stop)]
    for stream in (False, True):
        found = complete(server, PROMPTS[1], stop=["never", stop], stream=stream)
        choices = [c for chunk in found for c in chunk.choices] if stream else found.choices
        assert "".join(choice.text for choice in choices) == expected
        assert choices[-1].finish_reason == "stop"


def test_logprobs_are_those_of_the_definition(server, opened):
    tokenizer, model = opened
    answer = complete(server, "the cat", logprobs=3, max_tokens=6).choices[0].logprobs
    ids = [tokenizer.separator, *b"the cat"]
    for value, others in zip(answer.token_logprobs, answer.top_logprobs, strict=True):
        logits = definitions.logits(definitions.wide(model), np.array(ids))[-1, :257]
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        np.testing.assert_allclose(value, logprobs.max(), atol=1e-4)
        np.testing.assert_allclose(max(others.values()), logprobs.max(), atol=1e-4)
        ids.append(int(logprobs.argmax()))  # each is the likeliest after those before


def test_chat(server):
    client = server.client()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    settings = {"model": "random", "messages": messages, "max_tokens": 12, "temperature": 0}
    answer = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2)
    text = answer.choices[0].message.content
    prompt = "System: Be brief.\n\nUser: Hello\n\nAssistant:"
    assert text == complete(server, prompt, max_tokens=12).choices[0].text
    content = answer.choices[0].logprobs.content
    assert len(content) == 12
    assert all(len(token.top_logprobs) == 2 for token in content)
    stream = client.chat.completions.create(**settings, stream=True)
    pieces = [choice.delta.content for chunk in stream for choice in chunk.choices]
    assert "".join(pieces) == text


def test_tokens_are_a_prompt_too(server, greedy):
    assert complete(server, list(b"a")).choices[0].text == greedy["a"]


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words", "parameter"),
    [
        ({"prompt": "a", "colour": 1}, "unknown field 'colour'", "colour"),
        ({}, "prompt is missing", "prompt"),
        ({"prompt": []}, "prompt has no tokens", "prompt"),
        ({"prompt": [300]}, "tokens from 0 to 256", "prompt"),
        ({"prompt": "\ud800"}, "no valid Unicode text", "prompt"),
        ({"prompt": 3}, "prompt must be a text", "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be", "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature must be a number", "temperature"),
        ({"prompt": "a", "max_tokens": 500}, "this server's limit is 200", "max_tokens"),
        ({"prompt": "a" * 300}, "the prompt has 301 tokens", "max_tokens"),
        ({"prompt": "a", "echo": True}, "does not echo", "echo"),
        ({"prompt": "a", "stop": ["a"] * 5}, "up to 4 texts", "stop"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(server, fields, words, parameter):
    body = json.dumps({"model": "random", **fields}).encode()
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().post("/completions", cast_to=object, content=body)
    assert words in refused.value.body["message"]
    assert refused.value.body["param"] == parameter
    assert refused.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"\xff\xfe", b"{", b"[]", b'{"prompt": "\xff"}'])
def test_a_body_that_is_no_json_is_told_so(server, body):
    with pytest.raises(openai.BadRequestError, match=r"not JSON in UTF-8|a JSON object"):
        server.client().post("/completions", cast_to=object, content=body)


def test_messages_must_be_texts(server):
    client = server.client()
    for messages in ([{"role": "user"}], ["hello"], [{"role": "user", "content": [{"image": 1}]}]):
        with pytest.raises(openai.BadRequestError, match="a role and a content of text"):
            client.chat.completions.create(model="random", messages=messages)


def test_no_such_route(server):
    with pytest.raises(openai.NotFoundError):
        server.client().embeddings.create(model="random", input="a")


def test_too_many_requests_are_refused_and_the_others_served(server, greedy):
    with pytest.raises(openai.RateLimitError, match="in flight, of 12 at most"):
        complete(server, "a", n=13)
    assert complete(server, "a").choices[0].text == greedy["a"]


def test_a_client_that_leaves_frees_its_slot(server, greedy):
    def leave() -> None:
        stream = complete(server, "a", stream=True, max_tokens=190)
        next(iter(stream))
        stream.close()

    threads = [threading.Thread(target=leave) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert complete(server, "a").choices[0].text == greedy["a"]


def test_health_and_models(server):
    client = server.client()
    assert [model.id for model in client.models.list()] == ["random"]
    root = openai.OpenAI(base_url=server.url.removesuffix("/v1"), api_key="none")
    health = root.get("/health", cast_to=object)
    assert (health["status"], health["most"]) == ("ok", 12)
