"""Step 6: measure accepted length of an exported set, fp32, one thread, with the core's own tree building and
walk.

Accepted length = tokens a target forward of decoding, the bonus token counted; the prompt's forward is not
counted. Texts: "chat" the held-out prompts shipped as specplug/models/prompts.jsonl, until the turn ends;
"library" held-out standard library source, 48 tokens after a window of 64 to 256. Budget 0 is the chain. At
temperature 0 the output is compared with plain decoding, token for token. Needs specplug on the path.

Prints a Markdown table; writes the same figures to --out as JSON.
"""

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from corpus import library_files
from decoder import Draft, KeyValue, Target
from presets import DEPTH, PRESETS, TURN_END, Preset
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tqdm import tqdm

from specplug import models
from specplug.candidates import TransitionTable, factorised
from specplug.ddtree import greedy_chain, grow
from specplug.markov import MarkovHead, conditioned
from specplug.tree import ancestor_mask
from specplug.verify import walk

LIMITS = {"chat": 128, "library": 48}  # tokens generated a prompt

Sampler = Callable[[torch.Tensor], torch.Tensor]  # logits [t, V] -> tokens [t]


class Drafter(NamedTuple):
    """A draft and what it borrows from its target."""

    draft: Draft
    embedding: torch.Tensor  # [V, h]
    candidates: int

    def table(self, anchor: int, position: int, cache: list[KeyValue]) -> TransitionTable:
        """Candidates and their log-probabilities for one request."""
        logits = self.draft.propose(self.embedding, anchor, position, cache)[None]
        if self.draft.kind == "dflash":
            return factorised(logits, self.candidates)
        head = MarkovHead(self.draft.markov_head.markov_w1.weight, self.draft.markov_head.markov_w2.weight)
        return conditioned(logits, head, torch.tensor([anchor]), self.candidates)


class Generation(NamedTuple):
    """One prompt's output."""

    tokens: list[int]
    forwards: int  # of the target, the prompt's not counted


def sampler(temperature: float, seed: int) -> Sampler:
    """The target's draw at every row; seeded."""
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: torch.Tensor) -> torch.Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)[:, 0]

    return draw


def decode(target: Target, prompt: list[int], limit: int, draw: Sampler) -> Generation:
    """Plain decoding."""
    cache: list[KeyValue] = []
    hidden, _ = target(torch.tensor([prompt]), cache=cache)
    out = draw(target.logits(hidden[0, -1:])).tolist()
    while len(out) < limit and out[-1] != TURN_END:
        position = torch.tensor([len(prompt) + len(out) - 1])
        hidden, _ = target(torch.tensor([out[-1:]]), positions=position, cache=cache)
        out += draw(target.logits(hidden[0])).tolist()
    return Generation(out, len(out) - 1)


def speculate(
    target: Target, drafter: Drafter, prompt: list[int], *, limit: int, budget: int, draw: Sampler
) -> Generation:
    """Decoding with draft trees of `budget` nodes, or with the greedy chain for budget 0."""
    taps = drafter.draft.taps
    cache: list[KeyValue] = []
    draft_cache: list[KeyValue] = []
    hidden, features = target(torch.tensor([prompt]), cache=cache, taps=taps)
    drafter.draft.extend(features, torch.arange(len(prompt)), draft_cache)
    out, forwards = draw(target.logits(hidden[0, -1:])).tolist(), 0
    while len(out) < limit and TURN_END not in out:
        root = (
            len(prompt) + len(out) - 1
        )  # position of the last committed token, whose keys are not yet cached
        table = drafter.table(out[-1], root, draft_cache)
        tree = grow(table, budget) if budget else greedy_chain(table)
        visible = ancestor_mask(tree.parents, tree.counts, max_depth=DEPTH)[0]
        mask = torch.cat([torch.ones(len(visible), root, dtype=torch.bool), visible], 1)
        window = torch.cat([torch.tensor([out[-1]]), tree.tokens[0]])
        positions = root + torch.cat([torch.zeros(1, dtype=torch.long), tree.depths[0].long()])
        hidden, features = target(window[None], positions=positions, cache=cache, mask=mask, taps=taps)
        forwards += 1
        drawn = draw(target.logits(hidden[0]))[None]
        step = walk(tree.parents, tree.tokens, tree.counts, drawn, max_depth=DEPTH)
        emitted = int(step.num_emitted[0])
        rows = step.path[0, :emitted]
        kept = torch.cat([torch.arange(root), root + rows])
        cache[:] = [(k[:, :, kept], v[:, :, kept]) for k, v in cache]
        drafter.draft.extend(features[:, rows], root + torch.arange(emitted), draft_cache)
        out += step.tokens[0, :emitted].tolist()
    out = out[:limit]
    return Generation(out[: out.index(TURN_END) + 1] if TURN_END in out else out, forwards)


def chat_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """The shipped held-out prompts as token ids."""
    return [tokenizer.encode(row.prompt).ids for row in models.prompts()]


def library_prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    """Windows of held-out library source (the files that corpus.py holds out) as token ids."""
    random = np.random.RandomState(seed)
    held_out = [text for i, (_, text) in enumerate(library_files(None)) if i % 20 == 7]
    tokens = [token for text in held_out for token in tokenizer.encode(text).ids]
    lengths = [int(random.randint(64, 257)) for _ in range(count)]
    begins = [int(random.randint(len(tokens) - length)) for length in lengths]
    return [tokens[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]


def load_set(folder: Path, preset: Preset) -> tuple[Target, dict[str, Draft]]:
    """The exported weights as fp32 modules."""
    target = Target(preset.layers[-1])
    target.load_state_dict(_weights(folder / "target"))
    drafts = {kind: Draft(kind, preset) for kind in ("dflash", "dspark")}
    for kind, draft in drafts.items():
        weights = _weights(folder / kind)
        draft.load_state_dict({name: w for name, w in weights.items() if name in draft.state_dict()})
    return target, drafts


def measure(
    target: Target,
    drafts: dict[str, Draft],
    prompts: list[list[int]],
    *,
    text: str,
    temperature: float,
    a: Any,
) -> list[dict[str, Any]]:
    """One row a method."""
    limit = LIMITS[text]
    plain = [
        decode(target, prompt, limit, sampler(temperature, a.seed + i)) for i, prompt in enumerate(prompts)
    ]
    rows: list[dict[str, Any]] = []
    for kind, draft in drafts.items():
        drafter = Drafter(draft, target.model.embed_tokens.weight, a.candidates)
        for budget in a.budgets:
            label = f"{kind}, {text}, T {temperature:g}, {f'tree {budget}' if budget else 'chain'}"
            outputs = [
                speculate(
                    target, drafter, p, limit=limit, budget=budget, draw=sampler(temperature, a.seed + i)
                )
                for i, p in enumerate(tqdm(prompts, desc=label, leave=False))
            ]
            tokens = sum(len(output.tokens) - 1 for output in outputs)  # the first is the prompt's forward's
            forwards = sum(output.forwards for output in outputs)
            same = sum(output.tokens == p.tokens for output, p in zip(outputs, plain, strict=True))
            row = {
                "text": text,
                "temperature": temperature,
                "draft": kind,
                "budget": budget,
                "tokens": tokens,
            }
            row |= {"forwards": forwards, "accepted_length": round(tokens / forwards, 3)}
            rows.append(row | {"identical": f"{same}/{len(plain)}" if temperature == 0 else None})
    return rows


@torch.inference_mode()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--set", type=Path, required=True, help="folder with target/, dflash/ and dspark/")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--texts", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[0, 16, 32, 64], help="nodes; 0 = chain")
    parser.add_argument("--candidates", type=int, default=32, help="a depth")
    parser.add_argument("--library-windows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    torch.set_num_threads(1)
    target, drafts = load_set(a.set, PRESETS[a.preset])
    tokenizer = Tokenizer.from_file(str(a.set / "target" / "tokenizer.json"))
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    for text in a.texts:
        prompts = (
            chat_prompts(tokenizer)
            if text == "chat"
            else library_prompts(tokenizer, a.library_windows, a.seed)
        )
        for temperature in a.temperatures:
            rows += measure(target, drafts, prompts, text=text, temperature=temperature, a=a)
            report = {"versions": versions, "candidates": a.candidates, "rows": rows}
            a.out.write_text(
                json.dumps(report, indent=1) + "\n"
            )  # each part takes minutes: keep what is there
    print("| text | T | draft | method | tokens | forwards | accepted length | identical to plain |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        method = f"tree {row['budget']}" if row["budget"] else "chain"
        cells = [row["text"], f"{row['temperature']:g}", row["draft"], method, row["tokens"], row["forwards"]]
        cells += [f"{row['accepted_length']:.2f}", row["identical"] or "-"]
        print("| " + " | ".join(map(str, cells)) + " |")


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}


if __name__ == "__main__":
    main()
