"""What several servers did with the same prompts, side by side.

A target forward is one pass of the target for one request: the prompt's own pass, which yields the first
token, and then one pass a token (plain) or one pass a draft (speculation), hence `requests + drafts` from
vLLM's own counters. The accepted length is 1 + accepted / drafts, bonus counted; a draft that the answer's
end cut short counts in full.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

KIND = {"none": "plain", "dflash": "chain", "dspark": "chain", "ddtree": "tree"}


class Counters(NamedTuple):
    """vLLM's speculation counters, summed over engines."""

    drafts: int
    accepted: int


class Run(NamedTuple):
    """What one server did with all prompts."""

    method: str
    texts: list[str]
    token_ids: list[list[int]]
    counters: Counters
    wall_seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)

    @property
    def target_forwards(self) -> int:
        return self.tokens if self.method == "none" else len(self.token_ids) + self.counters.drafts

    @property
    def accepted_length(self) -> float:
        return 1 + self.counters.accepted / self.counters.drafts if self.counters.drafts else 1.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.wall_seconds


def counters(metrics: str) -> Counters:
    """vLLM's `spec_decode` counters in a /metrics page; zero without speculation."""

    def total(name: str) -> int:
        found = re.findall(rf"^vllm:spec_decode_num_{name}_total(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
        return int(sum(float(value) for value in found))

    return Counters(drafts=total("drafts"), accepted=total("accepted_tokens"))


def label(method: str, draft: str) -> str:
    return {"plain": "plain decoding", "chain": f"chain ({method})", "tree": f"tree (ddtree over {draft})"}[
        KIND[method]
    ]


def print_texts(runs: Sequence[Run], questions: Sequence[str]) -> None:
    """Every answer once; another method's answer only where it differs."""
    for index, question in enumerate(questions):
        print(f"\n> {question}\n{runs[0].texts[index]}")
        for one in runs[1:]:
            if one.token_ids[index] != runs[0].token_ids[index]:
                print(f"! {one.method} answered differently:\n{one.texts[index]}")


def print_table(runs: Sequence[Run], *, draft: str, on_gpu: bool) -> None:
    row = "{:28}{:>8}{:>17}{:>17}{:>13}{:>10}"
    print("\n" + row.format("", "tokens", "target forwards", "accepted length", "same output", "tokens/s"))
    for one in runs:
        same = "-" if one.method == "none" else "yes" if one.token_ids == runs[0].token_ids else "NO"
        numbers = (one.target_forwards, f"{one.accepted_length:.2f}", same, f"{one.tokens_per_second:.1f}")
        print(row.format(label(one.method, draft), one.tokens, *numbers))
    print(
        "\nTarget forwards: one a prompt, then one a draft. Accepted length: 1 + accepted / drafts, as the\n"
        "engine counts: tokens accepted past the end of an answer are in it, so it is above tokens / "
        "forwards."
    )
    print(timing_note(on_gpu=on_gpu))


def timing_note(*, on_gpu: bool) -> str:
    """What the tokens-per-second column is, and what it is not."""
    if on_gpu:
        return (
            "The model has 3 million parameters: it answers in the right form, often with wrong facts, "
            "and its "
            "tokens/s\nsay nothing about a large model. Below fp32 a near tie between two tokens may fall "
            "either way, speculation or not."
        )
    return (
        "tokens/s: on a CPU, kernels run by Triton's interpreter or replaced by torch. It says nothing "
        "about the "
        "speed on a GPU.\nWhat carries over is that the output is the same and how few target forwards it "
        "took. The model has 3 million\nparameters: it answers in the right form, often with wrong facts."
    )


def report(runs: Sequence[Run], questions: Sequence[str], *, draft: str, on_gpu: bool) -> dict[str, Any]:
    rows = [
        {
            "method": one.method,
            "kind": KIND[one.method],
            "draft": None if one.method == "none" else draft if one.method == "ddtree" else one.method,
            "tokens": one.tokens,
            "target_forwards": one.target_forwards,
            "accepted_length": one.accepted_length,
            "same_output": one.token_ids == runs[0].token_ids,
            "tokens_per_second": one.tokens_per_second,
        }
        for one in runs
    ]
    answers = [
        {"question": question, "answer": text}
        for question, text in zip(questions, runs[0].texts, strict=True)
    ]
    return {"runs": rows, "answers": answers, "note": timing_note(on_gpu=on_gpu)}
