"""The local loop: drafted output is plain decoding's, token for token, and broken loops are noticed."""

import dataclasses

import pytest
import torch

pytest.importorskip("transformers", reason="specplug.local needs the extra `local`")

import local_models

from specplug import window
from specplug.local import loop
from specplug.local.loop import generate
from specplug.local.method import METHODS, Method
from specplug.local.target import SlotCache

LIMIT = 24
SPECULATIVE = [
    Method("chain"),
    Method("tree", 1),
    Method("tree", 5),
    Method("tree", 16),
    Method("tree-greedy-path", 16),
    Method("tree-without-head", 16),
]


def answers(method: Method, kind: str = "dspark", **options) -> list[list[int]]:
    """Each prompt on its own."""
    return [
        generate(
            local_models.target(),
            [prompt],
            method=method,
            draft=local_models.draft(kind),
            limit=LIMIT,
            **options,
        ).tokens[0]
        for prompt in local_models.prompts()
    ]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return answers(Method("plain"))


def test_plain_is_what_transformers_generates(plain):
    model = local_models.target().model
    for prompt, answer in zip(local_models.prompts(), plain, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=LIMIT,
            eos_token_id=None,
        )
        assert whole[0, len(prompt) :].tolist() == answer


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
@pytest.mark.parametrize("method", SPECULATIVE, ids=lambda m: m.label)
def test_greedy_output_is_plain_decodings(method, kind, plain):
    assert answers(method, kind) == plain


@pytest.mark.parametrize("method", [Method("chain"), Method("tree", 16)], ids=lambda m: m.label)
def test_seeded_sampling_is_plain_decodings(method):
    plain = answers(Method("plain"), temperature=0.9, seeds=[11])
    assert answers(method, temperature=0.9, seeds=[11]) == plain
    assert answers(Method("plain"), temperature=0.9, seeds=[12]) != plain  # the noise does matter


def test_trees_do_accept(plain):
    """Otherwise every equality above would be trivial."""
    target, draft = local_models.target(), local_models.draft("dspark")
    prompts = local_models.prompts()
    chain = generate(target, prompts, method=Method("chain"), draft=draft, limit=LIMIT)
    tree = generate(target, prompts, method=Method("tree", 16), draft=draft, limit=LIMIT)
    rounds = [sum(map(len, batch.emitted)) for batch in (chain, tree)]
    assert rounds[1] < rounds[0] < sum(map(len, plain))


def broken_commit(monkeypatch):
    monkeypatch.setattr(SlotCache, "commit", lambda self, moves: None)


def broken_feature_move(monkeypatch):
    monkeypatch.setattr(window.Commit, "move", lambda self, rows: None)


def broken_mask(monkeypatch):
    true_layout = loop.lay_out_windows

    def all_visible(**arguments):
        windows = true_layout(**arguments)
        return dataclasses.replace(windows, mask=torch.ones_like(windows.mask))

    monkeypatch.setattr(loop, "lay_out_windows", all_visible)


def broken_positions(monkeypatch):
    true_layout = loop.lay_out_windows

    def linear(**arguments):
        windows = true_layout(**arguments)
        row = torch.arange(windows.depths.shape[1]).expand_as(windows.depths)
        return dataclasses.replace(windows, depths=row.clamp(max=arguments["max_depth"]))

    monkeypatch.setattr(loop, "lay_out_windows", linear)


def broken_parent(monkeypatch):
    """Rows see the ancestors of the node before their own parent."""
    true_layout = loop.lay_out_windows

    def wrong(**arguments):
        parents = arguments.pop("parents")
        return true_layout(parents=torch.where(parents > 0, parents - 1, parents), **arguments)

    monkeypatch.setattr(loop, "lay_out_windows", wrong)


@pytest.mark.parametrize("fault", [broken_commit, broken_mask, broken_positions, broken_parent])
def test_a_broken_loop_is_noticed(fault, plain, monkeypatch):
    """Negative controls: each of these must change the output."""
    fault(monkeypatch)
    assert answers(Method("tree", 16)) != plain


def test_unmoved_features_cost_acceptance_not_exactness(plain, monkeypatch):
    """Features only steer the draft: with wrong ones the output stays, and more rounds are needed."""
    target, draft = local_models.target(), local_models.draft("dspark")

    def rounds() -> int:
        batch = generate(
            target, local_models.prompts(), method=Method("tree-without-head", 16), draft=draft, limit=LIMIT
        )
        assert batch.tokens == plain
        return sum(map(len, batch.emitted))

    right = rounds()
    broken_feature_move(monkeypatch)
    assert rounds() > right


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "method", [Method("plain"), Method("chain"), Method("tree", 7)], ids=lambda m: m.label
)
def test_a_batch_is_its_prompts_alone(method, temperature):
    target, draft = local_models.target(), local_models.draft("dspark")
    seeds = [5, 6, 7]
    together = generate(
        target,
        local_models.prompts(),
        method=method,
        draft=draft,
        limit=LIMIT,
        temperature=temperature,
        seeds=seeds,
    )
    for number, prompt in enumerate(local_models.prompts()):
        alone = generate(
            target,
            [prompt],
            method=method,
            draft=draft,
            limit=LIMIT,
            temperature=temperature,
            seeds=[seeds[number]],
        )
        assert together.tokens[number] == alone.tokens[0]
        assert together.emitted[number] == alone.emitted[0]


@pytest.mark.parametrize(
    "method", [Method("plain"), Method("chain"), Method("tree", 16)], ids=lambda m: m.label
)
def test_an_answer_ends_with_its_first_stop_token(method, plain):
    """Two of three requests stop early, at a token inside an accepted path; the third goes on."""
    stop = frozenset({plain[0][4], plain[1][9]} - set(plain[2]))
    assert stop
    expected = [
        answer[: next((i + 1 for i, token in enumerate(answer) if token in stop), LIMIT)] for answer in plain
    ]
    assert len(expected[2]) == LIMIT > min(map(len, expected))
    batch = generate(
        local_models.target(),
        local_models.prompts(),
        method=method,
        draft=local_models.draft("dspark"),
        limit=LIMIT,
        stop=stop,
    )
    assert batch.tokens == expected
    for answer, emitted in zip(expected[:2], batch.emitted[:2], strict=True):
        assert sum(emitted) >= len(answer)
        assert answer[-1] not in stop or sum(emitted) == len(answer)


@pytest.mark.parametrize("limit", [1, 2, 9])
def test_the_limit_is_exact(limit, plain):
    batch = generate(
        local_models.target(),
        local_models.prompts(),
        method=Method("tree", 16),
        draft=local_models.draft("dspark"),
        limit=limit,
    )
    assert batch.tokens == [answer[:limit] for answer in plain]


def test_a_shallower_draft_is_exact(plain):
    batch = generate(
        local_models.target(),
        local_models.prompts(),
        method=Method("tree", 16),
        draft=local_models.draft("dspark", 3),
        limit=LIMIT,
    )
    assert batch.tokens == plain
    assert max(max(emitted) for emitted in batch.emitted) <= 4


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"prompts": []}, "one prompt or more"),
        ({"prompts": [[5], []]}, "one token or more"),
        ({"limit": 0}, "limit: expected 1 token or more, got 0"),
        ({"temperature": -1.0}, "temperature: expected 0 or more"),
        ({"temperature": float("nan")}, "temperature: expected 0 or more"),
        ({"seeds": [1, 2]}, "seeds: expected one for each of 1 prompts, got 2"),
        ({"draft": None}, "method tree: expected a draft"),
        ({"method": Method("tree", 0)}, "budget: expected 1..256"),
        ({"method": Method("chain", 3)}, "budget: expected 0 for chain, which is no tree, got 3"),
        ({"method": Method("forest")}, f"method: expected one of {', '.join(METHODS)}"),
        ({"method": Method("tree", 8, 0)}, "candidates: expected 1..1024"),
    ],
)
def test_what_cannot_work_is_refused(change, complaint):
    arguments = {
        "prompts": [[5]],
        "method": Method("tree", 8),
        "draft": local_models.draft("dspark"),
        "limit": 4,
    } | change
    with pytest.raises(ValueError, match=complaint):
        generate(local_models.target(), arguments.pop("prompts"), **arguments)
