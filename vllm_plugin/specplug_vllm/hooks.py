"""The hook table: every vLLM name the adapter relies on, see `specplug.hook_table`.

Checked by ``method: ddtree`` at start, by ``specplug doctor``, and by the tests.
"""

from __future__ import annotations

from pathlib import Path

from specplug.hook_table import Hook, HookStatus, check, package_root

_GPU = "v1/worker/gpu"
_RUNNER = f"{_GPU}/model_runner.py"
_DFLASH = f"{_GPU}/spec_decode/dflash/speculator.py"
_DSPARK = f"{_GPU}/spec_decode/dspark/speculator.py"
_ADAPTIVE = f"{_GPU}/spec_decode/adaptive_verification.py"
_CPU_ATTN = "v1/attention/backends/cpu_attn.py"
_FLASH = "v1/attention/backends/flash_attn.py"

HOOKS: tuple[Hook, ...] = (
    Hook(
        "engine/arg_utils.py",
        "EngineArgs.create_speculative_config",
        "patch",
        "accepts method ddtree and our keys; vLLM has no registry of methods",
        params=("target_model_config", "target_parallel_config"),
        mentions=("SpeculativeConfig", "speculative_config"),
    ),
    Hook(
        "config/speculative.py",
        "SpeculativeConfig.max_num_new_slots_for_drafting",
        "subclass",
        "slots of the drafter's queries follow depth, not the node budget",
    ),
    Hook(
        "config/speculative.py",
        "SpeculativeConfig.compute_hash",
        "subclass",
        "the compile cache sees the tree",
    ),
    Hook(
        "config/vllm.py",
        "VllmConfig.num_lookahead_tokens",
        "seam",
        "reserves at least budget + 1 cache slots",
        mentions=("use_dflash", "use_eagle", "num_speculative_tokens"),
    ),
    Hook("config/parallel.py", "ParallelConfig", "seam", "our worker class", mentions=("worker_cls",)),
    Hook(
        "v1/worker/gpu_worker.py",
        "Worker.init_device",
        "subclass",
        "replaces the drafter of the runner it built",
    ),
    Hook("v1/worker/cpu_worker.py", "CPUWorker.init_device", "subclass", "the same on the CPU"),
    Hook(
        _RUNNER,
        "GPUModelRunner.load_model",
        "seam",
        "loads our drafter, then asks the model for its ModelState class and acceptance object",
        mentions=("speculator", "init_model_state", "custom_sampler", "rejection_sampler"),
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.execute_model",
        "seam",
        "calls prepare_attn, then prepare_inputs, whose positions replace the linear ones",
        mentions=("prepare_attn", "prepare_inputs", "positions"),
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.sample",
        "seam",
        "calls the acceptance object when drafts are in the batch",
        mentions=("rejection_sampler", "num_draft_tokens", "draft_logits"),
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.postprocess_sampled",
        "seam",
        "the moment to move the cache rows of the accepted path",
        mentions=("post_update", "postprocess_state"),
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.sample_tokens",
        "seam",
        "hands captured features to propose and takes node tokens back",
        mentions=("postprocess_sampled", "propose", "aux_hidden_states", "draft_tokens"),
    ),
    Hook(
        f"{_GPU}/model_states/__init__.py",
        "resolve_model_state_cls",
        "seam",
        "lets the target model name its ModelState",
        params=("vllm_config", "model"),
        mentions=("get_model_state_cls",),
    ),
    *(
        Hook(f"{_GPU}/model_states/default.py", f"DefaultModelState.{name}", "subclass", why, params=params)
        for name, why, params in (
            (
                "prepare_attn",
                "lays out the step's trees",
                ("input_batch", "slot_mappings", "kv_cache_config"),
            ),
            ("prepare_inputs", "depth positions", ("input_batch", "req_states")),
            ("prepare_dummy_inputs", "the same buffer while graphs are captured", ("num_reqs", "num_tokens")),
            ("add_request", "forgets the slot's last tree", ("req_index", "new_req_data")),
        )
    ),
    Hook(
        f"{_GPU}/model_states/interface.py",
        "ModelState.postprocess_state",
        "subclass",
        "moves the cache rows of the accepted path",
        params=("idx_mapping", "num_sampled"),
    ),
    Hook(
        f"{_GPU}/model_states/interface.py",
        "ModelState.custom_sampler",
        "subclass",
        "puts the walk in place of rejection sampling",
        params=("sampler",),
    ),
    Hook(
        f"{_GPU}/input_batch.py",
        "InputBatch",
        "use",
        "layout of the step",
        mentions=(
            "idx_mapping",
            "idx_mapping_np",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "num_draft_tokens_per_req",
            "query_start_loc",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
            "input_ids",
            "positions",
            "logits_indices",
            "cu_num_logits",
            "cu_num_logits_np",
            "num_tokens_after_padding",
        ),
    ),
    Hook(
        f"{_GPU}/input_batch.py",
        "get_num_sampled_and_rejected",
        "use",
        "tells unfinished prefills apart",
        params=("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),
    ),
    Hook(
        f"{_GPU}/sample/sampler.py",
        "Sampler.sample",
        "use",
        "draws the target's own token at every row",
        params=(
            "logits",
            "expanded_idx_mapping",
            "idx_mapping",
            "idx_mapping_np",
            "pos",
            "input_ids",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "return_logprobs",
        ),
    ),
    Hook(
        f"{_GPU}/sample/sampler.py",
        "Sampler.__init__",
        "use",
        "custom processors follow the three stock ones",
        mentions=("logits_processors", "custom_logits_processors", "penalties_state", "sampling_states"),
    ),
    Hook(
        f"{_GPU}/sample/logprob.py",
        "compute_topk_scores",
        "use",
        "logprobs of the accepted path",
        params=("logits", "num_logprobs", "sampled_token_ids", "cu_num_logits", "logits_mode"),
    ),
    Hook(f"{_GPU}/sample/output.py", "SamplerOutput", "use", "the acceptance object's result"),
    Hook(
        f"{_GPU}/spec_decode/rejection_sampler.py",
        "_iter_request_chunks",
        "use",
        "bounds the fp32 logits buffer as the stock sampler does",
        params=("cu_num_logits", "max_chunk_logits"),
    ),
    Hook(
        f"{_GPU}/spec_decode/rejection_sampler.py",
        "get_max_chunk_logits",
        "use",
        "the same",
        params=("vocab_size",),
    ),
    Hook(
        _DFLASH,
        "DFlashSpeculator.propose",
        "subclass",
        "permutes captured features first, returns node tokens",
        params=("input_batch", "aux_hidden_states", "num_sampled", "dummy_run", "num_speculative_tokens"),
        mentions=("_generate_draft", "prepare_dflash_inputs"),
    ),
    Hook(
        _DFLASH,
        "DFlashSpeculator._generate_draft",
        "subclass",
        "block logits to a tree instead of to a chain",
        params=("num_reqs", "num_tokens_padded", "attn_metadata", "slot_mappings", "cudagraph_runtime_mode"),
        mentions=("_run_model", "sample_indices", "sample_idx_mapping"),
    ),
    Hook(
        _DFLASH,
        "DFlashSpeculator._num_graph_context_tokens",
        "subclass",
        "a verify is budget + 1 rows, not depth + 1",
        params=("num_reqs",),
    ),
    Hook(
        _DFLASH,
        "DFlashSpeculator.load_draft_model",
        "subclass",
        "the first moment the target model is in hand",
        params=("target_model", "target_attn_layer_names"),
    ),
    Hook(
        _DFLASH,
        "DFlashSpeculator.propose",
        "use",
        "a round without a draft still writes the drafter's context",
        params=("is_profile",),
        mentions=("need_eager", "is_profile", "_precompute_context_kv"),
    ),
    *(
        Hook(
            _ADAPTIVE,
            f"AdaptiveVerificationManager.{name}",
            "subclass",
            why,
            params=params,
            mentions=mentions,
        )
        for name, why, params, mentions in (
            (
                "__init__",
                "the ranking buffer holds a(v)",
                ("req_states", "query_start_loc", "num_bonus_tokens", "max_total_logits"),
                ("_confidence_probs", "_max_total_logits", "_batch_budget"),
            ),
            ("add_request", "a new request has no tree", ("req_idx",), ()),
            ("get_num_tokens", "the node total", ("num_tokens_per_req", "draft_tokens"), ("_batch_budget",)),
            ("compact_batch", "called as it is", ("num_draft_tokens_per_req",), ("_batch_budget",)),
            (
                "reallocate_drafts",
                "node counts on the device; its ranking is replaced",
                ("req_ids", "idx_mapping"),
                ("_assign_draft_token_budget_compiled", "_confidence_probs", "_batch_budget"),
            ),
            ("record_confidences", "a(v) of the new drafts", ("confidence_probs", "input_batch"), ()),
            ("batches_to_profile", "nothing: costs come from a file", ("capture_sizes",), ()),
        )
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner",
        "seam",
        "calls the budget manager",
        mentions=(
            "adaptive_verification",
            "get_num_tokens",
            "compact_batch",
            "reallocate_drafts",
            "record_confidences",
            "draft_token_confidence_probs",
        ),
    ),
    Hook(
        f"{_GPU}/states.py",
        "RequestState",
        "use",
        "what the budget knows of a request",
        mentions=(
            "req_id_to_index",
            "num_computed_tokens_np",
            "prefill_len",
            "max_seq_len",
            "draft_tokens",
        ),
    ),
    Hook(
        f"{_GPU}/attn_utils.py",
        "get_query_lens_mismatch_unsupported_backend",
        "use",
        "which attention backend follows trimming on the device",
        params=("attn_groups", "checked_layer_names"),
    ),
    Hook(
        "v1/worker/gpu_worker.py",
        "Worker.initialize_from_config",
        "subclass",
        "attaches the budget manager",
        params=("kv_cache_config",),
        mentions=("initialize_kv_cache",),
    ),
    Hook(
        "v1/core/sched/scheduler.py",
        "Scheduler.schedule",
        "seam",
        "asks how many draft rows to reserve, and passes the number on to propose",
        mentions=("dynamic_sd_lookup", "num_spec_tokens_to_schedule"),
    ),
    Hook(
        "engine/arg_utils.py",
        "EngineArgs.create_engine_config",
        "seam",
        "our scheduler, named while the speculative config is made",
        mentions=("create_speculative_config", "scheduler_cls"),
    ),
    Hook(
        f"{_GPU}/spec_decode/speculator.py",
        "DraftModelSpeculator.compute_draft_logits",
        "use",
        "DFlash logits",
    ),
    Hook(
        _DSPARK,
        "DSparkSpeculator._generate_draft",
        "subclass",
        "base logits and Markov head to a tree",
        params=("num_reqs", "num_tokens_padded", "attn_metadata", "slot_mappings", "cudagraph_runtime_mode"),
    ),
    Hook(_DSPARK, "DSparkSpeculator.__init__", "use", "the anchor's query row", mentions=("_anchor_idx",)),
    Hook(
        "model_executor/models/qwen3_dspark.py",
        "DSparkMarkovHead.__init__",
        "use",
        "the head's two matrices",
        mentions=("markov_w1", "markov_w2"),
    ),
    Hook(
        "model_executor/models/qwen3_dspark.py",
        "Qwen3DSparkForCausalLM.compute_draft_logits",
        "use",
        "base logits without the head",
    ),
    Hook(
        "v1/attention/backends/registry.py",
        "register_backend",
        "use",
        "our attention backend",
        params=("backend",),
    ),
    Hook(
        _CPU_ATTN,
        "CPUAttentionBackendImpl.forward",
        "subclass",
        "tree rows on the CPU",
        params=("query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    Hook(
        _CPU_ATTN,
        "CPUAttentionMetadataBuilder.__init__",
        "subclass",
        "fixes the cache packing we read",
        mentions=("isa", "_set_isa_to_layers"),
    ),
    Hook(
        _FLASH,
        "FlashAttentionImpl.forward",
        "subclass",
        "tree rows on CUDA",
        params=("query", "key", "value", "kv_cache", "attn_metadata", "output"),
        mentions=("split", "transpose"),
    ),
    Hook(
        _FLASH,
        "FlashAttentionMetadataBuilder.get_cudagraph_support",
        "subclass",
        "trees are not captured in full graphs yet",
    ),
    Hook(
        "v1/attention/backends/fa_utils.py",
        "get_flash_attn_version",
        "use",
        "the prefix pass asks FlashAttention for its log-sum-exp",
    ),
)


def check_hooks(root: Path | None = None) -> list[HookStatus]:
    """Check the table against an installed vLLM, or against the ``vllm`` folder of a source tree.

    Args:
        root: the ``vllm`` package folder; the installed one when None.

    Raises:
        ModuleNotFoundError: no vLLM is installed and no root is given.
    """
    return check(HOOKS, package_root("vllm") if root is None else root)
