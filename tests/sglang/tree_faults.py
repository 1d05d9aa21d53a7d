"""Run by the rig in every process of an engine: breaks DDTREE in the way the file SPECPLUG_TEST_FAULT names,
while it names one. The file is read at every step, so one engine serves every control."""

import os
from pathlib import Path

import torch

from specplug.flat_window import FlatWindow
from specplug_sglang import worker

FAULT = Path(os.environ["SPECPLUG_TEST_FAULT"])
right_window = worker.flat_window
move_cache, commit_features = worker.TreeWorker._move_cache, worker.TreeWorker._commit_features


def fault():
    return FAULT.read_text().strip()


def window(tree, anchors, prefix, *, max_depth):
    """A wrong parent, sight or position in what the target computes; the walk keeps the right tree."""
    if fault() == "parent":  # a node's parent is taken to be the node before it
        parents = torch.arange(tree.budget, dtype=torch.int32).expand_as(tree.parents) - 1
        tree = type(tree)(tree.tokens, parents, tree.depths, tree.scores, tree.counts)
    ids, positions, sees = right_window(tree, anchors, prefix, max_depth=max_depth)
    if fault() == "chain mask":
        sees = torch.ones_like(sees).tril()
    if fault() == "linear positions":
        positions = prefix.long()[:, None] + torch.arange(positions.shape[1])
    return FlatWindow(ids, positions, sees)


def _move_cache(self, batch, slots, result):
    if fault() != "cache":
        move_cache(self, batch, slots, result)


def _commit_features(self, slots, features, result):
    if fault() == "features":  # every row's features are those of the row before it
        features = features.roll(1, 0)
    commit_features(self, slots, features, result)


worker.flat_window = window
worker.TreeWorker._move_cache, worker.TreeWorker._commit_features = _move_cache, _commit_features
