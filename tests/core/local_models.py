"""The quick set, loaded once, for the tests of the local loop."""

import functools
import sys
from pathlib import Path
from types import ModuleType

import torch

from specplug import models
from specplug.checkpoint import read_draft
from specplug.local.draft import Draft
from specplug.local.library import windows
from specplug.local.target import Target

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "models"
FP32, CPU = torch.float32, torch.device("cpu")


@functools.cache
def target() -> Target:
    torch.set_num_threads(1)
    taps = read_draft(models.path("quick", "dspark")).target_layer_ids
    return Target.load(models.path("quick", "target"), taps=taps, dtype=FP32, device=CPU)


@functools.cache
def draft(kind: str, depth: int | None = None) -> Draft:
    model = target().model
    return Draft(
        read_draft(models.path("quick", kind)),
        embedding=model.get_input_embeddings().weight,
        lm_head=model.get_output_embeddings().weight,
        dtype=FP32,
        depth=depth,
    )


@functools.cache
def prompts() -> list[list[int]]:
    """Three pieces of held-out source of different lengths, the last of one token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.path("quick", "target"))
    pieces = [tokenizer(text)["input_ids"] for text in windows(2, seed=3)]
    return [pieces[0][:40], pieces[1][:23], pieces[0][50:51]]


def script(name: str) -> ModuleType:
    """A module of scripts/models, the independent implementation of the same models."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(SCRIPTS))
