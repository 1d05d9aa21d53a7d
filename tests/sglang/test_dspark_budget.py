"""The total that the upgraded DSPARK picks, against the formulas written out, for three formats."""

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.speculative.dspark_components.dspark_planner import (
    DSparkScheduleConfig,
    compute_verify_token_budget,
)
from sglang.srt.speculative.dspark_components.dspark_sps import load_sps_table_from_path

from specplug.config import TreeOptions
from specplug.cost import from_probes, write_cost_table
from specplug.cost_curves import Probe
from specplug.planning import choose_policy
from specplug.step_log import EngineFacts
from specplug_sglang import dspark

pytestmark = pytest.mark.sglang

GAMMA = 7
CONFIG = DSparkScheduleConfig(gamma=GAMMA)
STEPS = {
    "sample_batch_tokens": [1, 4, 9, 16, 24, 40, 64],
    "sample_steps_per_sec": [410.0, 400.0, 330.0, 300.0, 210.0, 170.0, 60.0],
    "max_batch_tokens": 64,
}
ADDITIVE = {
    "bias_seconds": 2e-3,
    "bs_probes": [1, 4, 8],
    "alpha_seconds": [0.0, 4e-4, 1.5e-3],
    "m_probes": [1, 8, 20, 64],
    "theta_seconds": [0.0, 3e-4, 2e-3, 1.4e-2],
}
HERE = EngineFacts(
    engine="sglang",
    engine_version="0.5.23",
    target="target",
    draft="draft",
    target_hash="",
    draft_hash="",
    device="cpu",
    dtype="float32",
    tensor_parallel=1,
)


def survivals(seed, requests):
    """[R, gamma] fp32, non-increasing, some rows of next to nothing and some of near certainty."""
    random = np.random.default_rng(seed)
    confidences = random.beta(2, 1, (requests, GAMMA)) * random.integers(0, 4, (requests, 1)).clip(0.01, 1)
    confidences[random.random(requests) < 0.1] = 0.9999
    return torch.from_numpy(confidences.cumprod(1).astype(np.float32))


def policy(path, **options):
    return choose_policy(
        TreeOptions(model="draft", cost_table=str(path), online=False, **options),
        HERE,
        budget=GAMMA,
        depth=GAMMA,
        trees=False,
        logger=logging.getLogger("specplug.test"),
    )


def chosen(path, rows):
    """What SGLang gets in place of its own answer."""
    dspark.run(dspark.ChainBudget(policy(path), depth=GAMMA))
    try:
        answer = dspark._budget(
            compute_verify_token_budget, history_survival_probs=rows, sps_table=None, cfg=CONFIG
        )
    finally:
        dspark.run(None)
    return answer


def best(rows, seconds):
    """argmax over k of (R + the k best survivals) / seconds(R, k), the fewest among equals."""
    ranked = sorted((float(s) for row in rows for s in row if s >= dspark.MIN_SURVIVAL), reverse=True)
    requests = len(rows)
    rates = [(requests + sum(ranked[:k])) / seconds(requests, k) for k in range(len(ranked) + 1)]
    return rates.index(max(rates)), max(rates)


def step_seconds(requests, nodes):
    below = [i for i, tokens in enumerate(STEPS["sample_batch_tokens"]) if tokens <= requests + nodes]
    return 1 / STEPS["sample_steps_per_sec"][max(below, default=0)]


def additive_seconds(requests, nodes):
    alpha = np.interp(requests, ADDITIVE["bs_probes"], ADDITIVE["alpha_seconds"])
    theta = np.interp(requests + nodes, ADDITIVE["m_probes"], ADDITIVE["theta_seconds"])
    return ADDITIVE["bias_seconds"] + alpha + theta


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(("table", "seconds"), [(STEPS, step_seconds), (ADDITIVE, additive_seconds)])
def test_sglangs_tables_give_the_budgets_of_their_formulas(table, seconds, seed, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    rows = survivals(seed, requests=1 + seed % 8)
    nodes, rate = best(rows, seconds)
    got = chosen(path, rows)
    assert got.budget == nodes
    assert got.predicted_theta == pytest.approx(rate, rel=1e-6)
    assert got.predicted_step_seconds == pytest.approx(seconds(len(rows), nodes), rel=1e-6)
    stock = compute_verify_token_budget(
        history_survival_probs=rows, sps_table=load_sps_table_from_path(str(path)), cfg=CONFIG
    )
    assert stock.budget == nodes


def test_the_budgets_differ_with_the_survivals(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(STEPS))
    totals = {best(survivals(seed, 1 + seed % 8), step_seconds)[0] for seed in range(25)}
    assert len(totals) > 8, "the formula is tried on a few totals only"


@pytest.mark.parametrize("seed", range(10))
def test_ours_counts_the_draft_and_what_plain_decoding_costs(seed, tmp_path):
    rows = range(1, 65, 7)
    probes = [
        Probe(shape=shape, requests=r, tokens=max(r, n), context=0, median_seconds=base + 1e-4 * max(r, n))
        for shape, base in (("plain", 1e-3), ("chain", 1.4e-3))
        for r in range(1, 9)
        for n in sorted({max(r, n) for n in rows})
    ]
    drafts = [
        Probe(shape="chain", requests=r, tokens=0, context=0, median_seconds=6e-4 + 5e-5 * r)
        for r in range(1, 9)
    ]
    path = tmp_path / "ours.json"
    write_cost_table(path, from_probes(probes, drafts))
    requests = 1 + seed % 8

    def seconds(requests, nodes):
        drafting = 6e-4 + 5e-5 * requests
        return drafting + (1.4e-3 if nodes else 1e-3) + 1e-4 * (requests + nodes)

    nodes, rate = best(survivals(seed, requests), seconds)
    got = chosen(path, survivals(seed, requests))
    assert got.budget == nodes
    assert got.predicted_theta == pytest.approx(rate, rel=1e-3)
    assert load_sps_table_from_path(str(path)).sample_batch_tokens, "SGLang reads our table as its own"


def test_a_table_of_one_point_trims_nothing_and_says_so(tmp_path, caplog):
    path = tmp_path / "one.json"
    one = {"sample_batch_tokens": [8], "sample_steps_per_sec": [100.0], "max_batch_tokens": 64}
    path.write_text(json.dumps(one))
    with caplog.at_level(logging.INFO, logger="specplug.test"):
        got = chosen(path, survivals(1, 4))
    assert "trimming off" in caplog.text
    assert got.budget == int((survivals(1, 4) >= dspark.MIN_SURVIVAL).sum())


def test_sglang_answers_where_we_do_not_run():
    rows = survivals(3, 4)
    asked = {}

    def stock(**given):
        asked.update(given)
        return "stock"

    answer = dspark._budget(stock, history_survival_probs=rows, sps_table="table", cfg=CONFIG)
    assert answer == "stock"
    assert asked["sps_table"] == "table"


def test_a_table_of_another_engine_is_refused(tmp_path):
    table = from_probes(
        [Probe(shape="chain", requests=1, tokens=n, context=0, median_seconds=n * 1e-3) for n in (1, 8)],
        provenance=HERE.provenance(engine="vllm"),
    )
    write_cost_table(tmp_path / "other.json", table)
    with pytest.raises(ValueError, match="specplug profile"):
        policy(tmp_path / "other.json")
    assert policy(tmp_path / "other.json", cost_table_mismatch="warn").reason == ""


@pytest.mark.parametrize(
    ("content", "flag", "message"),
    [
        ({"tree_budget": 16}, None, "tree_budget is for DDTREE"),
        ({"cost_tabel": "x"}, None, "did you mean 'cost_table'"),
        ({"cost_table": "a.json"}, "b.json", "keep one"),
        ({"dspark": "no"}, None, "expected true or false"),
    ],
)
def test_options_that_mean_nothing_are_refused(content, flag, message, tmp_path, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(content))
    monkeypatch.setenv("SPECPLUG_CONFIG", str(config))
    view = SimpleNamespace(
        speculative_dspark_sps_table_path=flag,
        speculative_draft_model_path="draft",
        speculative_dspark_confidence_sts_path=None,
    )
    with pytest.raises(ValueError, match=message):
        dspark._check(lambda args: None, view) if "dspark" in content else dspark.options(view)


def test_temperatures_are_read_before_any_weight(tmp_path):
    file = tmp_path / "sts.json"
    file.write_text(json.dumps({"temperatures": [1.0, -2.0]}))
    view = SimpleNamespace(
        speculative_dspark_sps_table_path=None,
        speculative_draft_model_path="draft",
        speculative_dspark_confidence_sts_path=str(file),
    )
    with pytest.raises(ValueError, match=r"temperatures\[1\]"):
        dspark.options(view)


@pytest.mark.parametrize("certain", [True, False])
def test_the_next_token_of_a_draftless_step_follows_the_target(certain):
    """SGLang's acceptance of the drafts that stand in for none, cut before the first: its token is the
    target's draw. Had they been drawn from a draft (the control), a fixed token would not do."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult
    from sglang.srt.speculative.dspark_components.dspark_verify import accept_draft_tokens
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    requests, vocabulary, depth, repeats = 128, 5, 2, 12
    target = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = torch.zeros(requests, depth + 1, vocabulary)
    logits[:, 0] = target.log()
    info = SimpleNamespace(
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_k_sampling=False,
        need_top_p_sampling=False,
        temperatures=torch.ones(requests, 1),
    )
    assert all(
        hasattr(SamplingBatchInfo, name) or name in SamplingBatchInfo.__annotations__ for name in vars(info)
    )
    block = DraftBlockResult(
        draft_tokens=torch.zeros(requests, depth, dtype=torch.int64),
        corrected_logits=None if certain else torch.zeros(requests, depth, vocabulary),
        greedy_mask=torch.zeros(requests, dtype=torch.bool),
        temperatures=torch.ones(requests, 1),
        greedy_draft=certain,
    )
    layout = RaggedVerifyLayout.from_verify_lens(
        verify_lens_cpu=[1] * requests, device=torch.device("cpu"), grid=[requests]
    )
    counted = torch.zeros(vocabulary)
    torch.manual_seed(0)
    for _ in range(repeats):
        length, token, _ = accept_draft_tokens(
            candidates=torch.zeros(requests, depth + 1, dtype=torch.int64),
            target_logits=logits.flatten(0, 1).clone(),
            draft_block=block,
            sampling_info=info,
            draft_input=None,
            gamma=depth,
            verify_num_draft_tokens=depth + 1,
            cutoff_layout=layout,
        )
        assert not length.any()
        counted += torch.bincount(token, minlength=vocabulary)
    expected = target * requests * repeats
    chi2 = float(((counted - expected) ** 2 / expected).sum())
    assert (chi2 < 18.5) == certain  # 4 degrees of freedom: 1 in 1,000
