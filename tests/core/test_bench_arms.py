"""The arms of `specplug bench`: from flags and recipes, in what they may differ, their labels."""

import json

import pytest

from specplug import bench_arms, models
from specplug.recipe_shelf import find


def _arms(engine, *asked, common=(), on_gpu=True):
    return bench_arms.from_flags(
        engine, asked, target="T", draft="D E", budget=8, common=common, on_gpu=on_gpu
    )


def test_words_are_a_shells_and_json_is_one():
    text = """A=1 --x {"a": 1, "b": "c d {e}"} --w={} --y '{"q": 2}' --z "a b" {draft}"""
    assert bench_arms.words(text, "--arm") == [
        *("A=1", "--x", '{"a": 1, "b": "c d {e}"}', "--w={}", "--y", '{"q": 2}', "--z", "a b", "{draft}")
    ]


def test_default_arms_are_plain_and_a_tree():
    plain, tree = _arms("vllm")
    assert (plain.name, plain.speculative, tree.name, tree.speculative) == ("plain", False, "ddtree", True)
    config = json.loads(tree.command[tree.command.index("--speculative-config") + 1])
    assert config == {"method": "ddtree", "model": "D E", "tree_budget": 8}
    assert tree.command[: len(plain.command)] == plain.command
    _, tree = _arms("sglang")
    assert tree.command[-6:] == [
        *("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "D E"),
        *("--speculative-num-draft-tokens", "9"),
    ]
    assert bench_arms.started(tree, 81)[bench_arms.started(tree, 81).index("--port") + 1] == "81"


def test_eager_mode_and_synthetic_acceptance_are_labelled(monkeypatch):
    def labels(engine, *asked, **options):
        return [" ".join(arm.labels) for arm in _arms(engine, *asked, **options)]

    quiet = 'x=--speculative-config {"method": "dspark", "model": "{draft}"}'
    assert labels("vllm", quiet) == ["", ""]
    assert all("EAGER MODE" in one for one in labels("vllm", quiet, on_gpu=False))
    assert all("EAGER MODE" in one for one in labels("sglang", common=["--disable-cuda-graph"]))
    for flags in ("-O0", "-cc.cudagraph_mode=none"):
        assert "EAGER MODE" in labels("vllm", f"x={flags}")[1]
    synthetic = 'x=--speculative-config {"method": "dspark", "rejection_sample_method": "synthetic"}'
    plain, arm = labels("vllm", synthetic)
    assert "SYNTHETIC" not in plain
    assert "SYNTHETIC" in arm
    flags = "--speculative-algorithm DSPARK"
    assert "SYNTHETIC" in labels("sglang", f"x=SGLANG_SIMULATE_ACC_LEN=4 {flags}")[1]
    assert "SYNTHETIC" not in labels("sglang", f"x={flags}")[1]
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    assert "SYNTHETIC" in labels("sglang", f"x={flags}")[1]


@pytest.mark.parametrize(
    "flags",
    [
        '-sc {"model": "{draft}"}',
        "--speculative_config.method ddtree --speculative_config.model {draft}",
        "--spec-method=ngram",
    ],
)
def test_an_arm_speculates_however_its_flags_are_written(flags):
    assert [arm.speculative for arm in _arms("vllm", f"x={flags}")] == [False, True]


def test_arms_may_differ_in_the_draft_and_say_what_else():
    arms = _arms("vllm", 'x=--speculative-config {"method": "dspark"} --attention-backend FLASHINFER')
    plain, other = bench_arms.compared(arms, arms[0])
    assert plain.labels == []
    assert other.labels == ["differs from plain in --attention-backend: FLASHINFER against not given"]
    for flags, said in (
        ("-q fp8", "--quantization: fp8"),
        ("--max_model_len 9", "--max-model-len: 9"),
        ("-tp 2", "--tensor-parallel-size: 2"),
        ("--kv-cache-dtype=fp8", "--kv-cache-dtype: fp8"),
        ("--hf-overrides.rope_theta 5", '--hf-overrides: {"rope_theta": 5}'),
    ):
        arms = _arms("vllm", f"x={flags}")
        with pytest.raises(ValueError, match=f"arm x: {said}, and plain has "):
            bench_arms.compared(arms, arms[0])


def test_arms_of_a_recipe_have_its_plain_arm_first_and_a_port_to_fill_in():
    shelved = find("vllm-ddtree-dspark-cpu")
    plain, tree = bench_arms.from_recipe(shelved, ["ddtree"])
    assert (plain.name, plain.speculative, tree.name, tree.speculative) == ("plain", False, "ddtree", True)
    assert tree.command[tree.command.index("--port") + 1] == "{port}"
    assert str(models.path("deep-thin", "dspark")) in tree.command[-1]
    assert tree.environment["TRITON_INTERPRET"] == "1"
    assert bench_arms.flag(plain.command, "--dtype") == "float32"
    assert bench_arms.with_flags(plain, ["--spec-method", "ngram"]).speculative
    everything = bench_arms.from_recipe(shelved, [])
    assert [arm.speculative for arm in everything] == [False] + [True] * (len(everything) - 1)
    assert bench_arms.compared(everything, everything[0])[0].labels == plain.labels
    with pytest.raises(ValueError, match=r"--arm: expected one of ddtree, .*, got 'tree'"):
        bench_arms.from_recipe(shelved, ["tree"])
