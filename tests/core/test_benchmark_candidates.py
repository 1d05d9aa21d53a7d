"""benchmarks/candidates.py: its base table, its count of accepted tokens, and that it runs."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers", reason="the benchmark uses specplug.local")

from specplug.ddtree import grow
from specplug.heads import MarkovHead
from specplug.local.draft import Proposal
from specplug.markov import conditioned_reference

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "candidates.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_candidates", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def head() -> MarkovHead:
    torch.manual_seed(0)
    return MarkovHead(torch.randn(30, 4), torch.randn(30, 4))


@pytest.fixture
def proposal() -> Proposal:
    torch.manual_seed(1)
    return Proposal(torch.tensor([3, 17]), torch.zeros(2, 4, 1), 2 * torch.randn(2, 4, 30))


def test_the_base_table_scores_exactly_at_depth_0_and_with_every_token(benchmark, head, proposal):
    exact = conditioned_reference(proposal.logits, head, proposal.anchors)
    whole = benchmark.base_table(proposal, head, 30)
    order = whole.tokens
    expected = exact.log_probs.gather(3, order[:, :, None].expand(-1, -1, 30, -1))
    torch.testing.assert_close(whole.log_probs[:, 0, 0], expected[:, 0, 0])
    for depth in range(1, 4):
        rows = expected[:, depth].gather(1, order[:, depth - 1, :, None].expand(-1, -1, 30))
        torch.testing.assert_close(whole.log_probs[:, depth], rows)


def test_base_candidates_are_the_best_base_logits(benchmark, head, proposal):
    table = benchmark.base_table(proposal, head, 5)
    assert torch.equal(table.tokens, proposal.logits.topk(5).indices)
    assert table.log_probs.shape == (2, 4, 5, 5)
    assert grow(table, 12).counts.tolist() == [12, 12]


def test_accepted_tokens_by_hand(benchmark, head, proposal):
    """Follow the known continuation down the first nodes of each tree, node by node."""
    tree = benchmark.builders(head)["full"](proposal)
    ahead = torch.stack([tree.tokens[r, torch.tensor([0, 1, 2, 3, 4])] for r in range(2)])
    ahead[0, 1] = next(int(t) for t, p in zip(tree.tokens[0], tree.parents[0], strict=True) if p == 0)
    for budget in (1, 16, 64):
        for r in range(2):
            node, count = -1, 1
            for token in ahead[r].tolist():
                below = [
                    n for n in range(budget) if tree.parents[r, n] == node and tree.tokens[r, n] == token
                ]
                if not below:
                    break
                node, count = below[0], count + 1
            assert int(benchmark.accepted(tree, ahead, budget)[r]) == count
    assert int(benchmark.accepted(tree, ahead, 64)[0]) >= 3  # the walk does go down


def test_loss_is_relative_to_the_full_vocabulary(benchmark):
    value, error = benchmark.loss([9.0, 9.0, 9.0], [10.0, 10.0, 10.0])
    assert (round(value, 12), error) == (0.1, 0.0)
    assert benchmark.loss([9.0, 12.0], [10.0, 11.0])[1] > 0


def test_both_reports_are_printed():
    done = subprocess.run(
        [
            sys.executable, str(SCRIPT), "--set", "quick", "--windows", "2", "--tokens", "4", "--every", "4",
            "--batch", "2", "--vocab", "300", "--rank", "4", "--repeats", "1", "--budget", "4",
        ],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    labels = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")]
    kinds = [f"{kind} {c}" for kind in ("base", "mix") for c in (8, 16, 32, 64)]
    assert [label for label in labels if label in {*kinds, "full"}] == [*kinds, "full"]
    assert "table and tree, C = 64" in labels
