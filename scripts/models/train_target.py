"""Step 2: train the target, fp32, on the CPU, seeded and by steps, so that a rerun repeats.

The first stage trains a shallow model, several times faster a token. Each later stage grows it: the trained
layers are spread over the depth, every gap is filled with a copy of the layer below whose two output
projections are zero, so the grown model begins as exactly the same function. System and user turns weigh
little in the loss: the model never has to write them. The weights with the lowest held-out loss of the last
stage are kept.

Writes target.pt (state dict) and target.json (how it was trained).
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from decoder import Target
from muon import MuonAdamW
from presets import END_OF_TEXT, PRESETS, TURN_START
from tokenizers import Tokenizer
from tqdm import trange

LIBRARY_SHARE = 0.35  # of the windows; the rest are conversations
FROM_THE_START = 0.75  # of the conversation windows begin where a conversation does
QUESTION_WEIGHT = 0.1  # loss weight of system and user turns
EVALUATED_WINDOWS = 24
EVALUATIONS = 10  # a stage


class Windows:
    """Seeded windows of training tokens."""

    def __init__(self, corpus: Path, seed: int) -> None:
        self.library, self.chat = stream(corpus / "library_train.bin"), stream(corpus / "chat_train.bin")
        self.starts = torch.cat(
            [torch.zeros(1, dtype=torch.long), (self.chat == END_OF_TEXT).nonzero()[:, 0] + 1]
        )
        self.random = np.random.RandomState(seed)

    def draw(self, rows: int, length: int) -> torch.Tensor:
        """[rows, length] int64."""
        return torch.stack([self._window(length) for _ in range(rows)])

    def _window(self, length: int) -> torch.Tensor:
        source = self.library if self.random.rand() < LIBRARY_SHARE else self.chat
        last = len(source) - length
        begin = self.random.randint(last)
        if source is self.chat and self.random.rand() < FROM_THE_START:
            begin = min(last, int(self.starts[self.random.randint(len(self.starts))]))
        return source[begin : begin + length]


def stream(file: Path) -> torch.Tensor:
    """A token stream of corpus.py, int64."""
    return torch.from_numpy(np.fromfile(file, np.uint16).astype(np.int64))


def grown(small: Target, layers: int) -> Target:
    """A deeper target that computes the same function as `small`."""
    big = Target(layers)
    big.model.embed_tokens.load_state_dict(small.model.embed_tokens.state_dict())
    big.model.norm.load_state_dict(small.model.norm.state_dict())
    old = len(small.model.layers)
    place = {round(i * (layers - 1) / (old - 1)): i for i in range(old)}
    source = 0
    for i, layer in enumerate(big.model.layers):
        source = place.get(i, source)
        layer.load_state_dict(small.model.layers[source].state_dict())
        if i not in place:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return big


def token_losses(model: Target, windows: torch.Tensor) -> torch.Tensor:
    """Cross-entropy [rows, length - 1] of each next token."""
    hidden, _ = model(windows[:, :-1])
    labels = windows[:, 1:]
    return F.cross_entropy(model.logits(hidden).flatten(0, 1), labels.flatten(), reduction="none").view_as(
        labels
    )


def asked(windows: torch.Tensor, assistant: int) -> torch.Tensor:
    """[rows, length - 1] bool: the label belongs to a system or user turn, or to a turn's header."""
    at = torch.arange(windows.shape[1]).expand_as(windows)
    opened = torch.where(windows == TURN_START, at, -1).cummax(1).values
    role = windows.gather(1, (opened + 1).clamp(max=windows.shape[1] - 1))
    return ((opened >= 0) & ((role != assistant) | (at <= opened + 2)))[:, 1:]


@torch.no_grad()
def held_out_losses(model: Target, held_out: dict[str, torch.Tensor], assistant: int) -> dict[str, float]:
    """Nats a token on held-out library source and on held-out answers."""
    library = token_losses(model, held_out["library"]).mean()
    answers = token_losses(model, held_out["chat"])[~asked(held_out["chat"], assistant)].mean()
    return {"library": round(library.item(), 4), "answers": round(answers.item(), 4)}


def held_out_windows(file: Path, length: int) -> torch.Tensor:
    """Evenly spaced windows of a held-out stream, [up to EVALUATED_WINDOWS, length]."""
    tokens = stream(file)
    hop = max(1, (len(tokens) - length) // EVALUATED_WINDOWS)
    return torch.stack(
        [tokens[i : i + length] for i in range(0, len(tokens) - length, hop)][:EVALUATED_WINDOWS]
    )


def main(arguments: list[str] | None = None) -> None:
    """Command line; run.py passes its arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for target.pt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args(arguments)
    preset = PRESETS[a.preset]
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    a.out.mkdir(parents=True, exist_ok=True)
    assistant = Tokenizer.from_file(str(a.corpus / "tokenizer.json")).encode("assistant").ids[0]
    windows = Windows(a.corpus, a.seed)
    names = ("library", "chat")
    held_out = {name: held_out_windows(a.corpus / f"{name}_val.bin", preset.window + 1) for name in names}

    model: Target | None = None
    history: list[dict[str, Any]] = []
    best, began = float("inf"), time.monotonic()
    for stage, (layers, steps) in enumerate(zip(preset.layers, preset.target_steps, strict=True)):
        model = Target(layers) if model is None else grown(model, layers)
        optimiser = MuonAdamW(model, steps)
        for step in trange(1, steps + 1, desc=f"target, {layers} layers"):
            drawn = windows.draw(preset.target_rows, preset.window + 1)
            weight = torch.where(asked(drawn, assistant), QUESTION_WEIGHT, 1.0)
            loss = (token_losses(model, drawn) * weight).sum() / weight.sum()
            loss.backward()
            optimiser.step()
            if step % max(1, steps // EVALUATIONS) and step < steps:
                continue
            losses = held_out_losses(model, held_out, assistant)
            history.append({"stage": stage, "step": step, "train": round(loss.item(), 4), **losses})
            score = losses["library"] + 4 * losses["answers"]  # both terms are of similar size
            if stage == len(preset.layers) - 1 and score < best:
                best = score
                torch.save(model.state_dict(), a.out / "target.pt")
    facts = {
        "preset": a.preset,
        "seed": a.seed,
        "steps": sum(preset.target_steps),
        "seconds": round(time.monotonic() - began),
        "best": best,
        "history": history,
    }
    (a.out / "target.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"held-out nats a token: {history[-1]}")


if __name__ == "__main__":
    main()
