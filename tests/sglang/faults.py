"""Run by the rig in every process of an engine: breaks what the file SPECPLUG_TEST_FAULT names says, while it
says so. The file is read at every step, so one engine serves the tests and their negative controls."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from specplug_sglang.sampling import PathSampler

FAULT = Path(os.environ["SPECPLUG_TEST_FAULT"])
adjust, committed = PathSampler.adjust, PathSampler.committed


def fault():
    return FAULT.read_text().strip()


def adjust_wrongly(self, batch, logits, tree, **rest):
    if fault() == "rows":  # every row answers for the one before it
        logits.copy_(logits.roll(1, 0))
    if fault() == "siblings":  # the nodes in front of a row are its path
        places = torch.arange(tree.depths.shape[1], dtype=torch.int32).expand_as(tree.depths)
        depths = (places + 1).clamp_max(self._max_depth)
        tree = replace(tree, parents=places - 1, depths=depths)
    adjust(self, batch, logits, tree, **rest)


def commit_wrongly(self, batch, tokens):
    if fault() != "history":
        committed(self, batch, tokens)


PathSampler.adjust, PathSampler.committed = adjust_wrongly, commit_wrongly
