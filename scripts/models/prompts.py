"""Write the held-out prompts that the demo and the acceptance tests use: specplug/models/prompts.jsonl.

They are drawn, seeded, from the held-out questions of the shipped target's corpus (45,000 conversations, seed
7), as many of each kind. No held-out question is in the training split, see conversations.py. One line a
prompt: {"kind": "chat" | "maths" | "code", "prompt": the question in the chat form, up to where the answer
begins}.
"""

import argparse
import json
from pathlib import Path
from random import Random

from conversations import KINDS, prompt, split

SHIPPED = Path(__file__).resolve().parents[2] / "specplug" / "models" / "prompts.jsonl"


def held_out_prompts(count: int, *, documents: int, corpus_seed: int, seed: int) -> list[dict[str, str]]:
    """`count` prompts, the kinds taking turns; every prompt is different."""
    questions: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for conversation in split(documents, corpus_seed)[1]:
        questions[conversation.kind].append(conversation.turns[0][0])
    r = Random(seed)
    shuffled = {kind: r.sample(pool, len(pool)) for kind, pool in questions.items()}
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(count)]
    return [{"kind": kind, "prompt": prompt(shuffled[kind].pop())} for kind in kinds]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--documents", type=int, default=45_000, help="of the corpus, as corpus.py got it")
    parser.add_argument("--corpus-seed", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0, help="of the choice among the held-out questions")
    a = parser.parse_args()
    rows = held_out_prompts(a.count, documents=a.documents, corpus_seed=a.corpus_seed, seed=a.seed)
    a.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts in {a.out}")


if __name__ == "__main__":
    main()
