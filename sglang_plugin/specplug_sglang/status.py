"""The block ``specplug`` in /server_info: what runs in this engine, compared over its ranks at the start."""

from __future__ import annotations

from typing import Any

import specplug
from specplug_sglang.sampling import counted


def _internal_state(original: Any, self: Any, recv_req: Any) -> Any:
    answer = original(self, recv_req)
    worker = self.scheduler.draft_worker
    own = getattr(type(worker), "specplug_status", None)
    block: dict[str, Any] = {"version": specplug.__version__, "active": own is not None}
    if own is not None:
        block |= {**own(worker), "counted": dict(counted)}
    answer.internal_state["specplug"] = block
    return answer


_CONTROLLER = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
AROUND = {f"{_CONTROLLER}.get_internal_state": _internal_state}
