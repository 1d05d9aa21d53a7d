"""A request's life with draft trees: aborted at any moment, and a second turn that drafts as well from cached
blocks as from fresh ones. What an engine's own life holds beside that is refused by name."""

import pytest
from comparing import differences
from engine_rig import Output, engine, tree
from prompts import cut, short

from specplug import models

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BUDGET = 16
PIECE = 64  # rows a step: the longest prompt below arrives in four pieces
SETTINGS = [
    pytest.param(("dspark", True), id="dspark-async"),
    pytest.param(("dflash", False), id="dflash-sync", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=SETTINGS)
def trees(request, rig):
    draft, async_scheduling = request.param
    with engine(
        tree(draft, BUDGET), async_scheduling=async_scheduling, max_num_batched_tokens=PIECE, max_num_seqs=4
    ) as running:
        running.free_at_start = running.free_blocks
        yield running


@pytest.fixture(scope="module")
def greedy(rig):
    from vllm import SamplingParams

    return lambda tokens: SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def moment(running, name: str) -> str:
    """Where a request is in its life; "over" once the engine has let it go."""
    found = [one for key, one in running.core.scheduler.requests.items() if key.startswith(name)]
    if not found:
        return "over"
    (one,) = found
    if one.num_computed_tokens == 0:
        return "waiting"
    return "prefill" if one.num_computed_tokens < one.num_prompt_tokens else "decode"


def step(running, answers: dict[str, Output]) -> None:
    for result in running.llm.llm_engine.step():
        if result.finished:
            (first,) = result.outputs
            answers[result.request_id] = Output(
                list(first.token_ids), first.finish_reason, first.stop_reason, 0, None, None
            )


def test_aborts_at_any_moment(plain, trees, greedy):
    """After every number of steps, from none to the last: one of five, two of them, all at once. Who stays
    gets the tokens of plain decoding, and every block comes back."""
    prompts = [cut(70, 200), *short(3), cut(71, 100)]
    names = [f"request-{i}" for i in range(len(prompts))]
    expected = plain.generate(prompts, greedy(14))
    core, seen = trees.llm.llm_engine, set()
    for steps in range(12):
        trees.llm.reset_prefix_cache()
        gone = [names[steps % 5]], [names[0], names[(steps + 2) % 5]], names
        gone = set(gone[steps % 3])
        for name, prompt in zip(names, prompts, strict=True):
            core.add_request(name, {"prompt_token_ids": list(prompt)}, greedy(14))
        answers: dict[str, Output] = {}
        for _ in range(steps):
            step(trees, answers)
        seen |= {moment(trees, name) for name in gone}
        core.abort_request(list(gone))
        while core.has_unfinished_requests():
            step(trees, answers)
        assert set(names) - gone <= set(answers), steps
        kept = [i for i, name in enumerate(names) if name in answers]
        assert differences([expected[i] for i in kept], [answers[names[i]] for i in kept]) == [], steps
        assert trees.core.scheduler.get_request_counts() == (0, 0)
        assert trees.free_blocks == trees.free_at_start, steps
    assert {"waiting", "prefill", "decode"} <= seen
    assert differences(expected, trees.generate(prompts, greedy(14))) == []


def test_a_second_turn_from_the_cache_accepts_as_much_as_a_fresh_one(plain, trees, greedy):
    """Step by step. The control: with the drafter's part of the cached blocks wiped, it accepts otherwise,
    and the text stays."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    first = [cut(30 + i, 70 + 9 * i) for i in range(3)]
    answers = trees.generate(first, greedy(80))
    turns = [(*prompt, *answer.ids, *cut(40, 12)) for prompt, answer in zip(first, answers, strict=True)]
    expected = plain.generate(turns, greedy(24))
    layers = get_layers_from_vllm_config(trees.core.vllm_config, Attention)
    drafter = [layer for name, layer in layers.items() if name not in trees.runner.speculator.target_layers]
    assert drafter
    emitted, cached = {}, {}
    for kind in ("hit", "wiped", "fresh"):
        if kind == "wiped":
            for layer in drafter:
                layer.kv_cache.zero_()
        if kind == "fresh":
            trees.llm.reset_prefix_cache()
        runs = []
        for turn, want in zip(turns, expected, strict=True):
            with trees.traced() as trace:
                got = trees.generate([turn], greedy(24))
            assert differences([want], got) == []
            runs.append((list(trace.values()), got[0].cached))
        emitted[kind], cached[kind] = [run for run, _ in runs], [count for _, count in runs]
    assert all(count > len(prompt) for count, prompt in zip(cached["hit"], first, strict=True))  # decoded too
    assert all(wiped >= hit for wiped, hit in zip(cached["wiped"], cached["hit"], strict=True))
    assert cached["fresh"] == [0] * len(turns)
    assert emitted["hit"] == emitted["fresh"]
    assert emitted["wiped"] != emitted["fresh"]


def test_sleep_is_refused(rig):
    """By vLLM where the platform cannot sleep, as a CPU; by us where it can."""
    from types import SimpleNamespace

    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    from specplug_vllm.refusals import check_engine

    target = str(models.path("quick", "target"))
    args = EngineArgs(model=target, enable_sleep_mode=True, speculative_config=tree("dspark", BUDGET))
    with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
        args.create_engine_config()
    ordinary = dict.fromkeys(("is_hybrid", "is_attention_free", "use_mla", "is_encoder_decoder"), False)
    model = SimpleNamespace(
        **ordinary, get_sliding_window=lambda: None, supports_multimodal_inputs=False, uses_mrope=False
    )
    asked = SimpleNamespace(kv_cache_dtype="auto", enable_sleep_mode=True)
    with pytest.raises(ValueError, match="method ddtree refuses: --enable-sleep-mode"):
        check_engine(asked, model, ParallelConfig())
