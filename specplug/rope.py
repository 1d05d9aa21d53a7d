"""Rotary position embedding as a config states it, in either of its two spellings.

    transformers 4   "rope_theta": 1e6, "rope_scaling": null | {"rope_type" or "type": "yarn", ...}
    transformers 5   "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", ...}

Both give the same cos/sin table where they give the same ``Rope``. Readers that know one spelling alone fall
back to their default theta without a word, and the draft's attention is then off at every distance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Rope(NamedTuple):
    """What the table is computed from."""

    theta: float | None  # base of the frequencies; None = the config does not say, readers take a default
    kind: str  # "default", "linear", "yarn", "llama3", ...
    scaling: tuple[tuple[str, Any], ...]  # the kind's other parameters, sorted by name


def read_rope(config: Mapping[str, Any], name: str) -> Rope:
    """The one reading of all present keys. ``config`` is a model config; a speculators wrapper nests it.

    Raises ValueError, beginning with ``name``, where the spellings disagree, for parameters per layer type
    (Gemma 4), and for a theta that is no positive number.
    """
    found: list[tuple[str, Rope]] = []
    parameters = config.get("rope_parameters")
    if parameters is not None:
        if not isinstance(parameters, Mapping):
            raise ValueError(f"{name}: rope_parameters: expected an object, got {type(parameters).__name__}")
        nested = sorted(key for key, value in parameters.items() if isinstance(value, Mapping))
        if nested:
            raise ValueError(
                f"{name}: rope_parameters: expected one set for all layers, got one for each type: "
                f"{', '.join(nested)}"
            )
        found.append(("rope_parameters", _rope(parameters, parameters.get("rope_theta"), name)))
    scaling = config.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ValueError(f"{name}: rope_scaling: expected an object or null, got {type(scaling).__name__}")
    if config.get("rope_theta") is not None or scaling is not None:
        found.append(("rope_theta and rope_scaling", _rope(scaling or {}, config.get("rope_theta"), name)))
    if not found:
        return Rope(None, "default", ())
    thetas = {rope.theta for _, rope in found if rope.theta is not None}
    # A top-level theta beside rope_parameters is common and says nothing about scaling.
    first = found[0][1]
    if len(thetas) > 1 or (scaling is not None and any(rope[1:] != first[1:] for _, rope in found)):
        raise ValueError(
            f"{name}: {found[0][0]} and {found[1][0]} disagree ({found[0][1]} against {found[1][1]}); "
            "keep the one that the draft was trained with"
        )
    return first._replace(theta=next(iter(thetas), None))


def _rope(parameters: Mapping[str, Any], theta: Any, name: str) -> Rope:
    if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0):
        raise ValueError(f"{name}: rope_theta: expected a positive number, got {theta!r}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    rest = {key: value for key, value in parameters.items() if key not in ("rope_theta", "rope_type", "type")}
    return Rope(None if theta is None else float(theta), str(kind), tuple(sorted(rest.items())))
