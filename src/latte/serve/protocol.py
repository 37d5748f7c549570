"""What a request of the OpenAI protocol asks for: completions and chat, checked field by field."""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from latte.data.tokenizer import Tokenizer
from latte.generate import Sampling

_MOST_STOPS = 4
_MOST_CHOICES = 128


class RequestError(Exception):
    """What the protocol answers to a request that cannot be served.

    status: of HTTP. parameter: the field that is wrong, where it is one.
    """

    def __init__(
        self, message: str, *, parameter: str | None = None, code: str | None = None, status=400
    ):
        super().__init__(message)
        self.parameter, self.code, self.status = parameter, code, status

    def body(self) -> dict[str, Any]:
        """The protocol's JSON."""
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class Asked:
    """A request in the engine's words.

    kind: "completion" or "chat".
    prompts: tokens, each with a separator in front.
    alternatives: likeliest tokens to report beside each token; None for no log-probabilities.
    """

    kind: str
    prompts: list[list[int]]
    tokens: int
    sampling: Sampling
    choices: int
    seed: int
    stops: list[str]
    alternatives: int | None
    stream: bool
    usage_in_stream: bool


# --- fields ------------------------------------------------------------------------------------


def _number(kind: type, low: float, high: float) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        number = isinstance(value, (int, float) if kind is float else int)
        return number and not isinstance(value, bool) and low <= value <= high

    return fits


def _boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _stops(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    fits = isinstance(stops, list) and len(stops) <= _MOST_STOPS
    return fits and all(isinstance(stop, str) and stop for stop in stops)


def _only(*values: Any) -> Callable[[Any], bool]:
    """For what the protocol has and this server does not do: the values that ask for nothing."""
    return lambda value: value in values


_LARGE = 2**31 - 1
_SHARED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_text, "a name"),
    "max_tokens": (_number(int, 1, _LARGE), "a whole number of at least 1"),
    "temperature": (_number(float, 0, 2), "a number from 0 to 2"),
    "top_p": (_number(float, 1e-9, 1), "a number above 0 and at most 1"),
    "top_k": (_number(int, 0, _LARGE), "a whole number of at least 0"),
    "n": (_number(int, 1, _MOST_CHOICES), f"a whole number from 1 to {_MOST_CHOICES}"),
    "stream": (_boolean, "true or false"),
    "stop": (_stops, f"a text or up to {_MOST_STOPS} texts, none empty"),
    "seed": (_number(int, -(2**63), 2**63 - 1), "a whole number"),
    "user": (_text, "a text"),
    "presence_penalty": (_only(0), "0: this server has no penalties"),
    "frequency_penalty": (_only(0), "0: this server has no penalties"),
    "logit_bias": (_only({}), "empty: this server has no biases"),
    "stream_options": (lambda value: isinstance(value, dict), "an object"),
}
_FIELDS = {
    "completion": {
        **_SHARED,
        "prompt": (
            lambda value: isinstance(value, str | list),
            "a text, tokens, or a list of them",
        ),
        "logprobs": (_number(int, 0, 5), "a whole number from 0 to 5"),
        "echo": (_only(False), "false: this server does not echo"),
        "best_of": (_only(1), "1: this server ranks no choices"),
        "suffix": (_only(""), "empty: this server inserts no text"),
    },
    "chat": {
        **_SHARED,
        "messages": (lambda value: isinstance(value, list) and value, "a list of messages"),
        "max_completion_tokens": (_number(int, 1, _LARGE), "a whole number of at least 1"),
        "logprobs": (_boolean, "true or false"),
        "top_logprobs": (_number(int, 0, 20), "a whole number from 0 to 20"),
        "response_format": (_only({"type": "text"}), "text: this server has no other format"),
    },
}


def _fields(body: bytes, kind: str) -> dict[str, Any]:
    """The fields of a request's JSON, each of its type; those that are null are left out."""
    try:
        fields = json.loads(body.decode())
    except ValueError as error:
        raise RequestError(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    known = _FIELDS[kind]
    for name, value in fields.items():
        if name not in known:
            raise RequestError(f"unknown field {name!r}", parameter=name, code="unknown_parameter")
        fits, words = known[name]
        if value is not None and not fits(value):
            raise RequestError(f"{name} must be {words}", parameter=name)
    return {name: value for name, value in fields.items() if value is not None}


def _tokens_of(value: Any, tokenizer: Tokenizer, name: str) -> list[int]:
    """A prompt, text or tokens, with the separator in front."""
    if isinstance(value, str):
        try:
            return [tokenizer.separator, *tokenizer.encode(value).tolist()]
        except UnicodeError:
            raise RequestError(f"{name} is no valid Unicode text", parameter=name) from None
    if not value:
        raise RequestError(f"{name} has no tokens; give a text or at least one", parameter=name)
    if not all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in value):
        raise RequestError(
            f"{name} must be a text or tokens from 0 to {tokenizer.vocab_size - 1}", parameter=name
        )
    begins = value[0] == tokenizer.separator
    return list(value) if begins else [tokenizer.separator, *value]


def _prompts(value: Any, tokenizer: Tokenizer) -> list[list[int]]:
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts = value if several else [value]
    if not all(isinstance(prompt, str | list) for prompt in prompts):
        raise RequestError("prompt must be all texts or all tokens", parameter="prompt")
    return [_tokens_of(prompt, tokenizer, "prompt") for prompt in prompts]


# --- chat --------------------------------------------------------------------------------------


def _dialogue(messages: list[Any]) -> str:
    """Messages as a text that a model without any chat in its training can go on with."""
    lines = []
    for message in messages:
        fits = isinstance(message, dict) and isinstance(message.get("role"), str)
        content = message.get("content") if fits else None
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            texts = [part for part in parts if isinstance(part, str)]
            content = "".join(texts) if len(texts) == len(content) else None
        if not isinstance(content, str):
            raise RequestError(
                "a message must have a role and a content of text", parameter="messages"
            )
        lines.append(f"{message['role'].capitalize()}: {content}\n\n")
    return "".join([*lines, "Assistant:"])


_TURN = "\n\nUser:"
"""Where an answer ends: the model goes on with the other's words."""


# --- requests ----------------------------------------------------------------------------------


def parse(body: bytes, kind: str, tokenizer: Tokenizer, *, room: int) -> Asked:
    """A request's body.

    Args:
        kind: "completion" or "chat".
        room: most tokens of a prompt with its continuation.

    Raises:
        RequestError: it cannot be served, and why.
    """
    fields = _fields(body, kind)
    needed = "prompt" if kind == "completion" else "messages"
    if needed not in fields:
        raise RequestError(f"{needed} is missing", parameter=needed)
    stops = fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else list(stops)
    if kind == "completion":
        prompts = _prompts(fields["prompt"], tokenizer)
        alternatives = fields.get("logprobs")
    else:
        prompts = [_tokens_of(_dialogue(fields["messages"]), tokenizer, "messages")]
        stops.append(_TURN)
        alternatives = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    longest = max(map(len, prompts))
    asked = fields.get("max_completion_tokens", fields.get("max_tokens"))
    if asked is None:
        asked = 16 if kind == "completion" else room - longest
    if longest + max(asked, 1) > room:
        raise RequestError(
            f"the prompt has {longest} tokens and {asked} more are asked for, but this server's "
            f"limit is {room} together",
            parameter="max_tokens",
            code="context_length_exceeded",
        )
    options = fields.get("stream_options", {})
    sampling = Sampling(
        float(fields.get("temperature", 1.0)), fields.get("top_k", 0), fields.get("top_p", 1.0)
    )
    return Asked(
        kind=kind,
        prompts=prompts,
        tokens=asked,
        sampling=sampling,
        choices=fields.get("n", 1),
        seed=fields.get("seed", secrets.randbits(32)) % 2**32,
        stops=stops,
        alternatives=alternatives,
        stream=fields.get("stream", False),
        usage_in_stream=options.get("include_usage") is True,
    )
