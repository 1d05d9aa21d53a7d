"""An unseeded request obeys the target's law: a chi-square test against stock vLLM, with a biased control."""

from collections import Counter
from unittest import mock

import pytest
import torch
from engine_rig import engine, tree
from prompts import cut

pytestmark = pytest.mark.vllm

SAMPLES = 120
PROMPT = cut(2, 24)


def test_unseeded_sampling_has_the_laws_of_plain_decoding(plain):
    """Tokens two and three come from tree rows: the joint law against stock vLLM's, by chi-square."""
    threshold = 1e-4  # of a true null failing; the engines' own seeds are fixed, so the outcome is too
    expected = _triples(plain)
    with engine(tree("dspark", 3), max_num_seqs=16) as trees:
        assert _p_value(expected, _triples(trees)) > threshold
        assert trees.counters.accepted > 0
        # The same test on an acceptance that takes the best child without asking the target.
        assert _p_value(expected, _triples_of_a_biased_walk(trees)) < threshold


def _triples(source):
    from vllm import SamplingParams

    # Top-k keeps the cells of the test full.
    params = [
        SamplingParams(temperature=1.0, top_k=3, max_tokens=3, ignore_eos=True, extra_args={"sample": i})
        for i in range(SAMPLES)  # told apart, because the reference remembers its answers
    ]
    prompts = [PROMPT] * SAMPLES
    return Counter(tuple(output.ids) for output in source.generate(prompts, params))


def _triples_of_a_biased_walk(trees):
    acceptance = trees.runner.rejection_sampler

    def biased(parents, tokens, counts, sampled, **kwargs):
        sampled = sampled.clone()
        sampled[:, 0] = torch.where(counts > 0, tokens[:, 0], sampled[:, 0])
        return stock(parents, tokens, counts, sampled, **kwargs)

    stock = acceptance.walk
    with mock.patch.object(acceptance, "walk", biased):
        return _triples(trees)


def _p_value(first, second):
    """Two-sample chi-square over the cells with at least ten outcomes; the rare ones share a cell."""
    common = [cell for cell, count in (first + second).items() if count >= 10]
    rows = torch.tensor(
        [[counts[cell] for cell in common] for counts in (first, second)], dtype=torch.float64
    )
    rest = torch.tensor([[SAMPLES], [SAMPLES]], dtype=torch.float64) - rows.sum(1, keepdim=True)
    rows = torch.cat([rows, rest], 1)
    rows = rows[:, rows.sum(0) > 0]
    expected = rows.sum(0) / 2
    statistic = ((rows - expected) ** 2 / expected).sum()
    freedom = torch.tensor((rows.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
