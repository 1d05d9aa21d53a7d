"""Entry point of `vllm.general_plugins` while the rig is visible: stock vLLM kernels the interpreter cannot
run.

- top-k / top-p sampling: vLLM's own torch routine takes the place of its Triton kernel.
- kernels that pass integers as masks (bad words, penalties): `specplug_rig.interpreter` accepts them.
"""


def register() -> None:
    """Run by vLLM in every one of its processes; idempotent."""
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    from specplug_rig import interpreter

    interpreter.install()
    # vLLM calls the kernel as (logits, k, p) and uses the returned logits; the torch routine has the same
    # contract.
    sampler.apply_top_k_top_p_triton = sampler.apply_top_k_top_p_pytorch
