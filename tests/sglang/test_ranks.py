"""Two tensor-parallel ranks run the same algorithm and say so; ranks that differ do not serve."""

import pytest
from comparing import differences
from prompts import varied
from sglang_rig import accepted_length, engine, launch, tree

pytestmark = pytest.mark.sglang

GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
TWO = {"tp_size": 2, "log_level": "info"}
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # SGLang wants one group of cores a rank

# Each rank writes down its refusal before any of them ends: the first to end takes the others with it.
DISAGREE = """
import pathlib

import torch.distributed
from specplug import ranks

agree = ranks.agree

def disagree(facts, group):
    from sglang.srt.runtime_context import get_parallel

    rank = get_parallel().tp_rank
    try:
        return agree(facts | ({"policy": "another"} if rank == 1 else {}), group)
    except RuntimeError as refusal:
        pathlib.Path(__file__).with_name(f"rank{rank}").write_text(str(refusal))
        torch.distributed.barrier(group)
        raise

ranks.agree = disagree
"""


def test_two_ranks_are_plain_decoding(plain):
    prompts = varied()[::3]
    expected = plain.generate(prompts, GREEDY)
    with engine(tree("dspark", 16), overlap=True, env=CORES, **TWO) as running:
        outputs = running.generate(prompts, GREEDY)
        ranks = running.state["specplug"]["ranks"]
    assert differences(expected, outputs) == []
    assert 2 < accepted_length(outputs) <= 8
    assert len(ranks) == 2
    assert ranks[0] == ranks[1]


def test_ranks_that_differ_do_not_serve(tmp_path):
    fault = tmp_path / "fault.py"
    fault.write_text(DISAGREE)
    log = tmp_path / "log"
    env = CORES | {"SPECPLUG_RIG_SGLANG_LOAD": str(fault)}
    process, _ = launch(tree("dspark", 16), log=log, env=env, **TWO)
    assert process.wait(timeout=200) != 0
    for rank in (0, 1):
        assert "specplug: rank 1 differs from rank 0" in (tmp_path / f"rank{rank}").read_text()
    said = log.read_text()
    assert "specplug: rank 1 differs from rank 0" in said
    assert "fired up" not in said
