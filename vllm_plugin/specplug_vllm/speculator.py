"""The stock DFlash and DSpark drafters, with a tree built from their block logits instead of one chain."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from specplug.calibration import Coefficients, calibrated, read_calibration
from specplug.candidates import TransitionTable
from specplug.cost import Shape
from specplug.heads import MarkovHead
from specplug.tree import DraftTree
from specplug.verify import Walk
from specplug.window import Commit
from specplug_kernels.ops import make_ops
from specplug_vllm.manager import BudgetManager
from specplug_vllm.model_state import tree_model_state_cls
from specplug_vllm.store import TreeStore


class TreeSpeculator(ABC):
    """Mixed in before a stock drafter. The drafter itself sees depth gamma; the runner sees budget B."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        tree_config = vllm_config.speculative_config
        self.budget: int = tree_config.num_speculative_tokens
        self.depth: int = tree_config.tree_depth
        self.candidates: int = tree_config.tree_candidates
        drafter_config = copy.copy(vllm_config)
        drafter_config.speculative_config = copy.copy(tree_config)
        drafter_config.speculative_config.num_speculative_tokens = self.depth
        super().__init__(drafter_config, device)
        self.ops = make_ops(
            tree_config.kernels, device, requests=self.max_num_reqs, depth=self.depth, budget=self.budget
        )
        self.store = TreeStore(self.max_num_reqs, self.budget, device)
        self.tree_tokens = torch.zeros(self.max_num_reqs, self.budget, dtype=torch.int64, device=device)
        # a(v) of the nodes; the runner hands it to the manager, whose width is the budget.
        self.draft_token_confidence_probs = torch.zeros_like(self.tree_tokens, dtype=torch.float32)
        self.coefficients = None
        if tree_config.options.calibration is not None:
            self.coefficients = Coefficients.of(read_calibration(tree_config.options.calibration), device)
        self.manager: BudgetManager | None = None  # attached by the worker where steps are planned
        self.shape: Shape = "tree"  # of the round in work
        # Set by the ModelState after acceptance, used once by propose.
        self.pending_commit: Commit | None = None
        # The step's walk and the nodes [R] it could take, for the manager; None where none was verified.
        self.walked: tuple[Walk, torch.Tensor] | None = None

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """Also names the target's ModelState class: this runs after the target is loaded and before its state
        is made.
        """
        base = resolve_model_state_cls(self.vllm_config, target_model)
        self.target_layers = set(target_attn_layer_names)
        state_cls = tree_model_state_cls(base, self, frozenset(target_attn_layer_names))
        target_model.get_model_state_cls = lambda: state_cls
        return super().load_draft_model(target_model, target_attn_layer_names)

    @abstractmethod
    def table(self, block_hidden: torch.Tensor, num_reqs: int) -> TransitionTable:
        """Candidates and log-probabilities of the block. ``block_hidden``: [R * gamma, hidden]."""

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: Any,
        cudagraph_runtime_mode: Any = None,
    ) -> None:
        if self.shape == "plain":  # context keys and values are written by now; nothing else is needed
            return
        mode = {} if cudagraph_runtime_mode is None else {"cudagraph_runtime_mode": cudagraph_runtime_mode}
        hidden = self._run_model(
            num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, **mode
        )
        samples = num_reqs * self.depth
        table = self.table(hidden[self.sample_indices[:samples]], num_reqs)
        slots = self.store.slots(self.sample_idx_mapping[:samples].view(num_reqs, self.depth)[:, 0])
        if self.shape == "chain":
            everybody = torch.ones_like(slots, dtype=torch.bool)
            nothing = DraftTree.empty(num_reqs, self.budget, slots.device)
            tree = self.ops.greedy_chain(table).select(everybody, nothing)
        else:
            tree = self.ops.grow(table, self.budget)
            if self.store.chain_slots:
                tree = self.ops.greedy_chain(table).select(self.store.chain_only[slots], tree)
        log_probs = tree.scores
        if self.coefficients is not None:
            temperatures = self.store.temperatures[slots]
            ordered = calibrated(tree, self.coefficients, temperatures, max_depth=self.depth)
            tree, log_probs = ordered.tree, tree.scores.gather(1, ordered.order)
        self.store.write(slots, tree)
        self.store.log_probs[slots] = log_probs
        self.tree_tokens[:num_reqs] = tree.tokens
        self.draft_token_confidence_probs[:num_reqs] = tree.scores.exp()

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        return min(num_reqs * (self.budget + 1), self.max_num_tokens)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        requests, slots = input_batch.num_reqs, input_batch.idx_mapping
        inputs = (input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, *args)
        if kwargs.get("dummy_run"):
            super().propose(*inputs, **kwargs)
            return self.tree_tokens[:requests]
        moves, self.pending_commit = self.pending_commit, None
        if moves is not None:
            for features in aux_hidden_states or [last_hidden_states]:
                self.ops.move_rows(moves, features)
        rows = kwargs.get("num_speculative_tokens")
        if self.manager is not None:
            self.manager.accepted(args[0], slots, self.walked)
            self.shape = self.manager.coming_shape(requests, rows)
        elif rows == 0:  # a round whose drafts nobody will verify
            self.shape = "plain"
        if self.shape != "tree" or self.store.chain_slots:
            # A captured draft graph builds trees for everybody. ``is_profile`` keeps it from being replayed:
            # its only use. In a plain round the context's keys and values must be written all the same, or
            # the drafter's cache would have holes; vLLM 0.32 has no early exit after that.
            kwargs["is_profile"] = True
        super().propose(*inputs, **kwargs)
        if self.shape == "plain":
            self.store.counts[slots] = 0
            self.draft_token_confidence_probs[:requests] = 0
        self.store.branch(input_batch.idx_mapping_np, chains=self.shape != "tree")
        if self.manager is not None:
            self.manager.drafted(self.shape)
        self.shape = "tree"
        return self.tree_tokens[:requests]


class DFlashTreeSpeculator(TreeSpeculator, DFlashSpeculator):
    """Children scored by depth alone (DDTree)."""

    def table(self, block_hidden: torch.Tensor, num_reqs: int) -> TransitionTable:
        logits = self.compute_draft_logits(block_hidden, 0)
        return self.ops.factorised(logits.view(num_reqs, self.depth, -1), self.budget)


class DSparkTreeSpeculator(TreeSpeculator, DSparkSpeculator):
    """Children scored under their parent token through the Markov head."""

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        model = super().load_draft_model(target_model, target_attn_layer_names)
        head = model.model.markov_head
        vocab = model.config.vocab_size
        self._head = MarkovHead(
            w1=head.markov_w1.weight[:vocab].float(),
            w2=head.markov_w2.weight[:vocab].float(),
            scale=model.logits_processor.scale,
        )
        return model

    def table(self, block_hidden: torch.Tensor, num_reqs: int) -> TransitionTable:
        logits = self.model.compute_draft_logits(block_hidden).view(num_reqs, self.depth, -1)
        anchors = self.input_buffers.input_ids[self._anchor_idx[:num_reqs]].long()
        return self.ops.conditioned(logits, self._head, anchors, self.candidates)


def tree_speculator(vllm_config: Any, device: torch.device) -> TreeSpeculator:
    """The drafter for a :class:`specplug_vllm.config.TreeSpeculativeConfig`."""
    dspark = vllm_config.speculative_config.method == "dspark"
    return (DSparkTreeSpeculator if dspark else DFlashTreeSpeculator)(vllm_config, device)
