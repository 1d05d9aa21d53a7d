"""Tensors of the wrong rank, and sizes beyond a kernel, are told by name before anything is read off them."""

import pytest
import torch

from specplug_kernels.attention import in_tree, in_tree_merged
from specplug_kernels.budget import admit
from specplug_kernels.compaction import compact, expand
from specplug_kernels.history import ban, penalise
from specplug_kernels.markov import conditioned
from specplug_kernels.walk import MAX_BUDGET, path_permutation, walk


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def longs(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def walked(parents=None, sampled=None, max_depth=2):
    parents = ints(2, 3) if parents is None else parents
    sampled = longs(2, 4) if sampled is None else sampled
    return walk(parents, longs(2, 3), ints(2), sampled, max_depth=max_depth)


def penalised(logits=None, repetition=None):
    logits = torch.zeros(2, 8) if logits is None else logits
    ones = torch.ones(1) if repetition is None else repetition
    stages = {"repetition": ones, "frequency": ones, "presence": ones}
    words, counts = ints(1, 1), ints(1, 8)
    penalise(logits, longs(2), longs(2, 3), longs(2), **stages, prompt_words=words, output_counts=counts)


def banned(num_words):
    lists = {"words": ints(1, 2), "offsets": ints(1, 3), "num_words": num_words, "most_words": 1}
    past = {"all_tokens": ints(1, 4), "prompt_lens": ints(1), "total_lens": ints(1)}
    ban(torch.zeros(2, 8), longs(2), longs(2, 3), longs(2), **lists, **past)


def attended(starts=None, ancestors=None, prefix_out=None):
    q = torch.zeros(4, 2, 64)
    starts = ints(1) if starts is None else starts
    ancestors = longs(1, 3) if ancestors is None else ancestors
    trees = {"starts": starts, "counts": ints(1), "ancestors": ancestors, "scale": 1.0}
    if prefix_out is None:
        return in_tree(q, q, q, **trees)
    return in_tree_merged(
        q, q, q, **trees, prefix_out=prefix_out, prefix_lse=torch.zeros(1, 4, 2), output=torch.zeros(4, 2, 64)
    )


def scored(anchors):
    w = torch.zeros(8, 4)
    return conditioned(torch.zeros(2, 3, 8), w, w, 1.0, anchors, 4)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: walked(parents=ints(3)), "parents"),
        (lambda: walked(sampled=longs()), "sampled"),
        (lambda: path_permutation(longs(3), ints(2), 4), "path"),
        (lambda: penalised(logits=torch.zeros(8)), "logits"),
        (lambda: penalised(repetition=torch.tensor(1.0)), "repetition"),
        (lambda: banned(ints()), "num_words"),
        (lambda: attended(starts=ints()), "starts"),
        (lambda: attended(ancestors=longs(3)), "ancestors"),
        (lambda: attended(prefix_out=torch.zeros(4)), "prefix_out"),
        (lambda: expand(torch.zeros(4, 2), ints(), 2), "starts"),
        (lambda: scored(torch.zeros(2, dtype=torch.bool)), "anchors"),
        (lambda: scored(longs(2, 1)), "anchors"),
    ],
)
def test_a_wrong_rank_is_told_by_name(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got .*; "):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: walked(max_depth=MAX_BUDGET + 1), "max_depth: expected at most 1024, got 1025"),
        (lambda: admit(torch.zeros(0, 3), ints(2), 4, rows=ints(2)), "survival: expected a row for each"),
        (lambda: compact(torch.zeros(1, 2, 4), ints(2), -1), "num_rows: expected at least 0, got -1"),
        (lambda: expand(torch.zeros(4, 2), ints(2), -1), "width, starts: expected at least 0"),
        (lambda: expand(torch.zeros(4, 2), ints(0), 2), "width, starts: .* got 2 and 0"),
    ],
)
def test_a_size_beyond_a_kernel_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
