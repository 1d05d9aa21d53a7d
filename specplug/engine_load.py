"""Load for a running engine in profiling mode: so many requests at once of such a length, until the log has
what a table needs.

The engine draws what each step verifies (its ``explore`` mode) and logs every step; here is only the traffic.
Requests come in waves that start together, so most of a wave's steps have all of them and no prefill. Each
request of a load has its own random prompt, the same in every wave: a prefix cache then spares the prefill of
all waves but the first, and the requests still read different keys and values.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tqdm import tqdm

from specplug.cost_fit import median, verify_groups
from specplug.profiling import Limits
from specplug.step_log import read_steps

ANSWER_TOKENS = 64  # of a request: the context of its steps stays near the prompt's length
TOKEN_IDS = (16, 256)  # of random prompts; every vocabulary has them, and special tokens are elsewhere
RARE = 10  # times rarer than the commonest kind of step: what an answer's end leaves room for; not waited for
REQUEST_SECONDS = 600.0


class Load(NamedTuple):
    """One traffic."""

    context: int  # tokens of every prompt
    requests: int  # in flight


class Model(NamedTuple):
    """What a server says of the model it serves."""

    name: str
    max_model_len: int | None  # tokens of prompt and answer


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI server of one model."""

    url: str

    def model(self) -> Model:
        """The served model. Raises RuntimeError where nothing answers."""
        card = self._call("/v1/models", None)["data"][0]
        return Model(card["id"], card.get("max_model_len"))

    def complete(self, body: dict[str, Any]) -> None:
        """Run one completion to its end. Raises RuntimeError, with the server's own words, otherwise."""
        self._call("/v1/completions", body)

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url.rstrip("/") + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")
            raise RuntimeError(f"{self.url}{path}: the server answered {error.code}: {detail}") from None
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{self.url}{path}: no answer: {error}") from None


def drive(
    endpoint: Endpoint, loads: Sequence[Load], folder: Path, limits: Limits, *, progress: bool, seed: int = 0
) -> int:
    """Put every load on the engine until the medians of its steps are settled; the loads left unsettled.

    ``folder`` is where the engine records. Time is shared out evenly over the loads that are left; one that
    the log has settled already is not put on again. Raises RuntimeError when the engine refuses a request or
    does not record.
    """
    model, unsettled, began = endpoint.model().name, 0, time.monotonic()
    contexts = sorted({load.context for load in loads})
    with tqdm(total=len(loads), disable=not progress, unit="load") as bar:
        for number, load in enumerate(loads):
            bar.set_description(f"{load.requests} requests, context {load.context}")
            share = (limits.seconds - (time.monotonic() - began)) / (len(loads) - number)
            settled = _settled(folder, load, contexts, limits)
            if not settled and share > 0:
                settled = _put(
                    endpoint, model, load, folder, contexts, limits, seconds=share, seed=seed + number
                )
            unsettled += not settled
            bar.update()
    return unsettled


def _put(
    endpoint: Endpoint,
    model: str,
    load: Load,
    folder: Path,
    contexts: Sequence[int],
    limits: Limits,
    *,
    seconds: float,
    seed: int,
) -> bool:
    """Keep a load on for about ``seconds``; whether it settled."""
    random, before = Random(seed), len(read_steps(folder))
    bodies = [
        {
            "model": model,
            "prompt": [random.randrange(*TOKEN_IDS) for _ in range(load.context)],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(load.requests)
    ]
    ends, settled = time.monotonic() + seconds, False
    pool = ThreadPoolExecutor(load.requests)
    try:
        while not settled and time.monotonic() < ends:
            for _ in pool.map(endpoint.complete, bodies):
                pass
            settled = _settled(folder, load, contexts, limits)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, ending the server ends the requests
    if len(read_steps(folder)) == before:
        raise RuntimeError(
            f"{folder}: the engine answered and logged no step there; start it with explore and record"
        )
    return settled


def _settled(folder: Path, load: Load, contexts: Sequence[int], limits: Limits) -> bool:
    """Whether every kind of step of this load that the log has is known, and there are several kinds."""
    groups = verify_groups(read_steps(folder), contexts=contexts, requests=[load.requests])
    mine = [members for key, members in groups.items() if contexts[key.context] == load.context]
    usual = max(map(len, mine), default=0) / RARE
    common = [median([s.verify_seconds for s in members]) for members in mine if len(members) > usual]
    return len(common) > 1 and all(
        one.settled(spread=limits.spread, least=limits.least, most=limits.most) for one in common
    )
