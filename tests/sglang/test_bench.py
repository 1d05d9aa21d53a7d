"""`specplug bench` with SGLang: its generator takes our command line and prompts; a whole run holds."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from specplug import bench_load, bench_prompts, models
from specplug.bench_result import Load, read_result
from specplug.local.prompts import data_sets

pytestmark = pytest.mark.sglang
TARGET = models.path("quick", "target")


@pytest.mark.parametrize("load", [Load(concurrency=4), Load(rate=2.0)], ids=str)
def test_the_generator_takes_our_command_and_reads_our_prompts(load, tmp_path, monkeypatch):
    from sglang.benchmark import serving
    from sglang.benchmark.datasets import get_dataset

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = bench_prompts.rendered(data_sets(["chat", "code"], files=[], count=3, seed=0), tokenizer)
    sent = bench_prompts.cycled(prompts, 8)
    data = bench_prompts.write(
        bench_prompts.reader("sglang", prompts, 24), "sglang", sent, tmp_path / "prompts"
    )
    command = bench_load.command(
        "sglang",
        load,
        data,
        url="http://127.0.0.1:1",
        model="served",
        tokenizer=str(TARGET),
        requests=8,
        max_tokens=24,
        ignore_eos=False,
        temperature=0.8,
        top_p=0.9,
        seed=3,
        output=tmp_path / "out.json",
    )
    seen = []
    monkeypatch.setattr(serving, "run_benchmark", seen.append)
    monkeypatch.setattr(sys, "argv", command[2:])
    serving.cli_main()
    (parsed,) = seen
    assert (parsed.max_concurrency, parsed.request_rate) == (
        (4, float("inf")) if load.rate is None else (None, 2.0)
    )
    assert (parsed.temperature, parsed.top_p, parsed.seed, parsed.disable_ignore_eos) == (0.8, 0.9, 3, True)
    assert (parsed.output_file, parsed.warmup_requests) == (str(tmp_path / "out.json"), 0)
    rows = get_dataset(parsed, tokenizer)
    # It shuffles them, by its seed, alike for every arm.
    assert sorted(row.prompt for row in rows) == sorted(prompt.text for prompt in sent)
    assert sum(row.prompt_len for row in rows) == sum(prompt.tokens for prompt in sent)
    assert {row.output_len for row in rows} == {24}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_is_exact_counts_its_rounds_and_leaves_nothing_behind(tmp_path):
    command = [
        *(Path(sys.executable).with_name("specplug"), "bench", "--engine", "sglang", "--target", "quick"),
        *("--concurrency", "2", "--count", "2", "--requests", "6", "--repeats", "1", "--max-tokens", "24"),
        *("--quality-prompts", "6", "--samples", "40", "--out", tmp_path / "bench.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "bench.json")
    plain, tree = result.cells
    assert (plain.arm, tree.arm) == ("plain", "ddtree")
    assert plain.repeats[0].rounds is None
    assert plain.repeats[0].output_tokens == tree.repeats[0].output_tokens  # greedy: the same text
    rounds = tree.repeats[0].rounds
    assert 1.5 < rounds.accepted_length < 8
    assert (rounds.plain, rounds.chain) == (0, 0)
    assert rounds.tree > 0
    assert rounds.nodes_verified >= 16 * rounds.drafts  # rounds of answers that had just ended count too
    (quality,) = result.quality
    assert quality.agreement.identical == quality.agreement.answers == 6
    assert quality.distribution.same
