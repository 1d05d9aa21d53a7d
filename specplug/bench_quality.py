"""What an arm's text is, apart from its speed: greedy answers and sampled ones, against the baseline's.

Greedy answers are compared token by token. Where one differs, the baseline's own log-probabilities say
whether the two tokens were nearly tied there: then floating point alone may have decided, as it does between
any two batch sizes. A larger gap is a fault. Answers come through the engines' plain HTTP interfaces, several
at a time, so batches are judged too; nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from specplug import server
from specplug.bench_result import Agreement, Divergence
from specplug.evaluate import NEAR_TIE

IN_FLIGHT = 8  # requests at a time
TOP = 5  # log-probabilities a token, the most that OpenAI's interface gives
POSITIONS = 8  # first tokens of a sampled answer that are compared; a chain or tree yields all but the first
SAMPLE_PROMPTS = 4
_A_REQUEST = 25  # samples asked for at once
# Two logits of 16 to 32 in bf16 are each off by up to half of their spacing, 1/8, plus what the layers add.
NEAR_TIE_NATS = {"float32": NEAR_TIE, "float": NEAR_TIE, "fp32": NEAR_TIE}
NEAR_TIE_HALF = 0.25


class Answer(msgspec.Struct, frozen=True):
    """One greedy answer."""

    ids: list[int]
    top: list[dict[int, float]]  # log-probabilities of the TOP tokens at each position


def near_tie_nats(dtype: str) -> float:
    """Gap of two log-probabilities that a precision cannot tell apart; "auto" is taken for a half."""
    return NEAR_TIE_NATS.get(dtype, NEAR_TIE_HALF)


class Asked(NamedTuple):
    """A server to ask."""

    server: server.Server
    engine: str
    model: str  # as it names it

    def greedy(self, prompts: Sequence[str], *, max_tokens: int, ignore_eos: bool, top: bool) -> list[Answer]:
        """An answer a prompt, with the top log-probabilities where ``top``."""

        def one(prompt: str) -> Answer:
            (answer,) = self._ask(
                prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos, top=top, count=1
            )
            return answer

        return _all(one, prompts)

    def sampled(self, prompts: Sequence[str], *, samples: int, temperature: float) -> list[list[list[int]]]:
        """First tokens of ``samples`` unseeded answers a prompt: ids by prompt and sample."""

        def one(task: tuple[str, int]) -> list[Answer]:
            return self._ask(
                task[0],
                max_tokens=POSITIONS,
                temperature=temperature,
                ignore_eos=True,
                top=False,
                count=task[1],
            )

        counts = [min(_A_REQUEST, samples - begun) for begun in range(0, samples, _A_REQUEST)]
        found = _all(one, [(prompt, count) for prompt in prompts for count in counts])
        return [
            [answer.ids for group in found[i * len(counts) : (i + 1) * len(counts)] for answer in group]
            for i in range(len(prompts))
        ]

    def warm(self, prompts: Sequence[str], *, max_tokens: int) -> None:
        """Serve some prompts at once and throw the answers away."""
        tokens = max_tokens

        def one(prompt: str) -> list[Answer]:
            return self._ask(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, top=False, count=1)

        _all(one, prompts, in_flight=len(prompts))

    def _ask(
        self, prompt: str, *, max_tokens: int, temperature: float, ignore_eos: bool, top: bool, count: int
    ) -> list[Answer]:
        if self.engine == "vllm":
            body: dict[str, Any] = {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "top_p": 1.0,  # the model's own defaults are not meant
                "top_k": 0,
                "ignore_eos": ignore_eos,
                "n": count,
                "return_token_ids": True,
                **({"logprobs": TOP, "return_tokens_as_token_ids": True} if top else {}),
            }
            choices = self.server.post("/v1/completions", body, timeout_seconds=server.START_SECONDS)[
                "choices"
            ]
            return [Answer(one["token_ids"], _vllm_top(one["logprobs"]) if top else []) for one in choices]
        params = {
            "max_new_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "ignore_eos": ignore_eos,
            "n": count,
        }
        body = {"text": prompt, "sampling_params": params}
        body |= {"return_logprob": True, "top_logprobs_num": TOP} if top else {}
        answer = self.server.post("/generate", body, timeout_seconds=server.START_SECONDS)
        return [
            Answer(one["output_ids"], _sglang_top(one["meta_info"]) if top else [])
            for one in (answer if isinstance(answer, list) else [answer])
        ]


def _all(one: Any, tasks: Sequence[Any], *, in_flight: int = IN_FLIGHT) -> list[Any]:
    """``one`` of every task, several at a time; after Ctrl-C, ending the server ends the requests."""
    pool = ThreadPoolExecutor(max(1, in_flight))
    try:
        return list(pool.map(one, tasks))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _vllm_top(logprobs: Any) -> list[dict[int, float]]:
    return [
        {int(token.rpartition(":")[2]): value for token, value in position.items()}
        for position in logprobs["top_logprobs"]
    ]


def _sglang_top(meta: Any) -> list[dict[int, float]]:
    return [{token: value for value, token, *_ in position} for position in meta["output_top_logprobs"]]


def agreement(baseline: Sequence[Answer], arm: Sequence[Answer], *, near_tie: float) -> Agreement:
    """Where an arm's greedy answers leave the baseline's; after that the two answer different texts."""
    divergences, agreeing = [], 0
    for index, (theirs, mine) in enumerate(zip(baseline, arm, strict=True)):
        pairs = enumerate(zip(theirs.ids, mine.ids, strict=False))
        same = next((place for place, (a, b) in pairs if a != b), min(len(theirs.ids), len(mine.ids)))
        agreeing += same
        if same == len(theirs.ids) == len(mine.ids):
            continue
        divergences.append(_divergence(index, same, theirs, mine, near_tie))
    return Agreement(
        answers=len(baseline),
        identical=len(baseline) - len(divergences),
        tokens=sum(len(answer.ids) for answer in baseline),
        agreeing=agreeing,
        near_tie_nats=near_tie,
        divergences=divergences,
    )


def _divergence(index: int, place: int, theirs: Answer, mine: Answer, near_tie: float) -> Divergence:
    base = theirs.ids[place] if place < len(theirs.ids) else None
    token = mine.ids[place] if place < len(mine.ids) else None
    top = theirs.top[place] if base is not None and place < len(theirs.top) else {}
    gap = top[base] - top[token] if base in top and token in top else None
    return Divergence(
        prompt=index,
        position=place,
        baseline_token=base,
        arm_token=token,
        gap_nats=gap,
        near_tie=gap is not None and gap <= near_tie,
    )


def save(answers: Sequence[Any], file: Path) -> None:
    """Keep answers, so that an arm measured later can be compared with them."""
    file.write_bytes(msgspec.json.encode(answers))


def load_greedy(file: Path) -> list[Answer]:
    return msgspec.json.decode(file.read_bytes(), type=list[Answer])


def load_sampled(file: Path) -> list[list[list[int]]]:
    return msgspec.json.decode(file.read_bytes(), type=list[list[list[int]]])
