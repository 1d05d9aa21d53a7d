"""The result of a run under load: counts, what was wrong, a table, and a JSON file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_chaos import Death
from load_client import Reply
from load_judge import Divergence, leaks, slope, wrong_reply
from load_requests import Ask
from load_watch import Sample, Watch

HOUR_SECONDS = 3600.0


@dataclass
class Outcome:
    """Filled as the run goes on. `wrong` holds every reason for exit code 1."""

    rows: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    near_ties: list[Divergence] = field(default_factory=list)

    def note_load(
        self,
        answered: Sequence[tuple[Ask, Reply]],
        watch: Watch,
        told: dict[str, float],
        log_lines: Sequence[str],
    ) -> None:
        self.samples = samples = list(watch.samples)
        faults = [fault for ask, reply in answered if (fault := wrong_reply(ask, reply))]
        self.wrong += [*faults, *watch.trouble, *leaks(samples), *(f"log: {line}" for line in log_lines)]
        manners = Counter(ask.manner for ask, _ in answered)
        last, per_second = samples[-1], slope(samples)
        drafts, accepted = (
            told.get(f"vllm:spec_decode_num_{what}_total", 0.0) for what in ("drafts", "accepted_tokens")
        )
        if not drafts:
            self.wrong.append("nothing was drafted: the server did not speculate")
        self.rows |= {
            "seconds of load": round(last.seconds),
            "requests": len(answered),
            "of them whole, streamed": f"{manners['whole']}, {manners['stream']}",
            "clients that left": sum(reply.left for _, reply in answered),
            "of them in the middle of an answer": sum(
                reply.left and bool(reply.parts) for _, reply in answered
            ),
            "invalid requests, all refused with 4xx": manners["refused"],
            "tokens generated": int(told["vllm:generation_tokens_total"]),
            "prompt tokens, of them from the prefix cache": "{:.0f}, {:.0f}".format(
                told["vllm:prompt_tokens_total"], told["vllm:prefix_cache_hits_total"]
            ),
            "drafts, accepted tokens": f"{drafts:.0f}, {accepted:.0f}",
            "preemptions": int(told["vllm:num_preemptions_total"]),
            "most requests running, waiting": f"{max(s.running for s in samples)}, "
            f"{max(s.waiting for s in samples)}",
            "memory: start, halfway, peak, final (MiB)": memory(samples),
            "memory: slope over the second half (MiB an hour)": "too short to tell"
            if per_second is None
            else round(per_second * HOUR_SECONDS, 1),
            "open files: peak, final": f"{max(s.files for s in samples)}, {last.files}",
            "looks at the idle server": sum(s.idle for s in samples),
            "of them with cache blocks in use": sum(s.idle and s.cache_used > 0 for s in samples),
            "replies that were wrong by themselves": len(faults),
            "errors in the server's log": len(log_lines),
        }

    def note_comparison(
        self, compared: int, mismatches: Sequence[Divergence], near_ties: Sequence[Divergence]
    ) -> None:
        self.near_ties = list(near_ties)
        self.wrong += [f"mismatch: request {one.number}, answer {one.part}: {one.what}" for one in mismatches]
        if not compared:
            self.wrong.append("no answer was compared with plain decoding")
        self.rows |= {
            "answers compared with plain decoding": compared,
            "mismatches": len(mismatches),
            "near ties (fp32, judged by the gap)": len(near_ties),
        }

    def note_plain_memory(self, watch: Watch) -> None:
        """What stock code needs under the same requests; halfway is after half of them."""
        self.wrong += watch.trouble
        looks = [one for one in watch.samples if one.idle]
        if looks:
            self.rows["memory of the plain server: start, halfway, peak, final (MiB)"] = memory(looks)

    def note_chaos(self, death: Death) -> None:
        self.wrong += death.wrong
        self.rows |= {
            "engine killed: requests in flight, told, connection closed": f"{death.asked}, {death.told}, "
            f"{death.dropped}",
            "engine killed: /health fails": "yes" if death.health_fails else "no",
            "engine killed: server ended after (s), exit code": f"{death.seconds:.1f}, {death.exit_code}",
        }


def memory(samples: Sequence[Sample]) -> str:
    own = [one.own_mib for one in samples]
    return f"{own[0]:.0f}, {own[len(own) // 2]:.0f}, {max(own):.0f}, {own[-1]:.0f}"


def table(outcome: Outcome) -> str:
    lines = ["| what | figure |", "|---|---|"]
    lines += [f"| {what} | {figure} |" for what, figure in outcome.rows.items()]
    lines.append(f"| wrong | {len(outcome.wrong)} |")
    return "\n".join(lines)


def write(out: Path, facts: dict[str, Any], outcome: Outcome) -> None:
    """result.json with a sample of every idle moment, and table.md."""
    idle = [brief(one) for one in outcome.samples if one.idle]
    result = {
        **facts,
        "result": outcome.rows,
        "wrong": outcome.wrong,
        "near_ties": [one._asdict() for one in outcome.near_ties],
        "idle_samples": idle,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "table.md").write_text(table(outcome) + "\n", encoding="utf-8")


def brief(one: Sample) -> dict[str, float]:
    return {"seconds": round(one.seconds, 1), "own_mib": round(one.own_mib, 1), "files": one.files}
