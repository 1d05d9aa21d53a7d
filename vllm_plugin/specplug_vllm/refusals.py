"""Engine features that draft trees do not work with: refused at start, each in one sentence with the fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specplug.config import TreeOptions


def check_engine(args: Any, target_model_config: Any, target_parallel_config: Any) -> None:
    """Raise ValueError for the first engine feature of ``args`` that trees do not support."""
    for reason in _reasons(args, target_model_config, target_parallel_config):
        raise ValueError(f"method ddtree refuses: {reason}")


def _reasons(args: Any, model: Any, parallel: Any) -> Iterator[str]:
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        yield "VLLM_USE_V2_MODEL_RUNNER=0 asks for the V1 model runner; unset it, trees run on V2 only."
    if not HAS_TRITON:
        yield (
            "vLLM's V2 model runner needs Triton with a live backend and finds none; install Triton, or in "
            "specplug's CPU test environment set TRITON_INTERPRET=1."
        )
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        yield f"the platform {current_platform.device_name} is not supported; use CUDA or the CPU."
    if parallel.worker_cls != "auto":
        yield f"--worker-cls is {parallel.worker_cls!r}, and trees bring their own worker; leave it at auto."
    for name, size in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
    ):
        if size != 1:
            yield f"{name} is {size}, which is untested with trees; set it to 1."
    if parallel.use_ubatching:
        yield "dual-batch overlap splits a step; leave --enable-dbo and --ubatch-size out."
    if model.is_hybrid or model.is_attention_free:
        yield "the target's recurrent layers cannot follow a branch; use an attention-only target."
    if model.use_mla:
        yield (
            "the target uses MLA, which caches one latent row in place of the keys and values that the "
            "in-tree pass reads; use a target with ordinary attention."
        )
    if model.is_encoder_decoder:
        yield "the target is an encoder-decoder model; use a decoder-only target."
    if model.get_sliding_window() is not None:
        yield "the target's sliding window would count rows instead of depth; use a full-attention target."
    if model.supports_multimodal_inputs or model.uses_mrope:
        yield "the target takes multi-modal inputs, untested with trees; use a text-only target."
    if str(args.kv_cache_dtype).startswith("fp8"):
        yield f"kv_cache_dtype {args.kv_cache_dtype} is untested with trees; use auto."
    for flag, why in (
        ("enable_lora", "LoRA maps adapters to rows by the untrimmed layout"),
        ("kv_transfer_config", "a KV connector would save the cache before the accepted path is moved"),
        ("kv_offloading_size", "KV offloading would save the cache before the accepted path is moved"),
        ("enable_sleep_mode", "what the drafter keeps of its weights would not be woken with them"),
        ("watermark_config", "watermark contexts follow rows, not paths"),
        ("enable_trace_replay", "a replayed trace follows rows, not paths"),
        ("return_sampling_mask", "sampling masks are not reordered to the accepted path"),
        ("enable_prompt_embeds", "prompt embeddings are untested with trees"),
        ("enable_batch_sharded_sampling", "sharded sampling splits the batch before acceptance"),
    ):
        if getattr(args, flag, None):
            yield f"--{flag.replace('_', '-')} is set and {why}; leave it out."


def check_ranks(options: TreeOptions, draft_ranks: int | None, model: Any, parallel: Any) -> None:
    """Raise ValueError where several ranks would run trees in a way that is untested.

    ``draft_ranks``: the user's draft_tensor_parallel_size, None = as many as the target has.
    """
    for reason in _rank_reasons(options, draft_ranks, model, parallel):
        raise ValueError(f"method ddtree refuses: {reason}")


def _rank_reasons(options: TreeOptions, draft_ranks: int | None, model: Any, parallel: Any) -> Iterator[str]:
    tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
    if draft_ranks not in (None, tensor):
        yield (
            f"draft_tensor_parallel_size is {draft_ranks} beside tensor_parallel_size {tensor}, which is "
            "untested with trees; leave it out."
        )
    if tensor == data == 1:
        return
    executor = parallel.distributed_executor_backend
    if executor not in (None, "mp", "uni"):
        yield f"distributed_executor_backend is {executor!r}, untested with trees on several ranks; use 'mp'."
    if parallel.nnodes > 1:
        yield f"nnodes is {parallel.nnodes}, and trees on several machines are untested; use one machine."
    if data == 1:
        return
    if parallel.data_parallel_backend != "mp":
        yield f"data_parallel_backend is {parallel.data_parallel_backend!r}, untested with trees; use 'mp'."
    if model.is_moe:
        yield (
            "the target is a mixture of experts, and data-parallel ranks that share experts are untested "
            "with trees; set data_parallel_size to 1."
        )
    if options.record is not None:
        yield "record is set, and its folder belongs to one engine; set data_parallel_size to 1."


CUDA_ATTENTION = "FLASH_ATTN"  # returns the log-sum-exp of an unmasked pass over the committed prefixes
OTHER_ATTENTION = {  # of vLLM 0.32.0
    "TRITON_ATTN": "its kernel keeps the log-sum-exp to itself, and its only mask is one for all requests",
    "FLASHINFER": "its passes are planned on the host, which does not know the lengths of trimmed trees",
}


def check_cuda_attention(name: str | None) -> None:
    """Raise ValueError for a user's choice of attention backend that trees do not work with on CUDA."""
    if name not in (None, CUDA_ATTENTION):
        why = OTHER_ATTENTION.get(name, "nobody has tried it")
        raise ValueError(
            f"method ddtree refuses: --attention-backend is {name}, and {why}; leave it out or set "
            f"{CUDA_ATTENTION}."
        )


def check_attention_layers(layers: dict[str, Any]) -> None:
    """Raise ValueError for a target attention layer whose scores the in-tree pass would not reproduce."""
    for name, layer in layers.items():
        impl = layer.impl
        if not hasattr(impl, "cache_views"):  # a process remembers vLLM's first choice of backend
            raise ValueError(
                f"method ddtree refuses: layer {name} runs on {type(impl).__name__}, which this process "
                "chose for an earlier engine; start the engine in a process of its own."
            )
        for attribute in ("logits_soft_cap", "sinks", "alibi_slopes"):
            value = getattr(impl, attribute, None)
            if value is not None and not (isinstance(value, int | float) and value == 0):
                raise ValueError(
                    f"method ddtree refuses: layer {name} uses {attribute}, which the in-tree attention pass "
                    "does not apply; use a target without it."
                )
        if getattr(impl, "kv_sharing_target_layer_name", None):
            raise ValueError(
                f"method ddtree refuses: layer {name} shares another layer's KV cache; "
                "use a target without sharing."
            )
