"""The acceptance object without an engine, against a plain loop: chunks, order of logprob rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specplug.window import lay_out_windows

pytestmark = pytest.mark.vllm

VOCAB = 23
DEPTH = 3
# Parents of each request's drafted nodes; the third drafted nothing, the last has two rows without a node.
TREES = [[-1, 0, 0, 1], [-1, -1, 1], [], [-1, 0, 1, -1, 3], [-1, 0, -1, -1]]
LIVE = [4, 3, 0, 5, 2]


def depth_of(parents, node):
    return 1 if parents[node] == -1 else 1 + depth_of(parents, parents[node])


class ArgmaxSampler:
    """Stands in for vLLM's Sampler: draws the best token of every row and notes the rows it was given."""

    compute_nans = False
    logprobs_mode = "raw_logprobs"
    logprob_token_ids_state = None

    def __init__(self, num_logprobs):
        self.num_logprobs = num_logprobs
        self.req_states = SimpleNamespace(
            prefill_len=SimpleNamespace(gpu=torch.zeros(len(TREES), dtype=torch.int32))
        )
        self.calls = []

    def get_logprobs_dims(self, idx_mapping_np):
        return None if self.num_logprobs is None else (self.num_logprobs, 0)

    def sample(
        self, logits, expanded, mapping, mapping_np, pos, input_ids, local_pos, seq_lens, *, return_logprobs
    ):
        rows = logits.shape[0]
        assert rows == len(expanded) == len(pos) == len(input_ids) == len(local_pos)
        assert len(mapping) == len(mapping_np) == len(seq_lens)
        assert return_logprobs == (self.num_logprobs is not None)
        self.calls.append((rows, mapping.tolist(), pos.tolist()))
        return logits.argmax(-1), logits * 0.5


@pytest.fixture
def step():
    """Logits whose best token is often a child of the row, so that walks of every length occur."""
    generator = torch.Generator().manual_seed(11)
    widths = [1 + len(parents) for parents in TREES]
    bounds = np.cumsum([0, *widths]).astype(np.int32)
    logits = torch.randn(int(bounds[-1]), VOCAB, generator=generator)
    input_ids = torch.randint(0, VOCAB, (int(bounds[-1]),), generator=generator).to(torch.int32)
    for request, parents in enumerate(TREES):
        for node, parent in enumerate(parents):
            row = int(bounds[request]) + 1 + parent
            child = int(input_ids[int(bounds[request]) + 1 + node])
            logits[row, child] += 4.0 * ((node + request) % 3)
    budget = max(map(len, TREES))
    padded = torch.tensor(
        [[*parents, *[-1] * (budget - len(parents))] for parents in TREES], dtype=torch.int32
    )
    depths = torch.tensor(
        [
            [depth_of(parents, node) if node < len(parents) else 0 for node in range(budget)]
            for parents in TREES
        ],
        dtype=torch.int32,
    )
    cu = torch.from_numpy(bounds)
    drafted = torch.tensor([len(parents) for parents in TREES])
    windows = lay_out_windows(
        ends=cu[1:],
        drafted=drafted,
        parents=padded,
        depths=depths,
        live=torch.tensor(LIVE),
        width=budget + 1,
        num_rows=int(bounds[-1]),
        max_depth=DEPTH,
    )
    requests = len(TREES)
    expanded = torch.repeat_interleave(torch.arange(requests), torch.tensor(widths))
    batch = SimpleNamespace(
        num_reqs=requests,
        idx_mapping=torch.arange(requests, dtype=torch.int32),
        idx_mapping_np=np.arange(requests, dtype=np.int32),
        expanded_idx_mapping=expanded,
        expanded_local_pos=torch.cat([torch.arange(width) for width in widths]),
        logits_indices=torch.arange(int(bounds[-1])),
        input_ids=input_ids,
        cu_num_logits=cu,
        cu_num_logits_np=bounds,
        seq_lens=torch.tensor([50 + width for width in widths], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor([50 + width for width in widths]),
    )
    positions = windows.positions(torch.cat([50 + torch.arange(width) for width in widths]))
    accepted = []
    state = SimpleNamespace(
        step=SimpleNamespace(windows=windows, parents=padded, live=torch.tensor(LIVE, dtype=torch.int32)),
        branches=True,
        tree_positions=lambda rows: positions[rows],
        accepted=accepted.append,
    )
    return SimpleNamespace(logits=logits, batch=batch, state=state, accepted=accepted, positions=positions)


def run(step, num_logprobs=None, invalid=None):
    from specplug_vllm.acceptance import TreeSampler

    sampler = ArgmaxSampler(num_logprobs)
    no_paths = SimpleNamespace(rows=None, wanted=lambda slots: False)
    output = TreeSampler(sampler, step.state, DEPTH, no_paths)(step.logits, step.batch, None, invalid)
    return sampler, output


def walk_by_hand(step, request, closed=()):
    """(tokens, rows that drew them) of one request."""
    first = int(step.batch.cu_num_logits_np[request])
    parents = TREES[request][: LIVE[request]]
    node, tokens, rows = -1, [], []
    while True:
        row = first + 1 + node
        token = int(step.logits[row].argmax())
        tokens.append(token)
        rows.append(row)
        children = [
            child
            for child, parent in enumerate(parents)
            if parent == node
            and first + 1 + child not in closed
            and int(step.batch.input_ids[first + 1 + child]) == token
        ]
        if not children:
            return tokens, rows
        node = children[0]


def emitted(output):
    return [
        row[:count].tolist() for row, count in zip(output.sampled_token_ids, output.num_sampled, strict=True)
    ]


def test_walks_equal_a_plain_loop(step):
    _, output = run(step)
    want = [walk_by_hand(step, request)[0] for request in range(len(TREES))]
    assert emitted(output) == want
    assert max(map(len, want)) == DEPTH + 1, "the example must have a walk of full depth"
    assert 1 in map(len, want)
    widths = np.diff(step.batch.cu_num_logits_np)
    assert output.num_rejected.tolist() == [
        int(width) - len(tokens) for width, tokens in zip(widths, want, strict=True)
    ]
    assert step.accepted[0].num_emitted.tolist() == [len(tokens) for tokens in want]


def test_rows_the_grammar_rules_out_are_not_entered(step):
    _, free = run(step)
    request = max(range(len(TREES)), key=lambda r: int(free.num_sampled[r]))
    barred = walk_by_hand(step, request)[1][1]  # the first accepted node
    invalid = torch.zeros(step.logits.shape[0], dtype=torch.bool)
    invalid[barred] = True
    _, output = run(step, invalid=invalid)
    assert emitted(output)[request] == walk_by_hand(step, request, closed=(barred,))[0]
    assert int(output.num_sampled[request]) < int(free.num_sampled[request])


def test_positions_are_depths(step):
    sampler, _ = run(step)
    want = []
    for parents, live in zip(TREES, LIVE, strict=True):
        want += [50, *(50 + depth_of(parents, node) if node < live else 50 for node in range(len(parents)))]
    assert sampler.calls[0][2] == want


@pytest.mark.parametrize("limit", [1, 6, 9, 12, 100])
@pytest.mark.parametrize("num_logprobs", [None, 0, 3])
def test_chunks_do_not_change_the_result(step, monkeypatch, limit, num_logprobs):
    from specplug_vllm import acceptance

    _, whole = run(step, num_logprobs)
    monkeypatch.setattr(acceptance, "get_max_chunk_logits", lambda vocab: limit)
    sampler, pieces = run(step, num_logprobs)
    # Whole requests, in order, no chunk above the limit unless one request alone is.
    assert [request for _, requests, _ in sampler.calls for request in requests] == list(range(len(TREES)))
    assert all(rows <= limit or len(requests) == 1 for rows, requests, _ in sampler.calls)
    assert (len(sampler.calls) > 1) == (limit < step.logits.shape[0])
    assert emitted(pieces) == emitted(whole)
    assert torch.equal(pieces.num_rejected, whole.num_rejected)
    for field in step.accepted[0]._fields:
        assert torch.equal(getattr(step.accepted[0], field), getattr(step.accepted[1], field))
    if num_logprobs is None:
        assert pieces.logprobs_tensors is whole.logprobs_tensors is None
    else:
        for field in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
            a, b = getattr(whole.logprobs_tensors, field), getattr(pieces.logprobs_tensors, field)
            for request, count in enumerate(whole.num_sampled.tolist()):  # only emitted rows are read
                rows = slice(
                    int(step.batch.cu_num_logits_np[request]),
                    int(step.batch.cu_num_logits_np[request]) + count,
                )
                assert torch.equal(a[rows], b[rows])


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprob_rows_follow_the_accepted_path(step, monkeypatch, mode):
    monkeypatch.setattr(ArgmaxSampler, "logprobs_mode", mode)
    _, output = run(step, num_logprobs=3)
    scores = step.logits if mode == "raw_logprobs" else step.logits * 0.5  # what the stand-in calls processed
    logprobs = scores.log_softmax(-1)
    for request in range(len(TREES)):
        tokens, rows = walk_by_hand(step, request)
        first = int(step.batch.cu_num_logits_np[request])
        for k, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            best = logprobs[row].topk(3)
            assert output.logprobs_tensors.logprob_token_ids[first + k].tolist() == [
                token,
                *best.indices.tolist(),
            ]
            torch.testing.assert_close(
                output.logprobs_tensors.logprobs[first + k],
                torch.cat([logprobs[row, token][None], best.values]),
            )
            assert int(output.logprobs_tensors.selected_token_ranks[first + k]) == 1
