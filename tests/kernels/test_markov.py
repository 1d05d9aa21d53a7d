"""The Markov kernels give the tables of specplug.markov: ids exactly, log-probabilities to 1e-5."""

import pytest
import torch

from specplug.heads import MarkovHead, Projection
from specplug.markov import conditioned, conditioned_reference
from specplug.vocabulary import DraftVocabulary
from specplug_kernels import markov as kernels

NAN, INF = float("nan"), float("inf")


def noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def problem(seed, requests, gamma, vocab, rank, *, targets=None):
    """Logits, w1, w2 and anchors; biases of about the logits' size."""
    above = vocab if targets is None else targets
    logits, w2 = 2 * noise(seed, requests, gamma, vocab), noise(seed + 1, vocab, rank) / rank**0.5
    anchors = torch.arange(requests) * 7 % above
    return logits, noise(seed + 2, above, rank), w2, anchors


def moved(device, *tensors):
    return tuple(x.to(device) for x in tensors)


def same_table(got, expected, atol=1e-5):
    tokens, log_probs = (x.cpu() for x in got)
    assert torch.equal(tokens, expected.tokens)
    assert torch.equal(log_probs.isinf(), expected.log_probs.isinf())
    torch.testing.assert_close(log_probs, expected.log_probs, rtol=0, atol=atol)


SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 100, 8, 8),
    (1, 2, 3000, 64, 256),
    (3, 2, 2049, 33, 50),
    (1, 3, 90, 64, 3),
    (2, 2, 50, 1, 20),
]


@pytest.mark.parametrize("scale", [1.0, 0.6])
@pytest.mark.parametrize(("requests", "gamma", "vocab", "count", "rank"), SHAPES)
def test_table_of_a_vanilla_head(device, requests, gamma, vocab, count, rank, scale):
    logits, w1, w2, anchors = problem(vocab, requests, gamma, vocab, rank)
    expected = conditioned(logits, MarkovHead(w1, w2, scale), anchors, count)
    logits, w1, w2, anchors = moved(device, logits, w1, w2, anchors)
    same_table(kernels.conditioned(logits, w1, w2, scale, anchors, count), expected)


@pytest.mark.parametrize(("vocab", "count"), [(40, 40), (7, 64)])
def test_exact_where_every_token_is_a_candidate(device, vocab, count):
    """Against the full normaliser, which uses none of the formulas of a mixture."""
    logits, w1, w2, anchors = problem(1, 2, 3, vocab, 6)
    expected = conditioned_reference(logits, MarkovHead(w1, w2, 1.3), anchors).log_probs
    tokens, log_probs = kernels.conditioned(*moved(device, logits, w1, w2), 1.3, anchors.to(device), count)
    tokens, log_probs = tokens.cpu(), log_probs.cpu()
    for request in range(2):
        for depth in range(3):
            parents = torch.zeros(1, dtype=torch.int64) if depth == 0 else tokens[request, depth - 1]
            exact = expected[request, depth][parents][:, tokens[request, depth]]
            got = log_probs[request, depth][: len(parents)]
            torch.testing.assert_close(got, exact, rtol=0, atol=1e-5)


def test_only_the_anchor_is_a_parent_at_depth_0(device):
    logits, w1, w2, anchors = moved(device, *problem(2, 2, 2, 60, 4))
    _, log_probs = kernels.conditioned(logits, w1, w2, 1.0, anchors, 5)
    assert log_probs[:, 0, 0].isfinite().all()
    assert log_probs[:, 1].isfinite().all()
    assert (log_probs[:, 0, 1:] == -INF).all()


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_dead_depth_kills_all_below_it(device, value):
    logits, w1, w2, anchors = problem(3, 3, 4, 500, 8)
    logits[1, 2, 17] = value
    expected = conditioned(logits, MarkovHead(w1, w2), anchors, 6)
    _, log_probs = got = kernels.conditioned(*moved(device, logits, w1, w2), 1.0, anchors.to(device), 6)
    same_table(got, expected)
    assert (log_probs[1, 2:] == -INF).all()
    assert log_probs[[0, 2]][:, 1:].isfinite().all()


def test_fewer_live_tokens_than_candidates(device):
    """Two tokens live at the first depth, none at the last; token 0 among the live ones."""
    logits, w1, w2, anchors = problem(4, 2, 3, 200, 8)
    live = logits[:, 0, [0, 150]]
    logits[:, 0] = -INF
    logits[:, 0, [0, 150]] = live
    logits[:, 2] = -INF
    expected = conditioned(logits, MarkovHead(w1, w2), anchors, 9)
    same_table(kernels.conditioned(*moved(device, logits, w1, w2), 1.0, anchors.to(device), 9), expected)


def test_equal_scores_go_to_the_smaller_ids(device):
    logits, anchors = torch.zeros(2, 3, 90), torch.tensor([0, 89])
    w1, w2 = torch.ones(90, 5), torch.zeros(90, 5)
    tokens, log_probs = kernels.conditioned(*moved(device, logits, w1, w2), 1.0, anchors.to(device), 7)
    assert torch.equal(tokens.cpu(), torch.arange(7).expand(2, 3, 7))
    expected = torch.full((2, 7), 1 / 90).log()
    torch.testing.assert_close(log_probs[:, 2, 3].cpu(), expected, rtol=0, atol=1e-5)


def test_a_reduced_draft_vocabulary(device):
    """Parents and the table's tokens are target ids; W2 and the logits count draft ids."""
    logits, w1, w2, anchors = problem(5, 2, 3, 80, 8, targets=300)
    vocabulary = DraftVocabulary(torch.randperm(300, generator=torch.Generator().manual_seed(0))[:80])
    expected = conditioned(logits, MarkovHead(w1, w2), anchors, 10, vocabulary=vocabulary)
    got = kernels.conditioned(
        *(*moved(device, logits, w1, w2), 1.0, anchors.to(device), 10),
        targets=vocabulary.targets.to(device),
    )
    same_table(got, expected)


def test_a_gated_head_brings_its_latents(device):
    logits, w1, w2, anchors = problem(6, 2, 3, 120, 8)
    hidden, gate = noise(9, 2, 3, 12), Projection(noise(10, 8, 20), noise(11, 8))
    head = MarkovHead(w1, w2, 0.8, gate=gate)
    expected = conditioned(logits, head, anchors, 10, hidden=hidden)

    def latents(tokens, depth):
        return head.step(tokens.cpu(), hidden[:, depth, None]).latent.to(device)

    unread = torch.full_like(w1, NAN)
    got = kernels.conditioned(
        *(*moved(device, logits, unread, w2), 0.8, anchors.to(device), 10), latents=latents
    )
    same_table(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gamma", [1, 3])
def test_tables_of_16_bits(device, dtype, gamma):
    """The first depth to 1e-5: the same products. Below, a mean that differs in its last fp32 bit may round
    to the next 16-bit number and move a bias by 2^-8 of its size, about 1 nat: 2e-2, and ids far apart.
    """
    logits, w1, w2, anchors = problem(7, 2, gamma, 400, 32)
    logits[:, :, 8:] -= 30  # the 8 candidates are far above the rest
    logits[:, :, :8] = torch.arange(8.0) * 8
    head = MarkovHead(w1.to(dtype), (w2 / 4).to(dtype))
    logits = logits.to(dtype)
    expected = conditioned(logits, head, anchors, 8)
    got = kernels.conditioned(*moved(device, logits, head.w1, head.w2), 1.0, anchors.to(device), 8)
    same_table(got, expected, atol=1e-5 if gamma == 1 else 2e-2)


def test_tables_of_two_types(device):
    logits, w1, w2, anchors = problem(8, 2, 1, 300, 40)
    w1, w2 = w1.bfloat16(), w2.half()
    expected = conditioned(logits, MarkovHead(w1.to(w2.dtype), w2), anchors, 8)
    same_table(kernels.conditioned(*moved(device, logits, w1, w2), 1.0, anchors.to(device), 8), expected)


def test_strided_inputs_and_watched_outputs(device, guarded):
    logits, w1, w2, anchors = problem(9, 3, 2, 130, 8)
    expected = conditioned(logits, MarkovHead(w1, w2), anchors, 5)
    wide, rows = torch.full((3, 4, 140), NAN, device=device), torch.full((130, 11), NAN, device=device)
    wide[:, 1:3, :130] = logits.to(device)
    rows[:, :8] = w2.to(device)
    tokens = guarded((3, 2, 5), torch.int64, device)
    log_probs = guarded((3, 2, 5, 5), torch.float32, device)
    got = kernels.conditioned(
        *(wide[:, 1:3, :130], w1.to(device), rows[:, :8], 1.0, anchors.int().to(device), 5),
        out=(tokens.view, log_probs.view),
    )
    tokens.check()
    log_probs.check()
    assert [x.data_ptr() for x in got] == [tokens.view.data_ptr(), log_probs.view.data_ptr()]
    same_table(got, expected)


@pytest.mark.parametrize(("requests", "gamma"), [(0, 3), (2, 0), (0, 0)])
def test_no_rows_no_launch(device, requests, gamma):
    logits, w1, w2, anchors = moved(device, *problem(1, requests, gamma, 30, 4))
    tokens, log_probs = kernels.conditioned(logits, w1, w2, 1.0, anchors, 6)
    assert tokens.shape == (requests, gamma, 6)
    assert tokens.dtype == torch.int64
    assert log_probs.shape == (requests, gamma, 6, 6)
    assert log_probs.dtype == torch.float32


def test_the_comparison_sees_a_wrong_table(device):
    """Negative control: another scale, another anchor, parents in another order, a wrong normaliser."""
    logits, w1, w2, anchors = problem(11, 2, 2, 90, 8)
    expected = conditioned(logits, MarkovHead(w1, w2), anchors, 6)
    logits, w1, w2, anchors = moved(device, logits, w1, w2, anchors)
    tokens, log_probs = kernels.conditioned(logits, w1, w2, 1.0, anchors, 6)
    same_table((tokens, log_probs), expected)
    for wrong in (
        kernels.conditioned(logits, w1, w2, 1.01, anchors, 6),
        kernels.conditioned(logits, w1, w2, 1.0, anchors + 1, 6),
        (tokens, log_probs.flip(2)),
        (tokens, log_probs.log_softmax(-1)),
    ):
        with pytest.raises(AssertionError):
            same_table(wrong, expected)


def test_what_the_kernels_do_not_take(device):
    logits, w1, w2, anchors = moved(device, *problem(12, 2, 2, 90, 8))
    for match, arguments in (
        (r"one row of w2 a column of logits", (logits[:, :, :80], w1, w2, 1.0, anchors, 6)),
        (r"one row of w2 a column of logits", (logits, w1[:, :7], w2, 1.0, anchors, 6)),
        (r"anchors: expected \[2\] token ids", (logits, w1, w2, 1.0, anchors[:1], 6)),
        (r"anchors: expected \[2\] token ids", (logits, w1, w2, 1.0, anchors.float(), 6)),
        (r"candidates: expected 1..64, got 65", (logits, w1, w2, 1.0, anchors, 65)),
        (r"w1: expected .* got torch.float64", (logits, w1.double(), w2, 1.0, anchors, 6)),
        (r"w2: expected .* contiguous rows", (logits, w1, w2.T.contiguous().T, 1.0, anchors, 6)),
    ):
        with pytest.raises(ValueError, match=match):
            kernels.conditioned(*arguments)
    with pytest.raises(ValueError, match=r"targets: expected contiguous \[90\] int64"):
        kernels.conditioned(logits, w1, w2, 1.0, anchors, 6, targets=torch.arange(80, device=device))
    out = kernels.conditioned(logits, w1, w2, 1.0, anchors, 5)
    with pytest.raises(ValueError, match=r"out tokens: expected contiguous torch.int64 \[2, 2, 6\]"):
        kernels.conditioned(logits, w1, w2, 1.0, anchors, 6, out=out)
