"""In-tree attention against the core's, over ragged windows of random trees."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.attention import merge, partial_attention
from specplug.tree import ancestor_mask
from specplug_kernels import attention
from specplug_kernels.attention import InTree, in_tree, in_tree_merged

INF = float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEAD_SIZES = [64, 80, 96, 128, 256]
fixed = settings(max_examples=25, deadline=None, derandomize=True)


class Step(NamedTuple):
    """Rows of one step with a window a request, and what the core needs of it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    ancestors: torch.Tensor
    rows: torch.Tensor  # [T, W] int64; columns past the window repeat row 0
    inside: torch.Tensor  # [T, W] bool
    mask: torch.Tensor  # [T, W, W] bool
    scale: float

    @property
    def windows(self) -> dict[str, Any]:
        return {
            "starts": self.starts,
            "counts": self.counts,
            "ancestors": self.ancestors,
            "scale": self.scale,
        }

    def expected(self) -> InTree:
        """The core's answer, with nothing seen past a window."""
        q, k, v = self.q[self.rows], self.k[self.rows], self.v[self.rows]
        seen = self.mask & self.inside[:, :, None] & self.inside[:, None, :]
        return InTree(*partial_attention(q, k, v, seen, self.scale))


def make_step(
    counts: list[int],
    *,
    device: torch.device,
    budget: int | None = None,
    dead: int = 0,
    heads: tuple[int, int] = (4, 2),
    size: int = 64,
    dtype: torch.dtype = torch.float32,
    chain: bool = False,
    seed: int = 0,
) -> Step:
    """Windows of `counts` nodes (-1: none), rows of others between them; the last `dead` nodes of each window
    are scheduled but of no tree.
    """
    draw = torch.Generator().manual_seed(seed)
    budget = max([*counts, 0]) if budget is None else budget
    requests, (heads_q, heads_kv) = len(counts), heads
    parents = torch.full((requests, budget), -1, dtype=torch.int32)
    live = torch.tensor([max(count - dead, 0) for count in counts], dtype=torch.int32)
    words, starts, rows = [], [], []
    end = 0
    for r, count in enumerate(counts):
        path: list[int] = []
        for j in range(budget):
            if j < live[r]:
                parents[r, j] = (
                    j - 1 if chain else int(torch.randint(-1, j, (1,), generator=draw)) if j else -1
                )
            above = int(parents[r, j])
            path.append((path[above] if above >= 0 else 0) | 1 << j)
        words.append([word - (1 << 64) if word >> 63 else word for word in path])
        start = end + int(torch.randint(0, 3, (1,), generator=draw))
        starts.append(start if count >= 0 else -(10**6))
        rows.append([start + c if c <= count else 0 for c in range(budget + 1)])
        end = start + count + 1
    fused = torch.randn(end + 2, heads_q + 2 * heads_kv, size, generator=draw).to(device, dtype)
    q, k, v = fused.split([heads_q, heads_kv, heads_kv], 1)
    column = torch.arange(budget + 1)
    return Step(
        q=q,
        k=k,
        v=v,
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        counts=torch.tensor(counts, dtype=torch.int32, device=device),
        ancestors=torch.tensor(words, dtype=torch.int64, device=device).view(requests, budget),
        rows=torch.tensor(rows, dtype=torch.int64, device=device).view(requests, budget + 1),
        inside=(column <= torch.tensor(counts).view(-1, 1)).to(device),
        mask=ancestor_mask(parents, live, max_depth=budget).to(device),
        scale=size**-0.5,
    )


def tolerance(step: Step, *more: torch.Tensor, rounded: torch.dtype = torch.float32) -> float:
    """Bound on an output's error. The softmax weights, which sum to 1, are rounded once to the dtype of v for
    the matrix units, the output once to `rounded`; 1e-5 for sums of fp32 in another order.
    """
    largest = max(float(x.float().nan_to_num(0.0, 0.0, 0.0).abs().max()) for x in (step.v, *more))
    weights = 0.0 if step.v.dtype == torch.float32 else torch.finfo(step.v.dtype).eps / 2
    output = 0.0 if rounded == torch.float32 else torch.finfo(rounded).eps / 2
    return (weights + output) * largest + 1e-5


def assert_close(got: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-5, equal_nan=True)


counts_of_windows = st.lists(st.integers(-1, 20), min_size=1, max_size=4)
shapes = {
    "counts": counts_of_windows,
    "dead": st.integers(0, 3),
    "group": st.sampled_from([1, 2, 4, 7]),
    "kv_heads": st.integers(1, 2),
    "size": st.sampled_from(HEAD_SIZES),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 2**16),
}


@fixed
@given(**shapes)
def test_every_column_sees_its_ancestors_and_itself(
    device, guarded, counts, dead, group, kv_heads, size, dtype, seed
):
    heads = (group * kv_heads, kv_heads)
    step = make_step(counts, dead=dead, heads=heads, size=size, dtype=dtype, seed=seed, device=device)
    expected = step.expected()
    (out, check_out), (lse, check_lse) = (guarded(x.shape, torch.float32, device) for x in expected)
    got = in_tree(step.q, step.k, step.v, **step.windows, out=InTree(out, lse))
    assert got.out is out
    assert got.lse is lse
    assert_close(out, expected.out, tolerance(step))
    assert_close(lse, expected.lse, 1e-5)
    assert not out[~step.inside].any()
    assert (lse[~step.inside] == -INF).all()
    check_out()
    check_lse()


@fixed
@given(**shapes, output_dtype=st.sampled_from(DTYPES), transposed=st.booleans(), data=st.data())
def test_merged_writes_the_rows_of_windows_and_no_other(
    device, guarded, counts, dead, group, kv_heads, size, dtype, seed, output_dtype, transposed, data
):
    heads = (group * kv_heads, kv_heads)
    step = make_step(counts, dead=dead, heads=heads, size=size, dtype=dtype, seed=seed, device=device)
    draw = torch.Generator().manual_seed(seed)
    own = step.expected()
    prefix_out = torch.randn(own.out.shape, generator=draw).to(device, dtype)
    prefix_lse = torch.randn(own.lse.shape, generator=draw).to(device)
    for r in range(len(counts)):  # a request without a prefix: what the pass wrote means nothing
        empty = data.draw(st.sampled_from([None, INF, -INF]))
        if empty is not None:
            prefix_lse[r], prefix_out[r] = empty, math.nan
    merged = merge(prefix_out, prefix_lse, *own)
    if transposed:  # FlashAttention's [H, T * W]
        prefix_lse = prefix_lse.flatten(0, 1).T.contiguous().T.view(prefix_lse.shape)
        assert not prefix_lse.is_contiguous() or 1 in prefix_lse.shape
    output, check = guarded((step.q.shape[0] + 1, *step.q.shape[1:]), output_dtype, device)
    before = output.clone()
    in_tree_merged(
        step.q, step.k, step.v, **step.windows, prefix_out=prefix_out, prefix_lse=prefix_lse, output=output
    )
    windows = step.rows[step.inside]
    atol = tolerance(step, prefix_out, rounded=output_dtype)
    assert_close(output[windows].float(), merged[step.inside], atol)
    others = torch.ones(output.shape[0], dtype=torch.bool, device=device)
    others[windows] = False
    assert torch.equal(output[others].view(torch.uint8), before[others].view(torch.uint8))
    check()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_in_a_paged_cache_give_the_same_bits(device, layout, dtype):
    step = make_step([5, 0, 18, -1, 16], heads=(6, 2), size=80, dtype=dtype, seed=3, device=device)
    blocks, block, kv_heads, size = 30, 3, 2, 80
    shape = (blocks, block, kv_heads, 2 * size) if layout == "NHD" else (blocks, kv_heads, block, 2 * size)
    cache = torch.full(shape, math.nan, dtype=dtype, device=device)
    keys, values = (cache if layout == "NHD" else cache.transpose(1, 2)).split(size, -1)
    draw = torch.Generator().manual_seed(4)
    slot_of_row = torch.randperm(blocks * block, generator=draw)[: step.q.shape[0]].to(device)
    keys[slot_of_row // block, slot_of_row % block] = step.k
    values[slot_of_row // block, slot_of_row % block] = step.v
    slots = torch.where(step.inside, slot_of_row[step.rows], -1)  # past a window: never looked at
    plain = in_tree(step.q, step.k, step.v, **step.windows)
    paged = in_tree(step.q, keys, values, slots=slots, **step.windows)
    assert torch.equal(paged.out, plain.out)
    assert torch.equal(paged.lse, plain.lse)

    prefix = torch.zeros_like(plain.out), torch.full_like(plain.lse, -INF)
    outputs = [torch.zeros_like(step.q) for _ in range(2)]
    for output, where in zip(
        outputs, ({"k": step.k, "v": step.v}, {"k": keys, "v": values, "slots": slots}), strict=True
    ):
        in_tree_merged(
            step.q, **where, **step.windows, prefix_out=prefix[0], prefix_lse=prefix[1], output=output
        )
    assert torch.equal(*outputs)
    assert outputs[0].any()

    elsewhere = slots.clone()
    elsewhere[2, 1] = slots[2, 2]
    assert not torch.equal(in_tree(step.q, keys, values, slots=elsewhere, **step.windows).out, plain.out)


@pytest.mark.parametrize("chain", [False, True])
def test_the_widest_window_uses_every_bit_of_a_word(device, chain):
    step = make_step([64, 33, 63], heads=(2, 1), chain=chain, seed=5, device=device)
    assert step.ancestors[0, 63] < 0  # bit 63 is the sign
    got, expected = in_tree(step.q, step.k, step.v, **step.windows), step.expected()
    assert_close(got.out, expected.out, 1e-5)
    assert_close(got.lse, expected.lse, 1e-5)


def test_a_window_narrower_than_the_budget(device):
    step = make_step([3, 0, 2], budget=9, seed=6, device=device)
    got, expected = in_tree(step.q, step.k, step.v, **step.windows, width=4), step.expected()
    assert got.out.shape[1] == 4
    assert_close(got.out, expected.out[:, :4], 1e-5)
    assert_close(got.lse, expected.lse[:, :4], 1e-5)


def test_roots_alone(device):
    step = make_step([0, 0], budget=0, heads=(4, 2), seed=7, device=device)
    got = in_tree(step.q, step.k, step.v, **step.windows)
    values = step.v[step.rows[:, 0]].repeat_interleave(2, 1)
    assert_close(got.out[:, 0], values, 1e-6)


def test_no_request_and_no_window_launch_nothing(device, monkeypatch):
    step = make_step([], device=device, budget=4)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "in_tree_kernel", None)
        got = in_tree(step.q, step.k, step.v, **step.windows)
        prefix = {"prefix_out": got.out, "prefix_lse": got.lse}
        in_tree_merged(step.q, step.k, step.v, **step.windows, **prefix, output=torch.empty_like(step.q))
    assert got.out.shape == (0, 5, 4, 64)
    assert got.lse.shape == (0, 5, 4)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # -inf times a masked row's zeros
def test_equal_scores_average_and_scores_of_minus_infinity_weigh_nothing(device):
    step = make_step([6, 4], seed=8, device=device)
    q, k = torch.ones_like(step.q), torch.ones_like(step.k)
    even = step._replace(q=q, k=k)
    got = in_tree(q, k, even.v, **even.windows)
    seen = (even.mask & even.inside[:, :, None]).sum(-1)[even.inside]
    assert_close(got.lse[even.inside], (seen.float().log() + 8.0)[:, None].expand(-1, 4), 1e-5)

    k = k.clone()
    k[step.rows[0]] = -INF  # every key of the first window
    k[step.rows[1, 0]] = -INF  # the root of the second: its own row sees nothing
    dark = even._replace(k=k)
    got, expected = in_tree(q, k, dark.v, **dark.windows), dark.expected()
    assert (got.lse[0] == -INF).all()
    assert not got.out[0].any()
    assert (got.lse[1, 0] == -INF).all()
    assert not got.out[1, 0].any()
    assert_close(got.out, expected.out, 1e-5)
    assert_close(got.lse, expected.lse, 1e-5)


def test_nan_stays_with_the_columns_that_see_it(device):
    step = make_step([7, 7], seed=9, device=device)
    q = step.q.clone()
    q[step.rows[0, 3]] = math.nan
    sick = step._replace(q=q)
    got, expected = in_tree(q, step.k, step.v, **step.windows), sick.expected()
    assert got.out[0, 3].isnan().all()
    assert got.lse[0, 3].isnan().all()
    assert got.out.isnan().any(-1).sum() == 4
    assert_close(got.out, expected.out, 1e-5)
    assert_close(got.lse, expected.lse, 1e-5)
    prefix = torch.ones_like(got.out), torch.zeros_like(got.lse)
    output = torch.empty_like(q)
    in_tree_merged(
        q, step.k, step.v, **step.windows, prefix_out=prefix[0], prefix_lse=prefix[1], output=output
    )
    assert_close(output[step.rows], merge(*prefix, *expected), 1e-5)


def test_the_comparison_sees_a_wrong_tree_a_wrong_head_and_a_wrong_scale(device):
    step = make_step([12, 9], heads=(4, 2), chain=True, seed=10, dtype=torch.bfloat16, device=device)
    expected, atol = step.expected(), tolerance(step)
    ancestors = step.ancestors.clone()
    ancestors[0, 11] &= ~(1 << 4)
    for wrong in (
        step._replace(ancestors=ancestors),
        step._replace(k=step.k.flip(1)),
        step._replace(v=step.v.flip(1)),
        step._replace(scale=step.scale * 1.05),
        step._replace(starts=step.starts + 1),
        step._replace(counts=step.counts - 1),
    ):
        got = in_tree(wrong.q, wrong.k, wrong.v, **wrong.windows)
        with pytest.raises(AssertionError):
            assert_close(got.out, expected.out, atol)


def _refused(step: Step) -> dict[str, dict[str, Any]]:
    """What a caller may get wrong, by the name its message starts with."""
    odd = torch.zeros(step.q.shape[0], 4, 65, device=step.q.device)[..., :64]
    return {
        "q: expected dtype": {"q": step.q.double()},
        "q: expected shape": {"q": step.q.flatten(1)},
        "q: expected strides": {"q": odd},
        "q: expected a head size": {x: getattr(step, x)[..., :20] for x in "qkv"},
        "q: expected a multiple of k's 2 heads": {"q": step.q[:, :3]},
        "k: expected dtype": {"k": step.k.half()},
        "k: expected shape": {"k": step.k[:-1]},
        "k: expected dimensions 2 to 2": {"k": step.k.transpose(1, 2).contiguous().transpose(1, 2)},
        "v: expected shape": {"v": step.v[:, :1]},
        "starts: expected dtype": {"starts": step.starts.long()},
        "counts: expected shape": {"counts": step.counts[:1]},
        "ancestors: expected dtype": {"ancestors": step.ancestors.int()},
        "width: expected 1 to 65": {"width": 7},
        "slots: expected dtype": {"slots": step.starts, "k": step.k[None], "v": step.v[None]},
        "out.lse: expected dtype": {
            "out": InTree(torch.empty(2, 6, 4, 64), torch.empty(2, 6, 4, dtype=torch.float64))
        },
    }


@pytest.mark.parametrize("message", _refused(make_step([5, 5], device=torch.device("cpu"))))
def test_refused_before_a_launch(device, monkeypatch, message):
    step = make_step([5, 5], device=device)
    monkeypatch.setattr(attention, "in_tree_kernel", None)
    wrong = _refused(step)[message]
    if "out" in wrong:
        wrong = {"out": InTree(*(x.to(device) for x in wrong["out"]))}
    with pytest.raises(ValueError, match=message):
        in_tree(**{"q": step.q, "k": step.k, "v": step.v, **step.windows} | wrong)


@pytest.mark.parametrize("name", ["prefix_out", "prefix_lse", "output"])
def test_merged_refuses(device, monkeypatch, name):
    step = make_step([5, 5], device=device)
    monkeypatch.setattr(attention, "in_tree_kernel", None)
    given = {
        "prefix_out": torch.zeros(2, 6, 4, 64, device=device),
        "prefix_lse": torch.zeros(2, 6, 4, device=device),
        "output": torch.empty_like(step.q),
    }
    for wrong in (given[name][:1], given[name].double()):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            in_tree_merged(step.q, step.k, step.v, **step.windows, **given | {name: wrong})
