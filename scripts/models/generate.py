"""Step 3: let the trained target write the text that the drafts are trained on.

Every row of a batch is a queue of forced tokens followed by free generation: a conversation row forces a
question, the target answers, and after the answer the next question is forced; a library row forces a window
of real source and continues it. Half the rows are greedy, the others sample. Hidden states and tapped
features are kept as they are computed, so the drafts' training never runs the target. Weights are rounded to
bf16 first: that is what is exported.

Writes generated_{split}.pt: ids [n, t] int16, free [n, t] bool (the target chose this token), hidden [n, t,
h] fp16, features [n, t, taps * h] fp16.
"""

import argparse
from collections import deque
from pathlib import Path

import numpy as np
import torch
from decoder import KeyValue, Target
from presets import END_OF_TEXT, MASK, PRESETS, TURN_END, TURN_START, Preset
from tqdm import tqdm
from train_target import stream

TEMPERATURES = (0.0, 0.0, 0.0, 0.6, 0.8, 1.0)  # drawn for each row
CHAT_SHARE = 0.6  # of the rows; the others continue library source
MIN_PROMPT = 16  # tokens of library source forced


class Prompter:
    """Forced tokens for new rows: a conversation's opening, or a window of library source."""

    def __init__(self, corpus: Path, split: str, random: np.random.RandomState) -> None:
        self.library = stream(corpus / f"library_{split}.bin").tolist()
        self.openings = openings(stream(corpus / f"chat_{split}.bin").tolist())
        self.newline = self.openings[0][-1]  # what the chat form has after a header and after a turn
        self.random = random

    def opening(self) -> list[int]:
        """A question, up to where the answer begins."""
        return self.openings[self.random.randint(len(self.openings))]

    def source(self, longest: int) -> list[int]:
        """MIN_PROMPT to `longest` tokens of library source."""
        length = self.random.randint(MIN_PROMPT, longest + 1)
        begin = self.random.randint(len(self.library) - length)
        return self.library[begin : begin + length]


def openings(chat: list[int]) -> list[list[int]]:
    """Of every conversation of a stream: its tokens up to and including the first answer's header."""
    found: list[list[int]] = []
    document: list[int] = []
    for token in chat:
        if token != END_OF_TEXT:
            document.append(token)
            continue
        turns = [i for i, t in enumerate(document) if t == TURN_START]
        header = (
            turns[2] if len(turns) % 2 else turns[1]
        )  # an odd number of turns: the first is a system turn
        found.append(document[: header + 3])  # <|im_start|> assistant newline
        document = []
    return found


def rounded_target(file: Path, preset: Preset) -> Target:
    """A trained target with weights rounded to bf16, computing in fp32."""
    target = Target(preset.layers[-1])
    weights = torch.load(file, weights_only=True)
    target.load_state_dict({name: weight.bfloat16().float() for name, weight in weights.items()})
    return target.eval().requires_grad_(False)


def generate_batch(target: Target, preset: Preset, prompter: Prompter) -> dict[str, torch.Tensor]:
    """One batch of rows, as written to the file."""
    rows, length, random = preset.generated_rows, preset.generated_length, prompter.random
    is_chat = random.rand(rows) < CHAT_SHARE
    temperature = torch.tensor([TEMPERATURES[random.randint(len(TEMPERATURES))] for _ in range(rows)])
    queues = [deque(prompter.opening() if c else prompter.source(length // 2)) for c in is_chat]
    ids = torch.zeros(rows, length, dtype=torch.long)
    free = torch.zeros(rows, length, dtype=torch.bool)
    hidden: list[torch.Tensor] = []
    features: list[torch.Tensor] = []
    cache: list[KeyValue] = []
    chosen = torch.zeros(rows, dtype=torch.long)
    for t in range(length):
        for row, queue in enumerate(queues):
            if queue:
                ids[row, t] = queue.popleft()
                continue
            ids[row, t], free[row, t] = chosen[row], True
            if is_chat[row] and chosen[row] == TURN_END:
                queue.extend([prompter.newline, END_OF_TEXT, *prompter.opening()])
        state, tapped = target(ids[:, t : t + 1], positions=torch.tensor([t]), cache=cache, taps=preset.taps)
        hidden.append(state[:, 0].half())
        features.append(tapped[:, 0].half())
        logits = target.logits(state[:, 0])
        logits[:, [TURN_START, MASK]] = float("-inf")  # the target may end a turn, not open one
        sampled = torch.multinomial(torch.softmax(logits / temperature.clamp(min=1e-3)[:, None], -1), 1)[:, 0]
        chosen = torch.where(temperature == 0, logits.argmax(-1), sampled)
    return {
        "ids": ids.short(),
        "free": free,
        "hidden": torch.stack(hidden, 1),
        "features": torch.stack(features, 1),
    }


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    """Command line; run.py passes its arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of corpus.py")
    parser.add_argument("--target", type=Path, required=True, help="folder of train_target.py")
    parser.add_argument("--split", choices=("train", "val"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for generated_{split}.pt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args(arguments)
    preset = PRESETS[a.preset]
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    a.out.mkdir(parents=True, exist_ok=True)
    target = rounded_target(a.target / "target.pt", preset)
    prompter = Prompter(a.corpus, a.split, np.random.RandomState(a.seed))
    batches = preset.generated_batches if a.split == "train" else 1
    parts = [
        generate_batch(target, preset, prompter) for _ in tqdm(range(batches), desc=f"generate, {a.split}")
    ]
    merged = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    torch.save(merged, a.out / f"generated_{a.split}.pt")
    print(f"{len(merged['ids'])} rows, {int(merged['free'].sum())} tokens chosen by the target")


if __name__ == "__main__":
    main()
