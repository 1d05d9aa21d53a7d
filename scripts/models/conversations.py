r"""Conversations from the templates, in the chat form of the target, split into training and held-out by
question.

A conversation is one to three turns, rendered as

    <|im_start|>user\n...<|im_end|>\n<|im_start|>assistant\n...<|im_end|>\n

A question is held out when the SHA-256 of its text is divisible by 50: a property of the question, so no
held-out question can occur in training, whatever the seed, and anybody can check it without the corpus.
"""

import hashlib
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from templates import chat, code, maths

Turn = tuple[str, str]

KINDS: dict[str, list[tuple[Callable[[Random], Turn], int]]] = {  # kind -> (template, weight)
    "chat": [
        (chat.country_turn, 12),
        (chat.animal_turn, 10),
        (chat.opposite_turn, 4),
        (chat.calendar_turn, 5),
        (chat.list_turn, 12),
        (chat.count_turn, 10),
        (chat.howto_turn, 7),
        (chat.story_turn, 14),
        (chat.smalltalk_turn, 2),
        (chat.compare_turn, 4),
        (chat.repeat_turn, 6),
    ],
    "maths": [(maths.plain_turn, 10), (maths.word_turn, 26)],
    "code": [(code.write_turn, 34), (code.explain_turn, 8), (code.json_turn, 12), (code.read_json_turn, 4)],
}
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a small and friendly assistant.",
    "Answer the question clearly.",
]


class Conversation(NamedTuple):
    """One to three turns; `kind` is that of the first."""

    kind: str
    turns: list[Turn]
    system: str | None

    def text(self) -> str:
        """The conversation in the chat form, answers included."""
        parts = [f"<|im_start|>system\n{self.system}<|im_end|>\n"] if self.system else []
        return "".join([*parts, *(f"{prompt(q)}{a}<|im_end|>\n" for q, a in self.turns)])


def prompt(question: str) -> str:
    """A question in the chat form, up to where the answer begins."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def held_out(question: str) -> bool:
    """Whether a question belongs to the held-out split: about one in fifty."""
    return int(hashlib.sha256(question.encode()).hexdigest(), 16) % 50 == 0


def conversation(r: Random) -> Conversation:
    """Draw one conversation."""
    kind = r.choices(["chat", "maths", "code"], [40, 25, 35])[0]
    turns = [_turn(r, kind)]
    while len(turns) < 3 and r.random() < 0.25:
        other = r.choice(["chat", "maths", "code"]) if r.random() < 0.8 else None
        turns.append(_turn(r, other) if other else chat.smalltalk_turn(r))
    return Conversation(kind, turns, r.choice(SYSTEMS) if r.random() < 0.12 else None)


def split(documents: int, seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """`documents` training conversations, and the single held-out questions met while drawing them, each
    once.

    A longer conversation with a held-out question is in neither.
    """
    r = Random(seed)
    train: list[Conversation] = []
    held: dict[str, Conversation] = {}
    while len(train) < documents:
        drawn = conversation(r)
        if not any(held_out(question) for question, _ in drawn.turns):
            train.append(drawn)
        elif len(drawn.turns) == 1:
            held.setdefault(drawn.turns[0][0], drawn)
    return train, list(held.values())


def _turn(r: Random, kind: str) -> Turn:
    templates, weights = zip(*KINDS[kind], strict=True)
    return r.choices(templates, weights)[0](r)
