"""As test_device_ready, for calibration, the hybrid, chains and processors: no host read, one device."""

import dataclasses

import pytest
import torch

from specplug import calibration, hybrid, order, processors, rejection, sts
from specplug.ddtree import build_tree

META = torch.device("meta")
REQUESTS, GAMMA, VOCAB, BUDGET = 3, 4, 50, 7


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.fixture
def tree():
    return build_tree(meta(REQUESTS, GAMMA, VOCAB), BUDGET)


def test_calibration(tree):
    regime = calibration.Regime(max_temperature=None, depths=[calibration.DepthCoefficients()])
    coefficients = calibration.Coefficients.of(calibration.Calibration(regimes=[regime]), META)
    log_a = calibration.log_acceptance(
        coefficients,
        tree.scores,
        parents=tree.parents,
        depths=tree.depths,
        ranks=order.sibling_ranks(tree),
        temperatures=meta(REQUESTS),
        confidence=meta(REQUESTS, BUDGET),
        max_depth=GAMMA,
    )
    assert log_a.device == META
    assert order.by_score(tree, log_a).tree.scores.device == META
    assert sts.survival(meta(REQUESTS, GAMMA), meta(GAMMA)).device == META


def test_the_hybrid(tree):
    empty = hybrid.HybridTree.of(tree, VOCAB)
    at = meta(REQUESTS, 2, dtype=torch.int64)
    q, u = meta(REQUESTS, 2, VOCAB), meta(REQUESTS, 2, dtype=torch.float64)
    grown = hybrid.attach(hybrid.expand(empty, q, at=at, children=3), q, at=at, uniform=u)
    width = BUDGET + 6 + 2
    assert grown.tree.tokens.shape == (REQUESTS, width)
    assert grown.sampled_rows.device == META
    drawn = hybrid.couple(
        grown,
        meta(REQUESTS, width + 1, dtype=torch.int64),
        meta(REQUESTS, width + 1, VOCAB),
        accept_uniform=u,
        residual_uniform=u,
    )
    assert (drawn.device, drawn.shape) == (META, (REQUESTS, width + 1))


def test_a_chain_of_sampled_tokens():
    u = meta(REQUESTS, GAMMA, dtype=torch.float64)
    proposal = rejection.sample(meta(REQUESTS, GAMMA, VOCAB), u, temperature=meta(REQUESTS, GAMMA))
    result = rejection.accept_chain(
        proposal,
        meta(REQUESTS, dtype=torch.int32),
        meta(REQUESTS, GAMMA + 1, VOCAB),
        accept_uniform=u,
        draw_uniform=meta(REQUESTS, GAMMA + 1, dtype=torch.float64),
    )
    assert result.tokens.device == META


def test_processors(tree):
    path = processors.ancestors(tree.parents, tree.tokens, tree.depths, max_depth=GAMMA)
    logits = meta(REQUESTS, BUDGET + 1, VOCAB)
    one = meta(REQUESTS)
    counts = meta(REQUESTS, VOCAB, dtype=torch.int32)
    logits = processors.penalise(
        logits, path, output_counts=counts, in_prompt=counts > 0, repetition=one, frequency=one, presence=one
    )
    few, number = meta(REQUESTS, 3, dtype=torch.int64), meta(REQUESTS, dtype=torch.int32)
    logits = processors.add_bias(logits, tokens=few, values=meta(REQUESTS, 3), counts=number)
    words = processors.BadWords.of([[[1, 2]], [], [[3]]], META)
    logits = processors.ban(logits, path, words, recent=few, recent_counts=number)
    assert (logits.device, logits.shape) == (META, (REQUESTS, BUDGET + 1, VOCAB))


def test_a_host_read_would_be_noticed(tree):
    """Negative control."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        dataclasses.replace(tree).validate()
