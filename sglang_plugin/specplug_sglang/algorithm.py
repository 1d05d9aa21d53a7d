"""DDTREE in SGLang's registry of speculative algorithms.

It answers as DSPARK does wherever SGLang asks what kind of algorithm runs: the draft pool, the capture of the
target's features, the confidence relay, admission and metrics are all keyed on that. Three methods that
SGLang calls on every algorithm are missing in CustomSpecAlgo: create_future_map, carries_draft_hidden_states
and need_topk.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from specplug.checkpoint import check_pair
from specplug_sglang import config
from specplug_sglang.refusals import check_engine

logger = logging.getLogger(__name__)

MAX_RUNNING_REQUESTS = 48  # SGLang's own default where it speculates


class TreeAlgorithm(CustomSpecAlgo):
    """``--speculative-algorithm DDTREE``."""

    def is_dflash_family(self) -> bool:
        return True

    def is_dspark(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_ragged_verify(self) -> bool:
        return True

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        """The relay of overlapped steps. Lengths are always mirrored on the host: the mask's size needs them,
        also where the attention backend does not."""
        from sglang.srt.managers.overlap_utils import FutureMap

        del needs_cpu_seq_lens
        return FutureMap(
            device,
            self,
            req_to_token_pool,
            needs_cpu_seq_lens=True,
            needs_confidence_relay=needs_confidence_relay,
        )

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Rows a request: the window for the target, the block for the draft."""
        return config.settings().query_rows if is_draft_worker else num_draft_tokens

    def handle_server_args(self, server_args: Any) -> None:
        """Check everything before a weight is read, then fill in the fields SGLang reads.

        Raises ValueError: this SGLang moved a name we rely on, a hook was not applied, or an option, the pair
        of models or an engine feature does not work with trees.
        """
        from sglang.srt.speculative.ragged_verify import read_ragged_verify_mode
        from sglang.srt.utils.hf_transformers_utils import get_config

        from specplug_sglang.install import faults_here

        config.request()
        faults = faults_here()
        if faults:
            raise ValueError(
                f"specplug refuses DDTREE on this SGLang: {'; '.join(faults)}. Install an SGLang that "
                "`specplug doctor` lists as tested, or leave DDTREE out."
            )
        chosen = config.resolve(config.Flags.of(server_args, server_args.model_path))
        for note in chosen.notes:
            logger.warning("%s: %s", server_args.speculative_draft_model_path, note)
        target = get_config(
            server_args.model_path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.revision,
        ).to_dict()
        check_pair(chosen.checkpoint, target)
        mode = read_ragged_verify_mode().value
        check_engine(server_args, target, mode=mode, options=chosen.options)
        server_args.speculative_num_draft_tokens = chosen.width
        server_args.speculative_num_steps = server_args.speculative_eagle_topk = 1
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
        if server_args.attention_backend is None and server_args.device == "cuda":
            server_args.attention_backend = "triton"
        logger.info(
            "specplug: DDTREE over a %s draft, depth %d, %d nodes a request%s, verification %s.",
            chosen.checkpoint.kind,
            chosen.depth,
            chosen.budget,
            ", scores conditioned on the parent token" if chosen.checkpoint.markov_head else "",
            mode,
        )
