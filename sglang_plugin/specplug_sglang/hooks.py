"""The hook table: every SGLang name the adapter relies on. Checked by DDTREE at start, by ``specplug
doctor``, and by the tests; see `specplug.hook_table`."""

from __future__ import annotations

from pathlib import Path

from specplug.hook_table import Hook, HookStatus, check, package_root

_SPEC = "srt/speculative"
_DSPARK = f"{_SPEC}/dspark_components"
_PLANNER = f"{_DSPARK}/dspark_planner.py"
_WORKER = f"{_DSPARK}/dspark_worker_v2.py"
_GRAPHS = "srt/model_executor/runner/decode_cuda_graph_runner.py"

TREE_HOOKS: tuple[Hook, ...] = (
    Hook(
        "srt/plugins/__init__.py",
        "load_plugins",
        "seam",
        "calls register in every process; SystemExit passes through it",
        mentions=("Exception", "apply_hooks"),
    ),
    Hook(
        "srt/plugins/hook_registry.py",
        "HookRegistry.register",
        "use",
        "wraps functions",
        params=("target", "hook", "hook_type"),
    ),
    Hook(
        f"{_SPEC}/spec_info.py",
        "SpeculativeAlgorithm.register",
        "use",
        "the registry of algorithms",
        params=("name", "supports_overlap", "spec_class"),
    ),
    Hook(
        f"{_SPEC}/spec_registry.py",
        "CustomSpecAlgo",
        "subclass",
        "DDTREE",
    ),
    *(
        Hook(f"{_SPEC}/spec_registry.py", f"CustomSpecAlgo.{name}", "subclass", why, params=params)
        for name, why, params in (
            ("create_worker", "asks our factory for the worker class", ("server_args",)),
            ("handle_server_args", "checks before a weight is read", ("server_args",)),
            (
                "get_num_tokens_per_req_for_target_verify",
                "rows of window and block",
                ("num_draft_tokens", "is_draft_worker"),
            ),
        )
    ),
    *(
        Hook(f"{_SPEC}/spec_info.py", f"SpeculativeAlgorithm.{name}", "seam", "called on every algorithm")
        for name in ("create_future_map", "carries_draft_hidden_states", "need_topk")
    ),
    Hook(
        "srt/managers/scheduler.py",
        "Scheduler",
        "seam",
        "makes the relay, then asks the worker who prepares budgets",
        mentions=("create_future_map", "needs_confidence_relay", "get_confidence_budget_prepare"),
    ),
    Hook(
        "srt/managers/overlap_utils.py",
        "FutureMap.__init__",
        "use",
        "relay of overlapped steps",
        params=("device", "spec_algo", "req_to_token_pool", "needs_cpu_seq_lens", "needs_confidence_relay"),
    ),
    Hook(
        "srt/managers/overlap_utils.py",
        "decide_needs_confidence_relay",
        "seam",
        "survivals are relayed as confidences are",
        mentions=("is_dspark", "STATIC"),
    ),
    Hook(
        "srt/utils/hf_transformers/config.py",
        "get_config",
        "patch",
        "a DFlash draft loads as DSPARK's fill-in layout",
        params=("model", "trust_remote_code", "revision"),
    ),
    Hook(
        f"{_DSPARK}/dspark_config.py",
        "resolve_runtime_config",
        "patch",
        "window of budget + 1 rows over a block of its own depth",
        params=("draft_hf_config", "speculative_num_draft_tokens", "target_vocab_size"),
        mentions=("DSparkRuntimeConfig", "gamma", "verify_num_draft_tokens", "mask_token_id"),
    ),
    Hook(
        f"{_SPEC}/dflash_utils.py",
        "resolve_dflash_verify_mask_policy",
        "patch",
        "graphs are captured with the mask",
        params=("attn_backend",),
    ),
    Hook(
        _GRAPHS,
        "DecodeCudaGraphRunner.get_spec_info",
        "seam",
        "asks that policy when it captures",
        mentions=("resolve_dflash_verify_mask_policy", "custom_mask", "is_draft_worker"),
    ),
    Hook(
        "srt/model_executor/model_runner.py",
        "ModelRunner.decode_num_tokens_per_req",
        "patch",
        "rows of the draft's block",
        params=("num_draft_tokens",),
        mentions=("is_draft_worker", "is_dspark"),
    ),
    Hook(
        "srt/models/dspark.py",
        "DSparkDraftMixin.__init__",
        "subclass",
        "the headless adapter",
        params=("config", "quant_config", "prefix"),
        mentions=("markov_head", "confidence_head", "sample_from_anchor", "_base_logits_gatherer"),
    ),
    Hook(
        "srt/models/dspark.py",
        "DSparkDraftMixin.compute_base_logits",
        "use",
        "block logits without a head",
        params=("hidden",),
        mentions=("vocab_shard",),
    ),
    Hook(
        "srt/models/dspark.py",
        "VanillaMarkov.__init__",
        "use",
        "the head's two matrices",
        mentions=("markov_w1", "markov_w2"),
    ),
    Hook("srt/models/dspark.py", "GatedMarkovHead.__init__", "use", "its gate", mentions=("gate_proj",)),
    Hook("srt/models/dspark.py", "RNNHead.__init__", "use", "its projection", mentions=("joint_proj",)),
    Hook("srt/models/dflash.py", "DFlashDraftModel.load_weights", "use", "a DFlash checkpoint's tensors"),
    Hook(
        _WORKER,
        "DSparkWorkerV2.__init__",
        "subclass",
        "builds draft, proposer, planner, executor and injector",
        mentions=(
            "resolve_runtime_config",
            "_verify_planner",
            "_verify_executor",
            "_proposer",
            "_kv_injector",
            "_tp_sync",
            "_block_pos_offsets",
            "draft_model",
            "gamma",
            "verify_num_draft_tokens",
        ),
    ),
    Hook(
        _WORKER,
        "DSparkWorkerV2._forward_decode",
        "subclass",
        "a tree where it has a chain",
        params=("batch", "on_publish", "grammar_barrier", "coordination_plan"),
        mentions=(
            "alloc_verify_window",
            "on_publish",
            "confidence",
            "make_next_draft_input",
            "accept_lens",
            "cap_lens",
            "new_seq_lens",
            "nxt_kv_lens_cpu",
        ),
    ),
    Hook(
        _WORKER,
        "DSparkWorkerV2._forward_prefill",
        "subclass",
        "first tokens of a request",
        params=("batch", "on_publish", "pp_proxy_tensors"),
    ),
    Hook(
        _WORKER, "DSparkWorkerV2.init_attention_backends", "subclass", "looks whether the backend takes masks"
    ),
    Hook(
        _WORKER,
        "DSparkWorkerV2.init_cuda_graphs",
        "subclass",
        "the last step of the start; draws no chain in the draft's graph",
        mentions=("_maybe_build_draft_sampler", "attach_draft_sampler"),
    ),
    Hook(
        _WORKER,
        "DSparkWorkerV2.get_confidence_budget_prepare",
        "seam",
        "the scheduler asks the planner for a budget",
        mentions=("_verify_planner", "confidence_budget_prepare"),
    ),
    Hook(
        f"{_DSPARK}/dspark_draft.py",
        "DraftBlockProposer._run_forward",
        "use",
        "one block of the draft",
        params=("batch", "draft_input", "verify_window", "bs", "device", "embed_module"),
        mentions=("raw_hidden", "draft_hidden_3d", "draft_block_ids", "bonus_tokens"),
    ),
    Hook(
        f"{_DSPARK}/dspark_draft.py",
        "DraftBlockProposer._base_logits_context",
        "use",
        "where base logits are made",
    ),
    Hook(
        _PLANNER,
        "alloc_verify_window",
        "use",
        "cache slots of the windows",
        params=(
            "batch",
            "bs",
            "verify_num_draft_tokens",
            "block_pos_offsets",
            "model_runner",
            "seq_lens_cpu",
        ),
        mentions=("positions_2d", "verify_cache_loc", "kv_loc_plan"),
    ),
    *(
        Hook(_PLANNER, f"DSparkVerifyPlanner.{name}", "subclass", why, params=params, mentions=mentions)
        for name, why, params, mentions in (
            (
                "__init__",
                "built again over nodes",
                ("draft_model", "gamma", "model_runner", "verify_num_draft_tokens", "tp_sync"),
                ("confidence_head", "_is_verify_all", "_budget_planner", "_tp_sync"),
            ),
            ("prepare_verify_budget", "under overlap", ("batch", "future_map"), ("_budget_from_resolved",)),
            (
                "compute_budget_sync",
                "without overlap",
                ("confidence",),
                ("ResolvedConfidence", "_budget_from_resolved"),
            ),
            (
                "resolve_verify_token_budget",
                "either of them",
                ("draft_input", "confidence", "prefix_lens", "req_pool_indices"),
                ("verify_token_budget",),
            ),
            (
                "_budget_from_resolved",
                "the node total",
                ("resolved", "req_pool_indices_cpu"),
                ("req_generation",),
            ),
            ("_schedule_verify_lens", "nodes of each request", ("confidence", "budget", "device"), ()),
            (
                "schedule_layout",
                "rows of each request",
                ("req_pool_indices", "prefix_lens", "device", "confidence", "budget"),
                ("_schedule_verify_lens", "_is_verify_all", "uniform_ragged_layout"),
            ),
            ("should_run_compact", "which forward", ("layout",), ()),
            ("carries_confidence", "what is relayed", (), ()),
            (
                "set_forced_budget_frac",
                "a share of all nodes, by hand",
                ("frac",),
                ("forced_budget_frac", "_budget_planner"),
            ),
        )
    ),
    Hook(
        f"{_SPEC}/dflash_info.py",
        "DFlashVerifyInput",
        "use",
        "the verify's input",
        mentions=(
            "draft_token",
            "positions",
            "draft_token_num",
            "topk",
            "custom_mask",
            "ragged_verify_layout",
            "live_seq_lens_cpu",
            "kv_loc_plan",
            "kv_loc_cols",
        ),
    ),
    Hook(
        f"{_SPEC}/dflash_info.py",
        "DFlashVerifyInput.prepare_for_verify",
        "subclass",
        "ragged rows on the Triton backend",
        params=("batch", "target_worker"),
        mentions=("init_forward_metadata", "can_run_cuda_graph"),
    ),
    Hook(
        "srt/layers/attention/triton_backend.py",
        "TritonAttnBackend.init_forward_metadata",
        "seam",
        "whole windows, whose two pointer arrays are replaced",
        mentions=("is_target_verify", "qo_indptr", "mask_indptr", "custom_mask", "max_extend_len"),
    ),
    Hook(
        "kernels/ops/speculative/dspark/dspark_verify_window.py",
        "BuildRaggedVerifyWindow.torch",
        "use",
        "rows of trimmed windows",
        params=("batch", "layout", "draft_block_ids", "draft_tokens", "verify_num_draft_tokens"),
    ),
    Hook(
        "kernels/ops/speculative/dspark/dspark_verify_window.py",
        "ScatterCompactToStrided.torch",
        "use",
        "and back to whole windows",
        params=("compact", "layout", "fill_value", "verify_num_draft_tokens"),
    ),
    Hook(
        f"{_DSPARK}/dspark_verify.py",
        "TargetVerifyExecutor._forward_prepared_verify",
        "use",
        "the target forward",
        params=("batch", "verify_input", "seq_lens_cpu_backup", "seq_lens_sum_backup"),
    ),
    Hook(
        f"{_SPEC}/spec_utils.py",
        "move_accept_tokens_to_target_kvcache",
        "use",
        "cache rows of the accepted path",
        params=("batch", "accept_index", "num_correct_drafts", "token_to_kv_pool_allocator"),
        mentions=("out_cache_loc", "move_kv_cache"),
    ),
    Hook(
        f"{_DSPARK}/dspark_kv_inject.py",
        "TargetHiddenKvInjector.inject_target_hidden",
        "use",
        "features of the accepted path",
        params=("target_hidden", "cache_loc", "positions", "cache_loc_2d", "commit_lens"),
    ),
    Hook(
        f"{_DSPARK}/dspark_kv_inject.py",
        "TargetHiddenKvInjector.ids_for",
        "use",
        "their slots",
        params=("plan",),
    ),
    Hook(
        "srt/managers/utils.py",
        "GenerationBatchResult",
        "use",
        "what the scheduler reads of a step",
        mentions=("accept_lens", "block_accept_lens", "cap_lens", "new_seq_lens", "next_draft_input"),
    ),
    Hook(
        "srt/managers/scheduler_components/batch_result_processor.py",
        "SchedulerBatchResultProcessor",
        "seam",
        "reads the tokens of a request from the front of its columns",
        mentions=("accept_lens", "next_token_ids", "stride"),
    ),
)

DSPARK_HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_SPEC}/spec_info.py",
        "SpeculativeAlgorithm.create_worker",
        "patch",
        "our worker over DSPARK's",
        params=("server_args",),
    ),
    Hook(
        "srt/arg_groups/speculative_hook.py",
        "_handle_dspark",
        "patch",
        "checks the table and the temperatures before any weight is read",
        params=("server_args",),
        mentions=("resolving_view",),
    ),
    Hook(
        f"{_DSPARK}/dspark_planner.py",
        "compute_verify_token_budget",
        "patch",
        "our objective",
        params=("history_survival_probs", "sps_table", "cfg"),
    ),
    Hook(
        f"{_DSPARK}/dspark_planner.py",
        "HostConfidenceBudgetPlanner.compute_budget",
        "seam",
        "asks for the total, with survivals of two steps ago",
        mentions=("compute_verify_token_budget", "_shift_to_lag", "forced_budget_frac"),
    ),
    Hook(
        f"{_DSPARK}/dspark_planner.py",
        "VerifyBudgetDecision",
        "use",
        "our answer",
        mentions=("budget", "predicted_step_seconds", "predicted_theta"),
    ),
    Hook(
        f"{_DSPARK}/dspark_planner.py",
        "DSparkVerifyPlanner.schedule_layout",
        "seam",
        "whole chains where nothing is trimmed",
        mentions=("_is_verify_all",),
    ),
    Hook(
        f"{_DSPARK}/dspark_worker_v2.py",
        "DSparkWorkerV2.__init__",
        "subclass",
        "its planner and executor",
        mentions=("_verify_planner", "_verify_executor", "_hosts_draft"),
    ),
    Hook(
        f"{_DSPARK}/dspark_worker_v2.py",
        "DSparkWorkerV2._forward_decode",
        "subclass",
        "one step: watched, and its tokens remembered",
        params=("batch", "on_publish", "grammar_barrier", "coordination_plan"),
        mentions=(
            "run_compact",
            "run_non_compact",
            "accept_and_finalize",
            "verify_logits_adjustments_are_noop",
        ),
    ),
    Hook(
        f"{_DSPARK}/dspark_worker_v2.py",
        "DSparkWorkerV2._forward_prefill",
        "subclass",
        "outputs begin",
        params=("batch", "on_publish", "pp_proxy_tensors"),
    ),
    Hook(
        f"{_DSPARK}/dspark_verify.py",
        "TargetVerifyExecutor.run_non_compact",
        "subclass",
        "logits adjusted by path",
        params=("batch", "verify_ids_2d", "sampling_info"),
    ),
    Hook(
        f"{_DSPARK}/dspark_verify.py",
        "TargetVerifyExecutor.run_compact",
        "subclass",
        "logits adjusted by path",
        params=("batch", "draft_tokens", "sampling_info"),
    ),
    Hook(
        f"{_DSPARK}/dspark_verify.py",
        "TargetVerifyExecutor.accept_and_finalize",
        "subclass",
        "min-p before acceptance",
        params=("target_logits", "sampling_info"),
    ),
    Hook(
        f"{_DSPARK}/dspark_verify.py",
        "verify_logits_adjustments_are_noop",
        "seam",
        "adjusted steps are accepted outside the graph",
        mentions=("penalizer_orchestrator", "is_required"),
    ),
    Hook(
        f"{_SPEC}/dflash_utils.py",
        "validate_dflash_request",
        "patch",
        "admission",
        params=("req", "enable_overlap"),
    ),
    Hook(
        "srt/managers/scheduler_components/internal_state.py",
        "SchedulerInternalStateController.get_internal_state",
        "patch",
        "our block in /server_info",
        params=("recv_req",),
    ),
    Hook(
        "srt/sampling/sampling_batch_info.py",
        "SamplingBatchInfo",
        "use",
        "repeated for the rows of a request",
        mentions=(
            "temperatures",
            "top_ps",
            "top_ks",
            "min_ps",
            "sampling_seed",
            "penalizer_orchestrator",
            "acc_additive_penalties",
            "acc_scaling_penalties",
            "grammar_mask",
            "logit_bias",
            "has_custom_logit_processor",
            "sampling_mask_batch_indices",
        ),
    ),
    Hook(
        "srt/layers/sampler.py",
        "Sampler.forward",
        "use",
        "draws every row",
        params=("logits_output", "sampling_info", "return_logprob", "positions"),
    ),
    Hook(
        "srt/layers/sampler.py",
        "apply_custom_logit_processor",
        "use",
        "rows of a request",
        params=("logits", "sampling_batch_info", "num_tokens_in_batch"),
    ),
    Hook(
        f"{_SPEC}/spec_utils.py",
        "GrammarTree.from_device",
        "use",
        "grammars walk the tree",
        params=("retrieve_next_token", "retrieve_next_sibling", "draft_token"),
    ),
    Hook(
        f"{_SPEC}/spec_utils.py",
        "build_grammar_vocab_mask",
        "use",
        "the mask of every row",
        params=("reqs", "tree", "sampling_info", "device", "barrier"),
    ),
    Hook(
        "srt/layers/logprob_processor.py",
        "compute_spec_logprobs",
        "use",
        "log-probabilities of the accepted path",
        params=("batch", "logits_output", "predict", "accept_index"),
    ),
)

HOOKS = (*TREE_HOOKS, *DSPARK_HOOKS)


def check_hooks(root: Path | None = None) -> list[HookStatus]:
    """Check the table against an installed SGLang, or against the ``sglang`` folder of a source tree.

    Raises ModuleNotFoundError where no SGLang is installed and no root is given.
    """
    return check(HOOKS, package_root("sglang") if root is None else root)
