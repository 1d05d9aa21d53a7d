"""specplug.rope: both spellings of the same table read as the same; contradictions are refused."""

from typing import Any

import pytest

from specplug.rope import Rope, read_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"rope_theta": 1e6, "rope_scaling": None},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        ),
        ({"rope_theta": 1000000}, {"rope_parameters": {"rope_theta": 1e6}}),
        ({"rope_theta": 1e6, "rope_scaling": YARN}, {"rope_parameters": YARN | {"rope_theta": 1e6}}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
        ),
    ],
)
def test_two_spellings_one_rope(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read_rope(old, "draft") == read_rope(new, "draft") == read_rope(old | new, "draft")
    other = {"rope_parameters": new["rope_parameters"] | {"rope_theta": 5e5}}
    assert read_rope(old, "draft") != read_rope(other, "draft")  # the control
    with pytest.raises(ValueError, match="draft: rope_parameters and rope_theta and rope_scaling disagree"):
        read_rope(old | other, "draft")


def test_what_is_not_said_stays_unsaid() -> None:
    assert read_rope({}, "draft") == Rope(None, "default", ())
    assert read_rope({"rope_theta": 1e6, "rope_parameters": YARN}, "draft").theta == 1e6
    assert read_rope({"rope_theta": 1e6, "rope_parameters": YARN}, "draft").kind == "yarn"


def test_transformers_computes_the_same_table_from_both() -> None:
    """What a reader of both spellings computes: equal tables exactly where our reading is equal."""
    transformers = pytest.importorskip("transformers")
    import torch
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    def table(**keys: Any) -> torch.Tensor:
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "num_hidden_layers": 1}
        config = transformers.Qwen3Config.from_dict(sizes | keys)
        cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1, 1), torch.arange(64)[None])
        return torch.cat((cos, sin), -1)

    old, new = {"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert torch.equal(table(**old), table(**new))
    assert not torch.equal(table(**old), table(rope_theta=1e4))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": 0}, "rope_theta: expected a positive number, got 0"),
        ({"rope_theta": "1e6"}, "rope_theta: expected a positive number"),
        ({"rope_theta": True}, "rope_theta: expected a positive number"),
        ({"rope_parameters": []}, "rope_parameters: expected an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling: expected an object or null"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
            "got one for each type: full_att",
        ),
        ({"rope_theta": 1e6, "rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6}}, "disagree"),
    ],
)
def test_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope(config, "draft")
