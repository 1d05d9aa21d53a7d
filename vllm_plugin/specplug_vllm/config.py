"""From the user's ``--speculative-config`` to a vLLM SpeculativeConfig that drafts trees.

vLLM keeps one number, ``num_speculative_tokens``, for two things that differ on a tree: how many rows a
request verifies and how deep the drafter looks. The stock configuration is made first with the *depth* (so
that every stock check of the drafter applies), then re-classed with the *node budget* as its width; the depth
is kept apart and handed to the drafter alone (:mod:`specplug_vllm.speculator`).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from vllm.config.speculative import SpeculativeConfig
from vllm.logger import init_logger

import specplug
from specplug.checkpoint import check_method, check_pair, read_draft
from specplug.config import TreeOptions, parse_options, resolve_depth
from specplug.planning import check_files
from specplug_kernels.ops import Kind, choose
from specplug_vllm import engine_death, metrics
from specplug_vllm.hooks import check_hooks
from specplug_vllm.refusals import check_engine, check_ranks

logger = init_logger("vllm.specplug")

METHOD = "ddtree"
SCHEDULER = "specplug_vllm.scheduler.tree_scheduler"

# vLLM takes these methods at their word; with any other it looks at the draft and corrects the method.
LITERAL_METHODS = frozenset({"dflash", "dspark", "eagle", "eagle3"})

# Keys of vLLM's own SpeculativeConfig that mean for a tree what they mean for a chain.
HOST_KEYS = frozenset(
    {
        "revision",
        "code_revision",
        "quantization",
        "draft_tensor_parallel_size",
        "draft_load_config",
        "attention_backend",
        "max_model_len",
    }
)


class TreeSpeculativeConfig(SpeculativeConfig):
    """``method`` stays the drafter's stock name (``dflash`` or ``dspark``), so every stock branch on it
    holds.

    ``num_speculative_tokens`` is the node budget B: the scheduler gives a request 1 + B rows.
    """

    tree_depth: int = 0  # gamma: positions after the root that the drafter predicts
    tree_candidates: int = 0  # C: tokens kept per depth when scores follow the parent token
    drafter_slots: int = 0  # stock max_num_new_slots_for_drafting at depth gamma
    kernels: Kind = "torch"  # who does the device work of a round
    options: TreeOptions | None = None  # as the user gave them
    counters_file: str = ""  # see specplug_vllm.metrics; "" where no step is planned

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        return self.drafter_slots

    def compute_hash(self) -> str:
        tree = (self.num_speculative_tokens, self.tree_depth, self.tree_candidates)
        return "-".join((super().compute_hash(), METHOD, *map(str, tree)))

    def __repr__(self) -> str:
        model = self.draft_model_config.model
        return (
            f"SpeculativeConfig(method='{METHOD}' over '{self.method}', model={model!r}, "
            f"depth={self.tree_depth}, tree_budget={self.num_speculative_tokens})"
        )


def _merged(args: Any) -> dict[str, Any]:
    """The user's keys, from ``--speculative-config`` and the ``--spec-*`` flags, spelled with underscores."""
    given = args.speculative_config or {}
    merged = {str(key).replace("-", "_"): value for key, value in given.items()}
    if len(merged) < len(given):
        spellings = sorted(str(key) for key in given if "-" in str(key))
        raise ValueError(
            f"{spellings[0]} is given twice in the speculative config, with dashes and with underscores; "
            "keep one."
        )
    for flag, key in (
        ("spec_method", "method"),
        ("spec_model", "model"),
        ("spec_tokens", "num_speculative_tokens"),
    ):
        value = getattr(args, flag, None)
        if value is not None and key in merged:
            raise ValueError(
                f"--{flag.replace('_', '-')} and --speculative-config['{key}'] are both given; give one."
            )
        if value is not None:
            merged[key] = value
    return merged


def requested(args: Any) -> bool:
    """Whether these EngineArgs ask for ``method: ddtree``."""
    in_config = (args.speculative_config or {}).get("method")
    return METHOD in (in_config, getattr(args, "spec_method", None))


def check_stock_method(args: Any) -> None:
    """Name the right method where a stock one is pointed at the other kind of block draft.

    vLLM itself refuses a DSpark draft under ``dflash`` with a list of every architecture it knows, and takes
    a DFlash draft under ``dspark`` for DeepSeek-V4, which fails while weights are loaded. Only plain local
    folders are looked at, and whatever cannot be read is left to vLLM.

    Raises:
        ValueError: vLLM could not have served this pair of method and draft.
    """
    config = args.speculative_config or {}
    method = getattr(args, "spec_method", None) or config.get("method")
    model = getattr(args, "spec_model", None) or config.get("model")
    if method not in LITERAL_METHODS or not isinstance(model, str) or not Path(model).is_dir():
        return
    try:
        draft = read_draft(model)
    except ValueError:
        return
    reason = check_method(draft, method) if draft.wrapper == "plain" else None
    if reason is not None:
        raise ValueError(reason)


def create_tree_config(
    original: Any, args: Any, target_model_config: Any, target_parallel_config: Any
) -> TreeSpeculativeConfig:
    """The configuration for ``method: ddtree``, checked before any weight is read.

    Args:
        original: vLLM's own ``EngineArgs.create_speculative_config``.
        args: the EngineArgs it is called on; not changed.

    Raises:
        ValueError: an unknown or impossible option, a draft that does not fit the target, an engine feature
            trees do not work with, or a vLLM whose hooks are not where we expect them.
    """
    raw = _merged(args)
    raw.pop("method", None)
    options, host_options = parse_options(raw, passthrough=HOST_KEYS)
    check_files(options)
    draft = read_draft(options.model, revision=host_options.get("revision"))
    refusal = check_method(draft, METHOD)  # of drafts that the core reads and this adapter does not serve
    if refusal is not None:
        raise ValueError(refusal)
    check_pair(draft, target_model_config.hf_config.to_dict())
    # A tree of B nodes is at most B deep, and vLLM reserves cache for B + 1 rows, not for the drafter's.
    depth = min(resolve_depth(options, draft), options.tree_budget)
    check_engine(args, target_model_config, target_parallel_config)
    draft_ranks = host_options.get("draft_tensor_parallel_size")
    check_ranks(options, draft_ranks, target_model_config, target_parallel_config)
    missing = [hook for hook in check_hooks() if not hook.ok]
    if missing:
        raise ValueError(
            f"specplug {specplug.__version__} does not fit this vLLM: "
            + "; ".join(f"{hook.name}: {hook.detail}" for hook in missing)
            + ". Install a vLLM that `specplug doctor` lists as tested, or leave method ddtree out."
        )

    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if options.full_graphs and on_cpu:
        raise ValueError(
            "full_graphs: expected false on a CPU, which captures no CUDA graphs, got true; leave the key out"
        )
    kernels = choose(
        options.kernels,
        on_gpu=not on_cpu,
        budget=options.tree_budget,
        candidates=options.candidates if draft.markov_head else options.tree_budget,
        depth=depth,
        head_size=target_model_config.get_head_size(),
        vocab=draft.vocab_size,
    )

    stock_args = copy.copy(args)
    stock_args.spec_method = stock_args.spec_model = stock_args.spec_tokens = None
    stock_args.speculative_config = {
        **host_options,
        "method": draft.base_method,
        "model": str(draft.path) if Path(options.model).expanduser().is_dir() else options.model,
        "num_speculative_tokens": depth,
    }
    config = original(stock_args, target_model_config, target_parallel_config)
    drafter_slots = config.max_num_new_slots_for_drafting
    config.__class__ = TreeSpeculativeConfig
    config.drafter_slots = drafter_slots
    config.tree_depth = depth
    config.tree_candidates = options.candidates
    config.num_speculative_tokens = options.tree_budget
    config.kernels, config.options = kernels.kind, options
    if options.planned:
        config.counters_file = metrics.create_file(engines=target_parallel_config.data_parallel_size)
        metrics.serve(config.counters_file)
    engine_death.fail_with_the_engine()
    if args.scheduler_cls in (None, SCHEDULER):
        args.scheduler_cls = SCHEDULER
    else:
        logger.warning(
            "specplug: --scheduler-cls is kept; requests with structured output draft chains%s.",
            ", and it reserves rows for whole trees at any load" if options.planned else "",
        )

    worker = "cpu_worker.CPUTreeWorker" if on_cpu else "cuda_worker.CUDATreeWorker"
    target_parallel_config.worker_cls = f"specplug_vllm.{worker}"
    logger.info(
        "specplug: method ddtree over a %s draft, depth %d, %d nodes a request%s; %s kernels%s.",
        draft.kind,
        depth,
        options.tree_budget,
        ", scores conditioned on the parent token" if draft.markov_head else "",
        kernels.kind,
        f" ({kernels.reason})" if kernels.reason else "",
    )
    return config
