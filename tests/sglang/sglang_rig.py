"""Real SGLang engines under the CPU rig, and one stock SGLang without specplug to compare with.

An engine's model runs in processes of its own; what a test wants to see inside comes through `Engine.state`,
and what it wants to break through a file that the rig runs in every one of them (`load`). They also read
environment variables, which are therefore arguments of :func:`engine` and :func:`serve`, restored at the end.

Not called engine_rig: the core's test run sees this folder and that of vLLM in one process.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from specplug import models

MAX_RUNNING = 8
DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "dtype": "float32",
    "mem_fraction_static": 0.5,
    "max_total_tokens": 8192,
    "max_running_requests": MAX_RUNNING,
    "chunked_prefill_size": 512,
    "grammar_backend": "none",
    "skip_server_warmup": True,
    "random_seed": 0,
}

Prompt = Sequence[int]


class Output(NamedTuple):
    """What one request returned. Log-probabilities: a position each, the tokens' own, and the top tokens'."""

    ids: list[int]
    finish: str
    matched: int | str | None  # the stop token or string
    cached: int  # prompt tokens taken from the radix cache
    verifies: int  # target forwards that verified drafts for this request
    retractions: int
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[float, int]]] | None
    meta: dict[str, Any]  # SGLang's meta_info, whole

    @property
    def end(self) -> tuple[Any, Any]:
        return self.finish, self.matched


class Engine:
    """One SGLang, its front end in this process."""

    def __init__(self, sglang: Any) -> None:
        self.sglang = sglang

    def generate(
        self, prompts: Sequence[Prompt], params: Mapping[str, Any] | list[dict[str, Any]], **kwargs: Any
    ) -> list[Output]:
        """Outputs in the order of ``prompts``; ``params``: sampling parameters for all, or one a prompt."""
        return _generate(self.sglang, prompts, params, **kwargs)

    async def stream(self, prompt: Prompt, params: dict[str, Any], *, rid: str) -> AsyncIterator[Output]:
        """Outputs so far, as they grow."""
        chunks = await self.sglang.async_generate(
            input_ids=list(prompt), sampling_params=params, rid=rid, stream=True
        )
        async for chunk in chunks:
            yield _output(chunk)

    def abort(self, rid: str) -> None:
        """Every request whose id starts with ``rid``: that is SGLang's rule."""
        self.sglang.tokenizer_manager.abort_request(rid=rid)

    def run(self, coroutine: Any) -> Any:
        return self.sglang.loop.run_until_complete(coroutine)

    def flush(self) -> None:
        """Empty the radix cache."""
        assert self.sglang.flush_cache().success

    @property
    def state(self) -> dict[str, Any]:
        """SGLang's internal state (/server_info), with specplug's part under its own key."""
        return self.sglang.get_server_info()["internal_states"][0]


def accepted_length(outputs: Sequence[Output]) -> float:
    """Tokens a target forward committed, the bonus token counted."""
    return sum(len(output.ids) - 1 for output in outputs) / sum(output.verifies for output in outputs)


def counts(output: Output) -> dict[str, int]:
    """What meta_info says of a request's rounds, held against SGLang's own counts of the same request."""
    own = output.meta["specplug"]
    rounds = {shape: own[f"rounds_{shape}"] for shape in ("plain", "chain", "tree")}
    assert sum(rounds.values()) == output.verifies
    histogram = output.meta.get("spec_cap_lens_histogram")  # rounds by rows; not there where chains are whole
    if histogram:
        nodes = sum((rows - 1) * number for rows, number in enumerate(histogram))
        assert (own["nodes_verified"], rounds["plain"]) == (nodes, histogram[1])
    return {**rounds, "nodes": own["nodes_verified"]}


def tree(draft: str, budget: int, *, name: str = "quick", **flags: Any) -> dict[str, Any]:
    """Flags of DDTREE; ``budget`` nodes a request, so windows of one row more."""
    return {
        "speculative_algorithm": "DDTREE",
        "speculative_draft_model_path": str(models.path(name, draft)),
        "speculative_num_draft_tokens": budget + 1,
        **flags,
    }


def dspark(*, name: str = "quick", **flags: Any) -> dict[str, Any]:
    """Flags of SGLang's own DSPARK."""
    path = str(models.path(name, "dspark"))
    return {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": path, **flags}


@contextlib.contextmanager
def engine(
    flags: Mapping[str, Any] | None = None,
    *,
    name: str = "quick",
    overlap: bool = False,
    env: Mapping[str, str] | None = None,
    load: Path | None = None,
    **settings: Any,
) -> Iterator[Engine]:
    """An engine in fp32 over the set ``name``; ``flags`` and ``settings`` are SGLang's own.

    ``env``: variables of its processes. ``load``: a file that the rig runs in each of them.
    """
    import sglang

    variables = {**(env or {}), **({"SPECPLUG_RIG_SGLANG_LOAD": str(load)} if load else {})}
    with mock.patch.dict(os.environ, variables):
        running = sglang.Engine(**_settings(flags, name, overlap=overlap, **settings))
        try:
            yield Engine(running)
        finally:
            _shut_down(running)
            atexit.unregister(running.shutdown)


def _shut_down(running: Any) -> None:
    """End one engine. SGLang's own way kills every child of this process, so also those of an engine that a
    fixture keeps; its watchdog then takes this process along.
    """
    from sglang.srt.entrypoints import engine as entry

    kill, watchdog = entry.kill_process_tree, running.tokenizer_manager._subprocess_watchdog
    own = [process.pid for process in watchdog._processes]

    def kill_own(*args: Any, **kwargs: Any) -> None:
        for pid in own:
            kill(pid)

    with mock.patch.object(entry, "kill_process_tree", kill_own):
        running.shutdown()


# SGLang finds a free port in the parent and binds it in a child, seconds later. Workers of xdist, whose
# random numbers may start alike, and the reference of each (this file as a program) look in their own places.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw4")[2:])
_ports = itertools.count(22000 + 1500 * _WORKER + (700 + os.getpid() % 800 if __name__ == "__main__" else 0))


def _settings(flags: Mapping[str, Any] | None, name: str, *, overlap: bool, **more: Any) -> dict[str, Any]:
    own = {
        "model_path": str(models.path(name, "target")),
        "disable_overlap_schedule": not overlap,
        "nccl_port": next(_ports),
    }
    return {**DEFAULTS, **own, **(flags or {}), **more}


def _generate(sglang: Any, prompts: Sequence[Prompt], params: Any, **kwargs: Any) -> list[Output]:
    asked = [list(prompt) for prompt in prompts]
    results = sglang.generate(input_ids=asked, sampling_params=params, **kwargs)
    return [_output(result) for result in results]


def _output(result: dict[str, Any]) -> Output:
    meta = result["meta_info"]
    finish, top = meta["finish_reason"] or {}, meta.get("output_top_logprobs")
    logprobs = meta.get("output_token_logprobs")
    return Output(
        ids=result["output_ids"],
        finish=finish.get("type", ""),
        matched=finish.get("matched"),
        cached=meta["cached_tokens"],
        verifies=meta.get("spec_verify_ct", 0),
        retractions=meta["num_retractions"],
        logprobs=[value for value, *_ in logprobs] if logprobs else None,
        top_logprobs=[[(value, token) for value, token, *_ in place or ()] for place in top] if top else None,
        meta=meta,
    )


class Reference:
    """Stock SGLang without specplug, in a process of its own; answers are kept for the session.

    Plain decoding unless ``flags`` say otherwise, and no overlap: under it penalties come a token late.
    The process is nobody's child: an engine that shuts down kills all children of its process.
    """

    def __init__(
        self, flags: Mapping[str, Any] | None = None, *, env: Mapping[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="specplug-reference-")
        self._log = Path(self._folder.name) / "log"
        address = self._folder.name + "/socket"
        variables = {
            "SGLANG_PLUGINS": "specplug_rig",
            **(env or {}),
        }  # SGLang's whitelist leaves specplug out
        with Listener(address, "AF_UNIX") as listener, self._log.open("wb") as log:
            subprocess.run(
                ["sh", "-c", '"$@" &', "sh", sys.executable, __file__, address],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
                check=True,
            )
            listener._listener._socket.settimeout(120)  # type: ignore[attr-defined]
            try:
                self._process = listener.accept()
            except TimeoutError:
                raise RuntimeError(f"the reference did not start: {self._log.read_text()[-3000:]}") from None
        self._process.send({"grammar_backend": "xgrammar", **(flags or {})})
        self._answers: dict[tuple[str, str, str], Output] = {}

    def generate(
        self, prompts: Sequence[Prompt], params: Any, *, name: str = "quick", **kwargs: Any
    ) -> list[Output]:
        """As :meth:`Engine.generate`, over the set ``name``."""
        each = list(params) if isinstance(params, list) else [params] * len(prompts)
        keys = [
            (name, json.dumps(list(prompt)), json.dumps([wanted, kwargs], sort_keys=True))
            for prompt, wanted in zip(prompts, each, strict=True)
        ]
        missing = [i for i, key in enumerate(keys) if key not in self._answers]
        if missing:
            self._process.send((name, [prompts[i] for i in missing], [each[i] for i in missing], kwargs))
            try:
                answers = self._process.recv()
            except EOFError:
                raise RuntimeError(f"the reference died: {self._log.read_text()[-3000:]}") from None
            self._answers.update(
                (keys[i], Output(*answer)) for i, answer in zip(missing, answers, strict=True)
            )
        return [self._answers[key] for key in keys]

    def close(self) -> None:
        self._process.close()
        self._folder.cleanup()


def _answer_all(address: str) -> None:
    """The reference's process: one engine at a time, until the other side closes."""
    running: dict[str, Engine] = {}  # by model set
    with Client(address, "AF_UNIX") as questions, contextlib.ExitStack() as engines:
        flags = questions.recv()
        with contextlib.suppress(EOFError):
            while True:
                name, prompts, params, kwargs = questions.recv()
                if name not in running:
                    engines.close()
                    running = {name: engines.enter_context(engine(flags, name=name))}
                questions.send([tuple(one) for one in running[name].generate(prompts, params, **kwargs)])


class Server(NamedTuple):
    """A running HTTP server."""

    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The open response: `json.load` it, or read its lines as they come."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=60)


@contextlib.contextmanager
def serve(
    flags: Mapping[str, Any] | None = None,
    *,
    log: Path,
    name: str = "quick",
    overlap: bool = True,
    env: Mapping[str, str] | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """`python -m sglang.launch_server` as a user starts it, its output in ``log``."""
    process, url = launch(flags, log=log, name=name, overlap=overlap, env=env, **settings)
    try:
        while not _healthy(url):
            assert process.poll() is None, (
                f"the server ended with {process.returncode}: {log.read_text()[-3000:]}"
            )
            time.sleep(0.5)
        yield Server(url, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def launch(
    flags: Mapping[str, Any] | None = None,
    *,
    log: Path,
    name: str = "quick",
    overlap: bool = True,
    env: Mapping[str, str] | None = None,
    **settings: Any,
) -> tuple[subprocess.Popen[bytes], str]:
    """The server's process, in a group of its own, and its URL; what it does is up to the caller."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
    for flag, value in _settings(flags, name, overlap=overlap, **settings).items():
        if value is not False:
            command += [f"--{flag.replace('_', '-')}", *([] if value is True else [str(value)])]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    return process, f"http://127.0.0.1:{port}"


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=10) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


if __name__ == "__main__":
    _answer_all(sys.argv[1])
