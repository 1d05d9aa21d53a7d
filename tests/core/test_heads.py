"""specplug.heads: three Markov heads against their formulas written out, step form against block form."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.heads import MarkovHead, Projection, block_bias, draft_chain, step_bias
from specplug.vocabulary import DraftVocabulary

VOCAB, RANK, HIDDEN = 13, 3, 5
KINDS = ("vanilla", "gated", "rnn")


def make_head(kind: str, seed: int = 0, *, scale: float = 1.0, draft_vocab: int = VOCAB) -> MarkovHead:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return MarkovHead(
        w1=random(VOCAB, RANK),
        w2=random(draft_vocab, RANK),
        scale=scale,
        gate=Projection(random(RANK, HIDDEN + RANK), random(RANK)) if kind == "gated" else None,
        joint=Projection(random(3 * RANK, 2 * RANK + HIDDEN), random(3 * RANK)) if kind == "rnn" else None,
    )


def block(requests: int, gamma: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(requests, gamma, VOCAB, generator=generator),
        torch.randint(VOCAB, (requests, gamma), generator=generator),
        torch.randn(requests, gamma, HIDDEN, generator=generator),
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def dot(row: torch.Tensor, vector: list[float]) -> float:
    return sum(a * b for a, b in zip(row.tolist(), vector, strict=True))


def bias_by_hand(head: MarkovHead, path: list[int], hidden: torch.Tensor) -> list[float]:
    """Bias of the last position of one path, scalar by scalar: the module's formulas, no tensor operation."""
    state = [0.0] * RANK
    latent: list[float] = []
    for position, token in enumerate(path):
        h, e = hidden[position].tolist(), head.w1[token].tolist()
        if head.kind == "vanilla":
            latent = e
        elif head.gate is not None:
            raw = [dot(w, h + e) + float(b) for w, b in zip(head.gate.weight, head.gate.bias, strict=True)]
            latent = [sigmoid(g) * x for g, x in zip(raw, e, strict=True)]
        else:
            assert head.joint is not None
            layer = zip(head.joint.weight, head.joint.bias, strict=True)
            raw = [dot(w, state + e + h) + float(b) for w, b in layer]
            keep, new, out = raw[:RANK], raw[RANK : 2 * RANK], raw[2 * RANK :]
            latent = [math.tanh(o) for o in out]
            state = [
                sigmoid(k) * s + (1 - sigmoid(k)) * math.tanh(c)
                for k, s, c in zip(keep, state, new, strict=True)
            ]
    return [head.scale * dot(w, latent) for w in head.w2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_block_form_is_the_formula(kind: str, scale: float) -> None:
    head = make_head(kind, scale=scale)
    _, tokens, hidden = block(2, 4)
    bias = block_bias(head, tokens, hidden)
    for r in range(2):
        for position in range(4):
            exact = bias_by_hand(head, tokens[r, : position + 1].tolist(), hidden[r])
            torch.testing.assert_close(bias[r, position], torch.tensor(exact), atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    requests=st.integers(1, 4),
    gamma=st.integers(0, 9),
    seed=st.integers(0, 10**6),
)
def test_step_form_is_block_form(kind: str, requests: int, gamma: int, seed: int) -> None:
    head = make_head(kind, seed)
    _, tokens, hidden = block(requests, gamma, seed)
    whole = block_bias(head, tokens, hidden)
    assert whole.shape == (requests, gamma, VOCAB)
    state = None
    for position in range(gamma):
        bias, state = step_bias(head, tokens[:, position], hidden[:, position], state)
        torch.testing.assert_close(bias, whole[:, position], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shorter_block_is_a_prefix(kind: str) -> None:
    """The depth is the caller's: no shape remembers the checkpoint's block."""
    head = make_head(kind)
    _, tokens, hidden = block(3, 7)
    whole = block_bias(head, tokens, hidden)
    for gamma in (1, 3, 5):
        torch.testing.assert_close(block_bias(head, tokens[:, :gamma], hidden[:, :gamma]), whole[:, :gamma])


def test_only_the_rnn_head_remembers_the_path() -> None:
    _, tokens, hidden = block(1, 3)
    other = tokens.clone()
    other[0, 0] = (other[0, 0] + 1) % VOCAB
    for kind in KINDS:
        head = make_head(kind)
        same = torch.equal(block_bias(head, tokens, hidden)[0, 2], block_bias(head, other, hidden)[0, 2])
        assert same == (kind != "rnn")


def test_only_gated_and_rnn_heads_read_hidden_states() -> None:
    _, tokens, hidden = block(1, 1)
    for kind in KINDS:
        head = make_head(kind)
        same = torch.equal(block_bias(head, tokens, hidden), block_bias(head, tokens, hidden + 1))
        assert same == (kind == "vanilla")
        if kind != "vanilla":
            with pytest.raises(ValueError, match=rf"hidden: expected .*5.*{kind} Markov head, got none"):
                block_bias(head, tokens)
            with pytest.raises(ValueError, match="hidden: expected"):
                block_bias(head, tokens, hidden[..., :-1])


def test_gate_limits() -> None:
    """A wide open gate is the vanilla head, a zero gate half of it, a shut one no bias."""
    vanilla = make_head("vanilla")
    _, tokens, hidden = block(2, 3)
    full = block_bias(vanilla, tokens)
    for bias, share in ((100.0, 1.0), (0.0, 0.5), (-100.0, 0.0)):
        gate = Projection(torch.zeros(RANK, HIDDEN + RANK), torch.full((RANK,), bias))
        gated = MarkovHead(vanilla.w1, vanilla.w2, gate=gate)
        torch.testing.assert_close(block_bias(gated, tokens, hidden), full * share)


def test_a_state_that_is_kept_stays() -> None:
    """rnn: an open keep gate holds s = 0, so that the path no longer matters."""
    head = make_head("rnn")
    assert head.joint is not None
    head.joint.weight[:RANK] = 0
    head.joint.bias[:RANK] = 100.0
    _, tokens, hidden = block(1, 4)
    fresh, _ = step_bias(head, tokens[:, 3], hidden[:, 3])
    torch.testing.assert_close(block_bias(head, tokens, hidden)[:, 3], fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_chain_is_best_token_by_token(kind: str) -> None:
    head = make_head(kind, 4)
    logits, _, hidden = block(3, 5, 9)
    anchors = torch.tensor([0, 4, 12])
    chain = draft_chain(logits, head, anchors, hidden=hidden)
    for r in range(3):
        path = [int(anchors[r])]
        for position in range(5):
            row = logits[r, position].double() + torch.tensor(bias_by_hand(head, path, hidden[r])).double()
            torch.testing.assert_close(chain.logits[r, position].double(), row, atol=1e-4, rtol=1e-4)
            path.append(int(row.argmax()))
        assert chain.tokens[r].tolist() == path[1:]


def test_chain_over_a_reduced_vocabulary_feeds_back_target_ids() -> None:
    targets = torch.tensor([7, 2, 11, 0])
    vocabulary = DraftVocabulary(targets)
    head = make_head("vanilla", draft_vocab=4)
    logits = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(3))
    chain = draft_chain(logits, head, torch.tensor([5, 9]), vocabulary=vocabulary)
    for r, anchor in enumerate((5, 9)):
        before = anchor
        for position in range(4):
            row = logits[r, position] + head.w2 @ head.w1[before]
            before = int(targets[row.argmax()])
            assert int(chain.tokens[r, position]) == before
    # The control: feeding draft ids back would draft something else.
    assert chain.tokens.tolist() != draft_chain(logits, head, torch.tensor([5, 9])).tokens.tolist()


def test_sampled_chain_uses_the_given_pick() -> None:
    logits, _, _ = block(2, 3)
    chain = draft_chain(logits, make_head("vanilla"), torch.tensor([1, 2]), pick=lambda row: row.argmin(-1))
    assert torch.equal(chain.tokens, chain.logits.argmin(-1))


def test_no_depth_is_legal() -> None:
    logits, _, _ = block(2, 0)
    assert draft_chain(logits, make_head("vanilla"), torch.tensor([1, 2])).tokens.shape == (2, 0)


def test_shapes_that_are_no_head_are_refused() -> None:
    w1, w2 = torch.zeros(VOCAB, RANK), torch.zeros(VOCAB, RANK)
    for layer in (
        Projection(torch.zeros(RANK, RANK), torch.zeros(RANK)),  # no hidden state left
        Projection(torch.zeros(RANK + 1, HIDDEN + RANK), torch.zeros(RANK + 1)),
        Projection(torch.zeros(RANK, HIDDEN + RANK), torch.zeros(1)),
    ):
        with pytest.raises(ValueError, match=r"MarkovHead.gate: expected weight \[3, 3 \+ H\]"):
            MarkovHead(w1, w2, gate=layer)
    with pytest.raises(ValueError, match=r"MarkovHead.joint: expected weight \[9, 6 \+ H\]"):
        MarkovHead(w1, w2, joint=Projection(torch.zeros(9, 6), torch.zeros(9)))
    gate = Projection(torch.zeros(RANK, HIDDEN + RANK), torch.zeros(RANK))
    with pytest.raises(ValueError, match="got both"):
        MarkovHead(w1, w2, gate=gate, joint=gate)
