"""`specplug bench` with vLLM: its generator takes our command line and prompts; a whole run holds."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from specplug import bench_load, bench_prompts, models
from specplug.bench_result import Load, read_result
from specplug.local.prompts import data_sets

pytestmark = pytest.mark.vllm
TARGET = models.path("quick", "target")


@pytest.mark.parametrize("load", [Load(concurrency=4), Load(rate=2.0)], ids=str)
def test_the_generator_takes_our_command_and_reads_our_prompts(load, tmp_path):
    from vllm.benchmarks.datasets import get_samples
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = bench_prompts.rendered(data_sets(["chat", "code"], files=[], count=3, seed=0), tokenizer)
    sent = bench_prompts.cycled(prompts, 8)
    name = bench_prompts.reader("vllm", prompts, 24)
    data = bench_prompts.write(name, "vllm", sent, tmp_path / "prompts")
    command = bench_load.command(
        "vllm",
        load,
        data,
        url="http://127.0.0.1:1",
        model="served",
        tokenizer=str(TARGET),
        requests=8,
        max_tokens=24,
        ignore_eos=True,
        temperature=0.8,
        top_p=0.9,
        seed=3,
        output=tmp_path / "out.json",
    )
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    parsed = parser.parse_args(command[command.index("serve") + 1 :])
    assert (parsed.max_concurrency, parsed.request_rate) == (
        (4, float("inf")) if load.rate is None else (None, 2.0)
    )
    assert (parsed.temperature, parsed.top_p, parsed.seed, parsed.ignore_eos) == (0.8, 0.9, 3, True)
    assert (Path(parsed.result_dir) / parsed.result_filename) == tmp_path / "out.json"
    parsed.sharegpt_output_len = parsed.output_len  # as its main does
    samples = get_samples(parsed, tokenizer)
    assert [sample.prompt for sample in samples] == [prompt.text for prompt in sent]
    assert [sample.prompt_len for sample in samples] == [prompt.tokens for prompt in sent]
    assert {sample.expected_output_len for sample in samples} == {24}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_is_exact_counts_its_rounds_and_leaves_nothing_behind(tmp_path):
    command = [
        *(Path(sys.executable).with_name("specplug"), "bench", "--target", "quick", "--concurrency", "2"),
        *("--rate", "4", "--count", "2", "--requests", "6", "--repeats", "1", "--max-tokens", "24"),
        *("--quality-prompts", "6", "--samples", "40", "--out", tmp_path / "bench.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "bench.json")
    assert [(cell.arm, str(cell.load)) for cell in result.cells] == [
        *[("plain", "2 in flight"), ("plain", "4 requests/s")],
        *[("ddtree", "2 in flight"), ("ddtree", "4 requests/s")],
    ]
    for cell in result.cells:
        (repeat,) = cell.repeats
        assert repeat.completed == 6
        assert repeat.output_tokens <= 6 * 24
        assert cell.peak_host_bytes > 1 << 28
        if cell.arm == "plain":
            assert repeat.rounds is None
        else:
            assert 1.5 < repeat.rounds.accepted_length < 8
            assert repeat.rounds.nodes_per_draft == 16
    plain, tree = (result.cell(arm, Load(concurrency=2)).repeats[0] for arm in ("plain", "ddtree"))
    assert plain.output_tokens == tree.output_tokens  # greedy: the same text
    (quality,) = result.quality
    assert quality.agreement.identical == quality.agreement.answers == 6
    assert quality.distribution.same
    assert "CPU RIG" in (tmp_path / "bench.md").read_text()
