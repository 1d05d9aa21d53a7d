"""Target windows and draft blocks of the local loop against independent computations."""

import dataclasses
import math

import pytest
import torch

pytest.importorskip("transformers", reason="specplug.local needs the extra `local`")

import local_models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from specplug import models
from specplug.checkpoint import read_draft
from specplug.ddtree import build_tree
from specplug.local.draft import Draft, layer_config
from specplug.local.loop import Batch, Round, generate
from specplug.local.method import METHODS, TREES, Method
from specplug.local.target import Target
from specplug.tree import ancestor_mask


@pytest.fixture(scope="module")
def features() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [2, 30] and the target's hidden states of all layers, [layers + 1][2, 30, h]."""
    torch.manual_seed(0)
    ids = torch.randint(4, 1024, (2, 30))
    with torch.inference_mode():
        return ids, local_models.target().model(ids, output_hidden_states=True).hidden_states


@torch.inference_mode()
def test_features_are_the_outputs_of_the_tapped_layers(features):
    ids, hidden = features
    target = Target(local_models.target().model, (-1, 0, 2))
    cache = target.cache(2, 40)
    causal = torch.ones(30, 30, dtype=torch.bool).tril().expand(2, -1, -1)
    depths = torch.arange(30).expand(2, -1)
    starts = torch.zeros(2, dtype=torch.int64)
    rows = target.forward(ids, starts=starts, depths=depths, mask=causal, cache=cache, live=30)
    torch.testing.assert_close(rows.features, torch.cat([hidden[0], hidden[1], hidden[3]], -1))


@torch.inference_mode()
def test_every_row_of_a_tree_window_is_its_path_computed_alone():
    """Two requests of different committed lengths; each row against a plain forward over its own path."""
    torch.manual_seed(1)
    target = local_models.target()
    prefixes = [torch.randint(4, 1024, (n,)) for n in (9, 5)]
    tree = build_tree(torch.randn(2, 3, 50).log_softmax(-1), 10)
    cache = target.cache(2, 40)
    starts = torch.tensor([8, 4])
    ids = torch.zeros(2, 8, dtype=torch.int64)
    for r, prefix in enumerate(prefixes):
        ids[r, : len(prefix) - 1] = prefix[:-1]
    causal = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, -1, -1)
    column = torch.arange(8).expand(2, -1)
    target.forward(ids, starts=torch.zeros_like(starts), depths=column, mask=causal, cache=cache, live=8)
    anchors = torch.stack([prefix[-1] for prefix in prefixes])
    rows = target.forward(
        torch.cat((anchors[:, None], tree.tokens), 1),
        starts=starts,
        depths=torch.nn.functional.pad(tree.depths.long(), (1, 0)),
        mask=ancestor_mask(tree.parents, tree.counts, max_depth=3),
        cache=cache,
        live=8 + 11,
    )
    for r, prefix in enumerate(prefixes):
        for node in range(-1, 10):
            path, at = [], node
            while at >= 0:
                path.insert(0, int(tree.tokens[r, at]))
                at = int(tree.parents[r, at])
            alone = target.model(torch.cat((prefix, torch.tensor(path, dtype=torch.int64)))[None]).logits[
                0, -1
            ]
            torch.testing.assert_close(rows.logits[r, node + 1], alone, rtol=1e-4, atol=1e-4)


def small(kind):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(2)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128))
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, num_key_value_heads=2))
    return MistralForCausalLM(MistralConfig(**sizes, intermediate_size=48, sliding_window=8))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.inference_mode()
def test_other_architectures_decode_as_transformers_does(kind):
    """Batch of two, so rows, slots and masks matter."""
    target = Target(small(kind), (0,))
    prompts = [[5, 9, 33, 2, 60], [7, 8]]
    batch = generate(target, prompts, method=Method("plain"), limit=12)
    for prompt, answer in zip(prompts, batch.tokens, strict=True):
        expected = list(prompt)
        for _ in range(12):
            expected.append(int(target.model(torch.tensor([expected])).logits[0, -1].argmax()))
        assert answer == expected[len(prompt) :]


def test_a_sliding_window_is_refused():
    with pytest.raises(ValueError, match="expected full attention in every layer"):
        Target(small("mistral"), ())


@pytest.fixture(scope="module")
def decoder():
    return local_models.script("decoder")


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
@torch.inference_mode()
def test_blocks_are_those_of_the_training_scripts(kind, decoder, features):
    """Two requests of different context lengths, context added in ragged pieces, to 1e-5."""
    ids, hidden = features
    mine = local_models.draft(kind)
    preset = local_models.script("presets").PRESETS["quick"]
    reference = decoder.Draft(kind, preset)
    weights = {name: mine.weights[name] for name in reference.state_dict()}
    reference.load_state_dict(weights)
    tapped = torch.cat([hidden[tap + 1] for tap in mine.checkpoint.target_layer_ids], -1)
    roots = torch.tensor([20, 13])
    cache = mine.cache(2, 48)
    mine.extend(cache, tapped[:, :10], torch.zeros(2, dtype=torch.int64))
    starts = torch.tensor([10, 6])  # the second request's rows from 6 on are written again
    mine.extend(cache, torch.stack([tapped[0, 10:20], tapped[1, 6:16]]), starts)
    anchors = ids.gather(1, roots[:, None])[:, 0]
    for _ in range(2):  # a block leaves no trace
        proposal = mine.propose(cache, anchors, roots, live=20 + mine.block)
    for r in range(2):
        context: list = []
        root = int(roots[r])
        reference.extend(tapped[r : r + 1, :root], torch.arange(root), context)
        expected = reference.propose(mine.embedding, int(anchors[r]), root, context)
        torch.testing.assert_close(proposal.logits[r], expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_survival_is_the_product_of_the_paths_confidences(features):
    ids, hidden = features
    draft = local_models.draft("dspark")
    tapped = torch.cat([hidden[tap + 1] for tap in draft.checkpoint.target_layer_ids], -1)
    cache = draft.cache(2, 40)
    draft.extend(cache, tapped[:, :12], torch.zeros(2, dtype=torch.int64))
    roots = torch.tensor([12, 12])
    proposal = draft.propose(cache, ids[:, 12], roots, live=12 + draft.block)
    tree = Method("tree", 20).build(draft, proposal)
    survival = draft.survivals(proposal, tree)
    weight, bias = (draft.weights[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
    w1 = draft.weights["markov_head.markov_w1.weight"]
    assert int(tree.depths.max()) > 2
    for r in range(2):
        expected: list[float] = []
        for node in range(20):
            parent = int(tree.parents[r, node])
            before = proposal.anchors[r] if parent < 0 else tree.tokens[r, parent]
            row = torch.cat((proposal.hidden[r, tree.depths[r, node] - 1], w1[before]))
            own = float(torch.sigmoid(weight[0] @ row + bias))
            expected.append(own * (1.0 if parent < 0 else expected[parent]))
        torch.testing.assert_close(survival[r], torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_a_draft_without_a_confidence_head_has_no_survival():
    draft = local_models.draft("dflash")
    assert draft.survivals(None, None) is None


def made(checkpoint, depth=None) -> Draft:
    model = local_models.target().model
    return Draft(
        checkpoint,
        embedding=model.get_input_embeddings().weight,
        lm_head=model.get_output_embeddings().weight,
        dtype=torch.float32,
        depth=depth,
    )


KINDS = [
    ("dflash", {}),
    ("headless", {}),
    ("vanilla", {"confidence": "markov"}),
    ("gated", {"confidence": "hidden"}),
    ("rnn", {"confidence": "markov"}),
    ("vanilla", {"targets": list(range(1, 32, 2))}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: str(value)[:20])
def test_every_published_kind_of_draft_decodes_exactly(kind, options, toy):
    """Random weights: what matters is that trees of all heads and vocabularies are verified as plain is."""
    checkpoint = read_draft(toy(kind, **options).path)
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=5, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.5,
    )  # fmt: skip
    target = Target(Qwen3ForCausalLM(config), checkpoint.target_layer_ids)
    model = target.model
    draft = Draft(
        checkpoint,
        embedding=model.get_input_embeddings().weight,
        lm_head=model.get_output_embeddings().weight,
        dtype=torch.float32,
    )
    prompts, seeds = [[4, 9, 17, 30], [8]], [1, 2]

    def answers(method: Method) -> Batch:
        return generate(
            target, prompts, method=method, draft=draft, limit=20, temperature=0.7, seeds=seeds, on_round=seen
        )

    survivals = []

    def seen(one: Round) -> None:
        survivals.append(draft.survivals(one.proposal, one.tree))
        if "targets" in options:
            live = torch.arange(one.tree.budget) < one.tree.counts[:, None]
            assert set(one.tree.tokens[live].tolist()) <= set(options["targets"])

    plain = answers(Method("plain"))
    for name in METHODS[1:]:
        assert answers(Method(name, 12 if name in TREES else 0, 6)).tokens == plain.tokens
    assert all((survival is not None) == ("confidence" in options) for survival in survivals)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ],
)
def test_both_spellings_of_the_rotary_base_count(spelling, toy):
    config = layer_config(read_draft(toy("dflash", config=spelling).path))
    frequency = Qwen3RotaryEmbedding(config).inv_freq
    assert math.isclose(float(frequency[1]), 5e5 ** (-2 / config.head_dim), rel_tol=1e-5)


@pytest.mark.parametrize("depth", [0, 8])
def test_a_depth_out_of_range_is_refused(depth):
    with pytest.raises(ValueError, match=rf"depth: expected 1..7, the draft's own, got {depth}"):
        made(read_draft(models.path("quick", "dspark")), depth)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"hidden_act": "silu"', '"hidden_act": "gelu"', "hidden_act"),
        ('"use_sliding_window": false', '"use_sliding_window": true', "use_sliding_window"),
        ('"mask_token_id": 3', '"mask_token_id": 3, "causal": true', "dflash_config.causal"),
    ],
)
def test_layers_it_does_not_compute_are_refused(old, new, key, tmp_path):
    source = models.path("quick", "dflash")
    text = (source / "config.json").read_text()
    assert old in text
    (tmp_path / "config.json").write_text(text.replace(old, new))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(ValueError, match=f"{key}: the local loop does not compute"):
        made(dataclasses.replace(read_draft(source), path=tmp_path))
