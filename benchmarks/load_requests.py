"""Random completion requests for a server under load: what a client may ask for, and how it may behave.

An `Ask` is one request. Most are read to their end, whole or streamed; some clients leave before the first
token, while the prompt is read, or in the middle of an answer; some requests are invalid and must be refused.
The same seed draws the same requests.
"""

import importlib.util
import random
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

SOURCES = ("argparse", "calendar", "enum", "pickle", "tarfile")
JSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"regex": r"[a-z_]{4} [0-9]{6}\n"},
    {"json": JSON},
    {"choice": ["True", "False", "None or less"]},
    {"grammar": 'root ::= ("ab" | "c" | " ")+ "."'},
]
SHARES = {"stream": 0.35, "leave": 0.18, "refused": 0.07}  # of all requests; the others are read whole
SAMPLED = 0.2  # of the requests; Triton's interpreter takes 0.1 s to draw a row's token
DRAWN = 12  # the most tokens of such an answer
UNSEEDED = 0.03


class Ask(NamedTuple):
    """A request and its client."""

    number: int
    manner: str  # "whole", "stream", "leave" or "refused"
    body: dict[str, Any]  # as /v1/completions takes it
    leave_after: float  # seconds of waiting before the client leaves; only where leave_events is 0
    leave_events: int  # events of a stream that are read before it leaves
    seeded: bool  # whether plain decoding must give the same tokens


class Requests:
    """Draws requests for a server of `model` with room for `max_model_len` tokens."""

    def __init__(self, seed: int, *, model: str, tokenizer: Path, max_model_len: int) -> None:
        self._random = random.Random(seed)
        self._model, self._room = model, max_model_len
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._texts = [self._ids(module) for module in SOURCES]
        self._count = 0

    def _ids(self, module: str) -> list[int]:
        """The beginning of a standard library module, which the models were trained on."""
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")[:16000]
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def draw(self) -> Ask:
        random, self._count = self._random, self._count + 1
        manner = random.choices(["whole", *SHARES], [1 - sum(SHARES.values()), *SHARES.values()])[0]
        body = {"model": self._model, "return_token_ids": True, **self._lengths(), **self._parameters()}
        if body["temperature"]:
            body["max_tokens"] = min(body["max_tokens"], DRAWN)
        if "min_tokens" in body:
            body["min_tokens"] = min(body["min_tokens"], body["max_tokens"])
        after, events = 0.0, 0
        if manner == "leave":
            body["stream"] = random.random() < 0.7
            body["max_tokens"] = max(body["max_tokens"], min(60, self._room - 300))
            body["prompt"] = self._prompt(random.choice([12, 90, 250]))
            after = random.choice([0.0, 0.01, 0.1, 0.5])
            events = random.choice([0, 1, 2, 4]) if body["stream"] else 0
        elif manner == "stream":
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        elif manner == "refused":
            body |= self._mistake()
        seeded = not body["temperature"] or "seed" in body
        return Ask(self._count, manner, body, after, events, seeded)

    def _prompt(self, length: int) -> list[int] | str:
        """Few beginnings, so that prefixes come again; one in eight as text."""
        ids = self._random.choice(self._texts)
        start = 137 * self._random.randrange(2)
        taken = ids[start : start + length]
        if self._random.random() < 0.125 and length < self._room - 100:
            return str(self._tokenizer.decode(taken))
        return taken

    def _lengths(self) -> dict[str, Any]:
        random = self._random
        kinds = {"short": 42, "block": 15, "long": 13, "deep": 14, "full": 6, "one": 10}
        kind = random.choices(list(kinds), list(kinds.values()))[0]
        prompt, answer = random.randint(4, 60), random.randint(2, 40)
        if kind == "block":  # around the ends of cache blocks
            prompt = 32 * random.randint(1, 4) + random.randint(-1, 1)
        elif kind == "long":
            prompt = random.randint(100, self._room - 60)
        elif kind == "deep":  # grows over many blocks: who does so while the cache is full is preempted
            answer = random.randint(60, 160)
        elif kind == "full":  # the last token that the context has room for
            answer = random.choice([1, 5, 16])
            prompt = self._room - answer
        elif kind == "one":
            answer = 1
        body: dict[str, Any] = {"prompt": self._prompt(prompt), "max_tokens": answer}
        return body | {"ignore_eos": random.random() < 0.8}

    def _parameters(self) -> dict[str, Any]:
        """A quarter of the requests ask for nothing; the others for one to four things."""
        random = self._random
        body: dict[str, Any] = {"temperature": 0}
        if random.random() < SAMPLED:
            body |= {"temperature": random.choice([0.3, 0.8, 1.2]), "seed": random.randrange(10_000)}
            if random.random() < UNSEEDED / SAMPLED:
                del body["seed"]
            else:
                body |= random.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"n": 2}])
        if random.random() < 0.25:
            return body
        choices: list[dict[str, Any]] = [
            {"repetition_penalty": 1.2},
            {"presence_penalty": 0.7},
            {"frequency_penalty": 0.6},
            {"logprobs": random.choice([0, 3])},
            {"logit_bias": {"11": 4.0, "202": -100.0, "300": 2.5}},
            {"bad_words": ["self", "return", " the", " in"]},
            {"stop": random.choice([["e", ", "], ["\n"], ["self"]]), "include_stop_str_in_output": True},
            {"stop": random.choice([["e"], ["\n\n"], [" = ", "("]])},
            {"stop_token_ids": list(range(260, 600, 4))},
            {"min_tokens": 2, "stop_token_ids": list(range(260, 600, 4))},
            {"allowed_token_ids": list(range(100, 700))},
            {"structured_outputs": random.choice(GRAMMARS)},
        ]
        for one in random.sample(choices, random.randint(1, 4)):
            body |= one
        if "structured_outputs" in body:
            # A grammar takes a stop token for its end, and may leave no allowed token.
            for name in ("stop_token_ids", "allowed_token_ids", "min_tokens", "bad_words", "logit_bias"):
                body.pop(name, None)
        return body

    def _mistake(self) -> dict[str, Any]:
        return self._random.choice(
            [
                {"temperature": -1},
                {"top_p": 1.5},
                {"max_tokens": 100_000},
                {"frequency_penalty": 5},
                {"n": 0},
                {"logprobs": -7},
                {"prompt": []},
                {"prompt": [10**9]},
                {"prompt": [5] * (self._room + 1)},
                {"model": "nobody"},
                {"structured_outputs": {"regex": "(("}},
                {"structured_outputs": {"regex": "a", "choice": ["b"]}},
                {"logit_bias": {str(10**8): 1}},
                {"allowed_token_ids": []},
                {"stop_token_ids": "all"},
                {"min_tokens": 9, "max_tokens": 3},
            ]
        )
