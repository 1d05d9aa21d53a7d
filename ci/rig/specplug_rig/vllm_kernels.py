"""Entry point of `vllm.general_plugins` while the rig is visible: stock vLLM kernels the interpreter cannot
run, or runs too slowly for tests.

- top-k / top-p sampling: vLLM's own torch routine takes the place of its Triton kernel.
- kernels that pass integers as masks (bad words, penalties): `specplug_rig.interpreter` accepts them.
- sampling: rows at temperature 0 take torch's argmax, which is what the kernel computes for them, some 5 ms a
  row faster (85 % of a greedy step on a tree of 64 nodes). Rows with noise go through the kernel.
"""

from collections.abc import Callable
from typing import Any


def register() -> None:
    """Run by vLLM in every one of its processes; idempotent."""
    import vllm.v1.sample.ops.topk_topp_sampler as top_sampler
    import vllm.v1.worker.gpu.sample.gumbel as gumbel
    import vllm.v1.worker.gpu.sample.sampler as sampler

    from specplug_rig import interpreter

    interpreter.install()
    # vLLM calls the kernel as (logits, k, p), 0.33 with hints about both beside them, and uses the returned
    # logits; the torch routine has the same contract without hints.
    torch_routine = top_sampler.apply_top_k_top_p_pytorch
    top_sampler.apply_top_k_top_p_triton = lambda logits, k, p, **hints: torch_routine(logits, k, p)
    sampler.gumbel_sample = argmax_at_temperature_zero(gumbel.gumbel_sample)


def argmax_at_temperature_zero(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`stock` (vLLM's gumbel_sample) for the rows that have noise, argmax for those that have none."""

    def gumbel_sample(
        logits: Any,  # [rows, V]
        expanded_idx_mapping: Any,  # [rows] request of each row
        temperature: Any,  # [requests]
        seed: Any,  # [requests]
        pos: Any,  # [rows]
        **options: Any,
    ) -> Any:
        sampled = logits.argmax(-1)
        noisy = (temperature[expanded_idx_mapping] != 0).nonzero().flatten()
        if noisy.numel():
            rows = (logits[noisy], expanded_idx_mapping[noisy], temperature, seed, pos[noisy])
            sampled[noisy] = stock(*rows, **options)
        return sampled

    return gumbel_sample
