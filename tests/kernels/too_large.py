"""Kernels that do not fit, and one that does: what the checks of aot.py must see and must let pass."""

import aot
import triton
import triton.language as tl


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place, mask=place < n), mask=place < n)


@triton.jit
def square(x, out, N: tl.constexpr):
    """x @ x plus its transpose, N * N sums in registers."""
    place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    values = tl.load(x + place)
    product = tl.dot(values, values)
    tl.store(out + place, product + tl.trans(product))


@triton.jit
def shuffle(x, out, N: tl.constexpr):
    """A gather, which passes its N elements through shared memory."""
    place = tl.arange(0, N)
    tl.store(out + place, tl.gather(tl.load(x + place), (place * 7) % N, 0))


def measure() -> dict[str, dict[str, aot.Resources]]:
    """case -> target -> resources of "fits", "crowded" (128 KiB of shared memory) and "spills"."""
    floats, halves = {"x": "*fp32", "out": "*fp32"}, {"x": "*bf16", "out": "*fp32"}
    block, width = {"n": "i32", "BLOCK": "constexpr"}, {"N": "constexpr"}
    fits = aot.Case("fits", copy, floats | block, {"BLOCK": 1024}, {"num_warps": 4})
    crowded = aot.Case("crowded", shuffle, floats | width, {"N": 32768}, {"num_warps": 16})
    spills = aot.Case("spills", square, halves | width, {"N": 32}, {"num_warps": 1, "maxnreg": 32})
    larger = spills._replace(constexprs={"N": 128}, options={"num_warps": 1})  # CDNA has 512 registers a lane
    cuda = [target for target in aot.TARGETS if target.startswith("sm_")]
    amd = [target for target in aot.TARGETS if target not in cuda]
    spilled = aot.measure([spills], cuda)["spills"] | aot.measure([larger], amd)["spills"]
    return aot.measure([fits, crowded]) | {"spills": spilled}
