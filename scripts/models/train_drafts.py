"""Step 4: train one draft on the text the target wrote.

Blocks are anchored where the target is about to choose tokens; slots past a forced token carry no loss, and
slot weights decay as exp(-slot / 4). With p the target's and q the draft's distribution, L1 = sum |p - q|:
    DFlash  cross-entropy of q against p + 0.5 L1
    DSpark  0.1 cross-entropy against the token + 0.9 L1 + binary cross-entropy of the confidence head against
            the acceptance probability 1 - L1 / 2   (weights of the DSpark paper's recipe)
Both start from the target's top layers. The weights with the lowest held-out loss are kept.

Writes {kind}.pt (state dict) and {kind}.json (how it was trained).
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from decoder import Draft, Target
from generate import rounded_target
from muon import MuonAdamW
from presets import DEPTH, PRESETS, Preset
from tqdm import trange

Data = dict[str, torch.Tensor]

SLOT_WEIGHT = torch.exp(-torch.arange(DEPTH) / 4.0)
EARLIEST_ANCHOR = 8  # tokens of context that a block sees at least
HELD_OUT_ROWS = 64
HELD_OUT_ANCHORS = 16
EVALUATIONS = 20


class Losses(NamedTuple):
    """Of one set of blocks."""

    total: torch.Tensor  # scalar
    hit: torch.Tensor  # [b, n, DEPTH] bool, both argmax agree
    live: torch.Tensor  # [b, n, DEPTH] bool, every token of the block so far was the target's choice


def initial_draft(kind: str, preset: Preset, target: Target) -> Draft:
    """A draft whose layers are the target's top ones and whose context is about the last tap."""
    draft = Draft(kind, preset)
    top = target.model.layers[-preset.draft_layers :]
    hidden = draft.shape.hidden_size
    with torch.no_grad():
        for mine, theirs in zip(draft.layers, top, strict=True):
            mine.load_state_dict(theirs.state_dict())
        draft.fc.weight.mul_(0.1)
        draft.fc.weight[:, -hidden:] += torch.eye(hidden)
        draft.norm.weight.copy_(target.model.norm.weight)
        draft.hidden_norm.weight.copy_(top[-1].input_layernorm.weight)
    return draft


def draw_anchors(free: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """[b, count] int64 positions whose next token the target chose, and whose block lies inside the row."""
    allowed = free[:, 1 : free.shape[1] - DEPTH + 1].float()
    allowed[:, :EARLIEST_ANCHOR] = 0
    return torch.multinomial(allowed + 1e-9, count, replacement=True, generator=generator)


def losses(draft: Draft, embedding: torch.Tensor, data: Data, anchors: torch.Tensor) -> Losses:
    """Losses of the blocks at `anchors` [b, n] of the rows in `data`."""
    ids, hidden = data["ids"].long(), data["hidden"].float()
    slots = anchors[..., None] + torch.arange(1, DEPTH + 1)  # [b, n, DEPTH] positions predicted
    labels = ids.gather(1, slots.flatten(1)).view_as(slots)
    live = data["free"].gather(1, slots.flatten(1)).view_as(slots).long().cumprod(-1).bool()
    weight = SLOT_WEIGHT * live
    weight = weight / weight.sum().clamp(min=1e-9)

    states = draft.train_blocks(embedding, ids, data["features"].float(), anchors)
    logits = F.linear(states, embedding)
    if draft.kind == "dspark":
        previous = torch.cat([ids.gather(1, anchors)[..., None], labels[..., :-1]], -1)
        embedded = draft.markov_head.markov_w1(previous)
        logits = logits + draft.markov_head.markov_w2(embedded)
    with torch.no_grad():
        states_before = hidden.gather(1, (slots - 1).flatten(1)[..., None].expand(-1, -1, hidden.shape[-1]))
        p = torch.softmax(F.linear(states_before, embedding), -1).view_as(logits)
    log_q = F.log_softmax(logits, -1)
    l1 = (log_q.exp() - p).abs().sum(-1)
    if draft.kind == "dflash":
        per_slot = -(p * log_q).sum(-1) + 0.5 * l1
    else:
        confidence = draft.confidence_head.proj(torch.cat([states, embedded], -1))[..., 0]
        accepted = (1 - l1 / 2).clamp(0, 1).detach()
        cross_entropy = F.nll_loss(log_q.flatten(0, 2), labels.flatten(), reduction="none").view_as(l1)
        calibration = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
        per_slot = 0.1 * cross_entropy + 0.9 * l1 + calibration
    return Losses((per_slot * weight).sum(), logits.argmax(-1) == p.argmax(-1), live)


@torch.no_grad()
def held_out_facts(
    draft: Draft, embedding: torch.Tensor, data: Data, anchors: torch.Tensor
) -> dict[str, Any]:
    """Loss, hit rate of each slot, accepted length of a teacher-forced greedy chain (bonus counted)."""
    parts = [
        losses(draft, embedding, _rows(data, slice(i, i + 8)), anchors[i : i + 8])
        for i in range(0, len(anchors), 8)
    ]
    hit, live = torch.cat([part.hit for part in parts]), torch.cat([part.live for part in parts])
    whole = live[..., -1]
    run = hit.long().cumprod(-1).sum(-1)[whole].float()
    return {
        "loss": round(sum(part.total.item() for part in parts) / len(parts), 4),
        "hit": [round(v, 3) for v in ((hit & live).sum((0, 1)) / live.sum((0, 1)).clamp(min=1)).tolist()],
        "accepted": round(1 + run.mean().item(), 3) if len(run) else None,
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line; run.py passes its arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--kind", choices=("dflash", "dspark"), required=True)
    parser.add_argument("--target", type=Path, required=True, help="folder of train_target.py")
    parser.add_argument("--generated", type=Path, required=True, help="folder of generate.py, both splits")
    parser.add_argument("--out", type=Path, required=True, help="folder for {kind}.pt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args(arguments)
    preset = PRESETS[a.preset]
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    a.out.mkdir(parents=True, exist_ok=True)
    target = rounded_target(a.target / "target.pt", preset)
    embedding = target.model.embed_tokens.weight
    train: Data = torch.load(a.generated / "generated_train.pt", weights_only=True)
    held_out = _rows(torch.load(a.generated / "generated_val.pt", weights_only=True), slice(0, HELD_OUT_ROWS))
    generator = torch.Generator().manual_seed(a.seed)
    held_out_anchors = draw_anchors(held_out["free"], HELD_OUT_ANCHORS, torch.Generator().manual_seed(99))

    draft = initial_draft(a.kind, preset, target)
    optimiser = MuonAdamW(draft, preset.draft_steps)
    history: list[dict[str, Any]] = []
    best, began = float("inf"), time.monotonic()
    for step in trange(1, preset.draft_steps + 1, desc=a.kind):
        rows = torch.randint(len(train["ids"]), (preset.draft_rows,), generator=generator)
        batch = _rows(train, rows)
        losses(
            draft, embedding, batch, draw_anchors(batch["free"], preset.anchors, generator)
        ).total.backward()
        optimiser.step()
        if step % max(1, preset.draft_steps // EVALUATIONS) and step < preset.draft_steps:
            continue
        history.append({"step": step, **held_out_facts(draft, embedding, held_out, held_out_anchors)})
        if history[-1]["loss"] < best:
            best = history[-1]["loss"]
            torch.save(draft.state_dict(), a.out / f"{a.kind}.pt")
    facts = {
        "preset": a.preset,
        "seed": a.seed,
        "steps": preset.draft_steps,
        "seconds": round(time.monotonic() - began),
        "best": best,
        "history": history,
    }
    (a.out / f"{a.kind}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"held-out: {history[-1]}")


def _rows(data: Data, rows: torch.Tensor | slice) -> Data:
    return {name: values[rows] for name, values in data.items()}


if __name__ == "__main__":
    main()
