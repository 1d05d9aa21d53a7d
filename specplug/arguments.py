"""Checks of arguments that several commands have, before their work starts."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def check_new_file(flag: str, file: Path) -> None:
    """Raise ValueError where a file is there already, or where none can be made in its folder."""
    if file.exists():
        raise ValueError(f"{flag} {file}: exists already; name another file or delete it")
    if not file.parent.is_dir():
        raise ValueError(f"{flag} {file}: expected a folder {file.parent} to write to, found none; make it")
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"{flag} {file}: expected a folder that can be written, got {file.parent} ({error.strerror}); "
            "name a file in another one"
        ) from None


def check_device(name: str | None) -> None:
    """Raise ValueError for a device that this torch cannot use; None is the default, which it can."""
    if name is None or name == "cpu":
        return
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: expected cpu or cuda, got {name}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, got {name}")
    if device.type == "cuda" and not torch.cuda.is_available():
        why = "torch finds no GPU here" if torch.backends.cuda.is_built() else "this torch has no CUDA"
        raise ValueError(f"--device: expected cpu, got {name}: {why}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: expected one of {torch.cuda.device_count()} GPUs, got {name}")


def check_sampling(
    temperature: float, top_p: float, *, names: tuple[str, str] = ("--temperature", "--top-p")
) -> None:
    """Raise ValueError, by the name, for a temperature or a top-p that no engine takes."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"{names[0]}: expected 0 or more, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"{names[1]}: expected above 0, at most 1, got {top_p}")


def positions(config: Mapping[str, Any]) -> int | None:
    """Those of a target's config; None where it does not say."""
    return (config.get("text_config") or config).get("max_position_embeddings")


def check_positions(
    config: Mapping[str, Any], prompts: Mapping[str, Sequence[Sequence[int]]], max_tokens: int
) -> None:
    """Raise ValueError for a prompt whose answer may not fit into the positions of the target's config."""
    limit = positions(config)
    for name, rows in prompts.items():
        longest = max(map(len, rows))
        if limit is not None and longest + max_tokens > limit:
            raise ValueError(
                f"data set {name}: a prompt of {longest} tokens and --max-tokens {max_tokens} exceed the "
                f"target's {limit} positions; lower --max-tokens or leave the prompt out"
            )
