"""One run of `specplug bench`: every arm's server in turn, every load on it, the file written after a cell.

The plain arm comes first and keeps its answers, with which the others are compared. A server starts only for
what is not measured yet, so a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tqdm import tqdm

from specplug import bench_arms, bench_law, bench_load, bench_prompts, bench_quality, server, sglang_server
from specplug.bench_machine import Peak
from specplug.bench_prompts import Prompt
from specplug.bench_quality import Answer, Asked
from specplug.bench_result import (
    Arm,
    BenchResult,
    Cell,
    Load,
    Quality,
    Repeat,
    SetLength,
    Settings,
    write_result,
)

WAVES = 4  # requests a load by default: so many times its concurrency, so that its ends weigh little
OPEN_LOOP_SECONDS = 30  # and so many seconds of arrivals
WARM_TOKENS = 16  # of a request before a cell: past the first drafts
OPEN_LOOP_WARM = 4  # requests before a cell of an arrival rate


@dataclass
class Bench:
    """What a run needs; ``result`` grows."""

    result: BenchResult
    loads: Sequence[Load]
    prompts: Sequence[Prompt]
    requests: int | None  # of a load; None = see `requests_of`
    tokenizer: str  # folder of the target's
    folder: Path  # logs, the generator's files and the answers
    out: Path

    @property
    def settings(self) -> Settings:
        return self.result.settings

    def run(self) -> None:
        """Measure what is missing. Raises RuntimeError naming the arm where a server or a load fails."""
        self.folder.mkdir(exist_ok=True)
        if not self.result.cells:  # what an earlier run of this name left
            for kind in ("greedy", "sampled"):
                self._answers(kind).unlink(missing_ok=True)
        missing = {arm.name: self._missing(arm) for arm in self.result.arms}
        runs = sum(map(len, missing.values())) * self.settings.repeats
        with tqdm(total=runs, unit="run") as bar:
            for arm in self.result.arms:
                if missing[arm.name] or self._quality_missing(arm):
                    try:
                        self._measure(arm, missing[arm.name], bar)
                    except RuntimeError as error:
                        raise RuntimeError(
                            f"arm {arm.name}: {error}\nWhat is measured is in {self.out}; --resume goes on"
                        ) from None

    def _missing(self, arm: Arm) -> list[Load]:
        return [load for load in self.loads if self.result.cell(arm.name, load) is None]

    def _measure(self, arm: Arm, loads: Sequence[Load], bar: tqdm) -> None:
        port, log = server.free_port(), self.folder / f"{arm.name}.log"
        environment = environment_of(self.settings.engine, arm, on_gpu=self.settings.on_gpu)
        bar.set_description(f"{arm.name}: starting")
        command = bench_arms.started(arm, port)
        with server.running(command, port=port, log=log, environment=environment) as started:
            started.wait_ready(arm.name)
            model = json.loads(started.get("/v1/models"))["data"][0]["id"]
            asked = Asked(started, self.settings.engine, model)
            for load in loads:
                cell = self._cell(arm, load, asked, environment, bar)
                self._write(cells=[*self.result.cells, cell])
            if self._quality_missing(arm):
                bar.set_description(f"{arm.name}: quality")
                self._judge(arm, asked)

    def _cell(self, arm: Arm, load: Load, asked: Asked, environment: dict[str, str], bar: tqdm) -> Cell:
        prompts = bench_prompts.cycled(self.prompts, self.requests_of(load))
        warm = load.concurrency or OPEN_LOOP_WARM
        asked.warm(
            [prompt.text for prompt in prompts[:warm]], max_tokens=min(WARM_TOKENS, self.settings.max_tokens)
        )
        repeats = []
        with Peak(asked.server.process.pid, on_gpu=self.settings.on_gpu) as peak:
            for number in range(self.settings.repeats):
                bar.set_description(f"{arm.name}, {load}, {number + 1} of {self.settings.repeats}")
                repeats.append(self._repeat(arm, load, prompts, asked, environment, number))
                bar.update()
        return Cell(
            arm=arm.name,
            load=load,
            repeats=repeats,
            peak_host_bytes=peak.host_bytes,
            peak_device_bytes=peak.device_bytes,
            date=now(),
        )

    def _repeat(
        self, arm: Arm, load: Load, prompts: Sequence[Prompt], asked: Asked, env: dict[str, str], number: int
    ) -> Repeat:
        s = self.settings
        name = f"{arm.name}-{str(load).replace(' ', '-').replace('/', '-')}-{number + 1}"
        reader = bench_prompts.reader(s.engine, self.prompts, s.max_tokens)
        data = bench_prompts.write(reader, s.engine, prompts, self.folder / f"prompts-{len(prompts)}")
        output = self.folder / f"{name}.json"
        output.unlink(missing_ok=True)  # SGLang's generator appends
        generator = bench_load.command(
            s.engine,
            load,
            data,
            url=asked.server.url,
            model=asked.model,
            tokenizer=self.tokenizer,
            requests=len(prompts),
            max_tokens=s.max_tokens,
            ignore_eos=s.ignore_eos,
            temperature=s.temperature,
            top_p=s.top_p,
            seed=s.seed + number,
            output=output,
            extra=s.bench_args,
        )
        before = bench_load.Counted(asked.server.get("/metrics"))
        bench_load.run(generator, environment=env, log=self.folder / f"{name}.log", serving=asked.server)
        after = bench_load.Counted(asked.server.get("/metrics"))
        repeat = bench_load.read(output, requests=len(prompts))
        if not arm.speculative:
            return repeat
        counted = bench_load.rounds(
            s.engine, before, after, answers=repeat.completed, output_tokens=repeat.output_tokens
        )
        return msgspec.structs.replace(repeat, rounds=counted)

    def requests_of(self, load: Load) -> int:
        """Requests of one repeat: every prompt at least once, and enough for the load."""
        if self.requests is not None:
            return self.requests
        least = (
            WAVES * load.concurrency if load.concurrency else math.ceil(OPEN_LOOP_SECONDS * (load.rate or 0))
        )
        return max(least, len(self.prompts))

    def _answers(self, kind: str) -> Path:
        return self.folder / f"baseline-{kind}.json"

    def _quality_missing(self, arm: Arm) -> bool:
        if not self.settings.quality_prompts and not self.settings.samples:
            return False
        if arm.name != self.result.baseline:
            return all(one.arm != arm.name for one in self.result.quality)
        if all(not self._quality_missing(one) for one in self.result.arms if one.name != arm.name):
            return False
        wanted = {"greedy": self.settings.quality_prompts, "sampled": self.settings.samples}
        return any(number and not self._answers(kind).is_file() for kind, number in wanted.items())

    def _judge(self, arm: Arm, asked: Asked) -> None:
        s = self.settings
        baseline = arm.name == self.result.baseline
        agreement = distribution = None
        lengths: list[SetLength] = []
        if s.quality_prompts:
            answers, lengths = self._greedy(arm, asked)
            if baseline:
                bench_quality.save(answers, self._answers("greedy"))
            else:
                agreement = bench_quality.agreement(
                    bench_quality.load_greedy(self._answers("greedy")), answers, near_tie=s.near_tie_nats
                )
        if s.samples:
            few = [prompt.text for prompt in self.prompts[: bench_quality.SAMPLE_PROMPTS]]
            temperature = s.temperature or 1.0
            samples = asked.sampled(few, samples=s.samples, temperature=temperature)
            if baseline:
                bench_quality.save(samples, self._answers("sampled"))
            else:
                distribution = bench_law.compare(
                    bench_quality.load_sampled(self._answers("sampled")),
                    samples,
                    positions=bench_quality.POSITIONS,
                    temperature=temperature,
                )
        if not baseline:
            judged = Quality(arm=arm.name, agreement=agreement, distribution=distribution, lengths=lengths)
            self._write(quality=[*self.result.quality, judged])

    def _greedy(self, arm: Arm, asked: Asked) -> tuple[list[Answer], list[SetLength]]:
        """An answer a prompt, in order; one data set after the other, to count each one's rounds."""
        s = self.settings
        lengths: list[SetLength] = []
        prompts = self.prompts[: s.quality_prompts]
        found: dict[int, Answer] = {}
        for name in dict.fromkeys(prompt.data_set for prompt in prompts):
            places = [place for place, prompt in enumerate(prompts) if prompt.data_set == name]
            before = bench_load.Counted(asked.server.get("/metrics"))
            answers = asked.greedy(
                [prompts[place].text for place in places],
                max_tokens=s.max_tokens,
                ignore_eos=s.ignore_eos,
                top=arm.name == self.result.baseline,
            )
            after = bench_load.Counted(asked.server.get("/metrics"))
            found |= dict(zip(places, answers, strict=True))
            tokens = sum(len(answer.ids) for answer in answers)
            counted = bench_load.rounds(s.engine, before, after, answers=len(answers), output_tokens=tokens)
            length = counted.accepted_length
            lengths.append(SetLength(data_set=name, answers=len(answers), accepted_length=length))
        return [found[place] for place in range(len(prompts))], lengths if arm.speculative else []

    def _write(self, **changed: object) -> None:
        self.result = msgspec.structs.replace(self.result, **changed)
        write_result(self.result, self.out)


def environment_of(engine: str, arm: Arm, *, on_gpu: bool) -> dict[str, str]:
    """What a server and its load generator run with: the caller's, the rig's on a CPU, the arm's own."""
    start = sglang_server.environment if engine == "sglang" else server.engine_environment
    # The generators ask a proxy, where one is set, even for this machine.
    direct = {
        name: f"{os.environ.get(name, '')},{server.HOST}".lstrip(",") for name in ("no_proxy", "NO_PROXY")
    }
    return {**start(on_gpu=on_gpu), **direct, **arm.environment}


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
