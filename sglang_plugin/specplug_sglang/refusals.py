"""Engine features that draft trees do not work with: refused at start, each in one sentence with the fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specplug.config import TreeOptions
from specplug.target_config import target_refusals

TREE_BACKENDS = ("triton", "flashinfer")  # take a tree mask unasked
IGNORES_MASKS = "verifies a chain instead of a tree without a word"
RAGGED = "compact"


def check_engine(
    args: Any,  # ServerArgs while they are resolved
    target: Mapping[str, Any],  # the target's config.json
    *,
    mode: str,  # SGLANG_RAGGED_VERIFY_MODE
    options: TreeOptions,
) -> None:
    """Raise ValueError for the first engine feature that trees do not support."""
    for reason in (*_of_arguments(args), *_of_mode(args, mode, options), *target_refusals(target)):
        raise ValueError(f"DDTREE refuses: {reason}")


def _of_arguments(args: Any) -> Iterator[str]:
    if args.device not in ("cuda", "cpu"):
        yield f"the device {args.device!r} is not supported; use CUDA."
    for name in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
        backend = getattr(args, name)
        if backend is not None and backend not in TREE_BACKENDS and args.device == "cuda":
            yield f"--{name.replace('_', '-')} {backend} {IGNORES_MASKS}; use {' or '.join(TREE_BACKENDS)}."
    for name in ("pp_size", "dp_size", "attn_cp_size", "dcp_size"):
        if getattr(args, name) != 1:
            yield f"--{name.replace('_', '-')} is {getattr(args, name)}, untested with trees; leave it at 1."
    for name in ("speculative_num_steps", "speculative_eagle_topk"):
        if getattr(args, name, None) not in (None, 1):
            yield f"--{name.replace('_', '-')} is {getattr(args, name)}, a setting of EAGLE's; leave it out."
    if args.disaggregation_mode != "null":
        yield "prefill/decode disaggregation is untested with trees; leave --disaggregation-mode out."
    if str(args.kv_cache_dtype).startswith("fp"):
        yield f"--kv-cache-dtype {args.kv_cache_dtype} is untested with trees; use auto."
    if args.speculative_dspark_confidence_sts_path:
        yield (
            "--speculative-dspark-confidence-sts-path calibrates the confidence head, which trees do not "
            "read; use the key calibration in the file SPECPLUG_CONFIG names."
        )
    for flag, why in (
        ("enable_lora", "LoRA maps adapters to rows by the linear layout"),
        ("lora_paths", "LoRA maps adapters to rows by the linear layout"),
        ("enable_dp_attention", "attention data parallelism is untested with trees"),
        ("enable_two_batch_overlap", "two-batch overlap splits a step"),
        ("enable_pdmux", "multiplexed prefill and decode is untested with trees"),
        ("enable_hierarchical_cache", "a lower cache tier would copy the window before the path is moved"),
        ("enable_unified_memory", "the unified memory pool is untested with trees"),
        ("enable_return_hidden_states", "hidden states are not reordered to the accepted path"),
        ("enable_return_routed_experts", "routed experts are not reordered to the accepted path"),
        ("speculative_use_block_verification", "block verification is a rule for chains"),
        ("speculative_adaptive", "adaptive step counts are a rule for EAGLE"),
        ("speculative_draft_window_size", "a draft window is untested with trees"),
        ("speculative_token_map", "a token map is untested with trees"),
        ("enable_torch_compile", "compiled steps are untested with trees"),
    ):
        if getattr(args, flag, None):
            yield f"--{flag.replace('_', '-')} is set and {why}; leave it out."


def _of_mode(args: Any, mode: str, options: TreeOptions) -> Iterator[str]:
    from sglang.srt.environ import envs
    from sglang.srt.utils import is_gfx95_supported

    if options.kernels == "triton":
        yield 'kernels: our Triton kernels are not wired into SGLang; leave the key out, or say "torch".'
    if options.full_graphs:
        yield "full_graphs: SGLang's own flags decide what it captures; leave the key out."
    trims = "cost_table" if options.cost_table else "explore" if options.explore else None
    if trims and mode != RAGGED:
        yield (
            f"{trims} trims trees, and SGLANG_RAGGED_VERIFY_MODE={mode} computes every row; set it to "
            f"{RAGGED}, or leave {trims} out."
        )
    if mode == RAGGED and args.device == "cuda" and not args.disable_cuda_graph:
        yield "ragged trees are not captured in CUDA graphs yet; add --disable-cuda-graph."
    if is_gfx95_supported() and envs.SGLANG_ENABLE_SPLITKV_VERIFY.get():
        yield "the split-KV verify kernel is for chains alone; set SGLANG_ENABLE_SPLITKV_VERIFY=0."
    if envs.SGLANG_SIMULATE_ACC_LEN.get() > 0:
        yield "SGLANG_SIMULATE_ACC_LEN replaces acceptance, which trees do themselves; unset it."


def check_backend(backend: Any) -> None:
    """Raise ValueError for a target attention backend that would not follow the tree mask, or ragged windows.

    ``takes_tree_masks`` on the backend's class says that it does; stock backends have no such mark, so the
    ones that were read are known by name.
    """
    name = type(backend).__name__
    marked = getattr(type(backend), "takes_tree_masks", False)
    if marked or name in ("TritonAttnBackend", "FlashInferAttnBackend"):
        return
    raise ValueError(
        f"DDTREE refuses: the attention backend {name} {IGNORES_MASKS}; use --attention-backend "
        f"{' or '.join(TREE_BACKENDS)}."
    )
