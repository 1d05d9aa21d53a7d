"""A recipe as text: what `specplug recipe show` prints, commands ready to paste."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from specplug.recipe import Expectation, Model, Recipe, resolve
from specplug.recipe_shelf import Shelved

PORT = 8000  # in the printed commands


def lines(shelved: Shelved) -> Iterator[str]:
    recipe = shelved.recipe
    yield f"{recipe.name} ({recipe.status}, {recipe.date})"
    yield f"{recipe.summary}\n"
    for name, value in _facts(recipe):
        yield f"{name:13} {value}"
    for arm in recipe.arms:
        command, added = resolve(recipe, arm, folder=shelved.folder, port=PORT)
        settings = "".join(f"{name}={shlex.quote(value)} " for name, value in added.items())
        yield f"\narm {arm.name}:\n  {settings}{shlex.join(command)}"
    yield f"\nmeasured by:\n  specplug recipe run {recipe.name}"
    for one in recipe.expectations:
        yield f"\nexpected of {one.arm}, {one.concurrency} in flight:"
        yield from (f"  {line}" for line in _expected(one))
    for source in recipe.sources:
        yield f"\npublished, not measured here: {source.what}\n  {source.quote!r}\n  {source.url}"
    for issue in recipe.known_issues:
        yield f"\nknown upstream: {issue.text}\n  {issue.url}"


def _facts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    engine, software, serving = recipe.engine, recipe.software, recipe.serving
    yield "engine", f"{engine.name} {engine.version} ({engine.distribution or engine.image})"
    unknown = "not known"
    cuda = software.cuda or ("none" if recipe.device.kind == "cpu" else unknown)
    yield (
        "software",
        f"specplug {software.specplug}, Python {software.python}, torch {software.torch or unknown}, "
        f"triton {software.triton or unknown}, CUDA {cuda}",
    )
    yield "device", f"{recipe.device.count} x {recipe.device.name}"
    yield "target", _model(recipe.target)
    if recipe.draft is not None:
        draft = recipe.draft
        yield "draft", f"{_model(draft)}, {draft.kind}"
        if draft.layout is not None:
            layers = draft.target_layer_ids
            yield "draft layout", f"{draft.layout}, depth {draft.depth}, target layers {layers}"
    yield "serving", f"{serving.dtype}, {serving.attention_backend}, {serving.graph_mode}, {serving.parallel}"
    sampling, data = recipe.sampling, recipe.dataset
    yield "sampling", f"temperature {sampling.temperature:g}, at most {sampling.max_tokens} tokens"
    thinking = {None: "has no thinking switch", True: "thinking", False: "not thinking"}[recipe.chat.thinking]
    yield "chat", f"template: {recipe.chat.template or 'none'}; {thinking}"
    yield "prompts", f"{data.count} each of {', '.join(data.kinds)} from {data.name}"


def _model(model: Model) -> str:
    if model.revision is not None:
        return f"{model.model} at {model.revision}"
    return f"{model.model} ({'with hashes' if model.sha256 else 'no revision pinned'})"


def _expected(one: Expectation) -> Iterator[str]:
    if one.accepted_length_bonus_counted is not None:
        length, tolerance = one.accepted_length_bonus_counted, one.accepted_length_tolerance
        yield f"accepted length {length:g} +- {tolerance:g} (bonus counted)"
    if one.output_tokens_per_second is not None:
        low, high = one.output_tokens_per_second
        yield f"output tokens/s {low:g} to {high:g}"
    by = one.measured_by
    yield f"measured {by.date} on {by.machine}, {by.runs} run(s)"
