"""Kinds of mistakes seen in other speculative decoders, and the tests that keep each out of ours on SGLang.

fault_classes.txt has the lines of tests/vllm/fault_classes.txt with the answers for SGLang. What no other
file tests is tested below, named after its class. No engine is started.
"""

import functools
import json
import logging
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from doc_blocks import DOCUMENTS
from fault_table import Check, checks, fault

from specplug import models, sglang_server
from specplug.checkpoint import read_draft
from specplug.cost import read_cost_table
from specplug.hook_table import package_root
from specplug.planning import choose_policy
from specplug.recipe import resolve
from specplug.recipe_shelf import find, folders
from specplug.serving import CHAIN, serving
from specplug.step_log import EngineFacts

pytestmark = pytest.mark.sglang

TABLE = checks("sglang")
TARGET = str(models.path("quick", "target"))
path_of = functools.partial(models.path, "quick")
CPU = ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--disable-cuda-graph"]


@pytest.mark.parametrize("one", TABLE, ids=str)
def test_every_fault_has_tests_or_a_reason(one: Check):
    assert fault(one) == ""


def test_no_line_of_vllms_table_is_missing():
    assert [one[:2] for one in TABLE] == [one[:2] for one in checks("vllm")]


def resolved(*flags):
    """SGLang's arguments after its own resolution, plugins loaded; ValueError where they are refused."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    arguments = prepare_server_args(["--model-path", TARGET, *CPU, *flags])
    arguments.resolve_once()
    return resolved_view(arguments)


@pytest.fixture
def changed(tmp_path):
    """A copy of the shipped DSpark draft whose config.json is what a function makes of it."""

    def write(change):
        folder = shutil.copytree(path_of("dspark"), tmp_path / "draft")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(change(config)))
        return folder

    return write


def wrapped(config):
    """As the speculators library writes it: sizes one level down, layers counted from the embedding."""
    own = ("block_size", "mask_token_id", "markov_rank", "markov_head_type", "architectures",
           "enable_confidence_head", "confidence_head_with_markov")  # fmt: skip
    layers = [i + 1 for i in config["target_layer_ids"]]
    return {key: config[key] for key in own if key in config} | {
        "speculators_model_type": "dspark", "model_type": config["model_type"], "sample_from_anchor": True,
        "transformer_layer_config": {key: value for key, value in config.items() if key not in own},
        "aux_hidden_state_layer_ids": layers, "draft_vocab_size": config["vocab_size"],
    }  # fmt: skip


def test_a_a_config_that_sglang_would_read_otherwise_is_refused(changed):
    """SGLang itself takes it, finds no layer ids in it and captures others."""
    plain = read_draft(path_of("dspark"))
    draft = changed(wrapped)
    assert read_draft(draft).target_layer_ids == plain.target_layer_ids
    tree = "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path"
    with pytest.raises(ValueError, match="speculators_model_type wraps the config, and SGLang reads neither"):
        resolved(*tree, str(draft))
    assert resolved(*tree, str(plain.path)).speculative_num_draft_tokens == 17


def test_a_a_trained_mask_row_that_sglang_does_not_read_is_said_at_the_start(tmp_path, capfd):
    draft = shutil.copytree(path_of("dflash"), tmp_path / "draft")
    flags = "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(draft)

    def said():
        resolved(*flags)
        return f"{draft}: SGLang does not read mask_embedding.pt" in capfd.readouterr().err

    assert not said()
    (draft / "mask_embedding.pt").write_bytes(b"a pickle that nobody opens")
    assert said()


def chains(draft):
    """Tokens a round in vLLM, and the flags of SGLang, of the chains that ``specplug inspect`` prints."""
    ways = serving(read_draft(draft), model=str(draft), target=TARGET)
    vllm, sglang = (shlex.split(way.command) for way in ways if way.way == CHAIN)
    return json.loads(vllm[vllm.index("--speculative-config") + 1])["num_speculative_tokens"], sglang[5:]


@pytest.mark.parametrize("kind", ["dspark", "dflash", "fill-in dspark"])
def test_b_a_block_drafts_as_many_tokens_on_both_engines(changed, kind):
    """K in vLLM is K + 1 rows in SGLang: as we print it, and as SGLang reads a checkpoint where no flag tells
    it; but of a fill-in DSpark block SGLang would draft one token more than it has."""
    fill_in = kind == "fill-in dspark"
    draft = changed(lambda one: {**one, "sample_from_anchor": False}) if fill_in else path_of(kind)
    tokens, flags = chains(draft)
    assert tokens == read_draft(draft).block_size - (kind != "dspark")
    assert resolved(*flags).speculative_num_draft_tokens == tokens + 1
    told = flags.index("--speculative-num-draft-tokens")
    assert resolved(*flags[:told]).speculative_num_draft_tokens == tokens + 1 + fill_in


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_b_a_tree_has_as_many_nodes_on_both_engines(kind):
    """tree_budget B in vLLM is B + 1 rows in SGLang; the depth is the checkpoint's on both."""
    from specplug_sglang.config import Flags, resolve

    flags = sglang_server.tree_flags(path_of(kind), budget=20)
    asked = resolved(*(str(word) for name, value in flags.items() for word in (f"--{name}", value)))
    chosen = resolve(Flags.of(asked, TARGET))
    assert (chosen.budget, chosen.depth) == (20, read_draft(path_of(kind)).depth)
    assert asked.speculative_num_draft_tokens == 21


@pytest.mark.parametrize(
    ("asked", "seeded", "served"),
    [({}, True, False), ({"top_k": 1}, True, True), ({}, False, True)],
    ids=["sampled", "greedy", "no seeds"],
)
def test_e_a_seed_that_dspark_would_not_honour_is_refused(monkeypatch, asked, seeded, served):
    from specplug_sglang import admission, config, dspark

    monkeypatch.setattr(config, "active", lambda: False)
    monkeypatch.setattr(dspark, "upgraded", lambda: True)
    monkeypatch.setattr(admission, "_seeded", lambda: seeded)
    params = SimpleNamespace(**{"min_p": 0.0, "top_p": 1.0, "top_k": 50, **asked})
    reason = admission.validate(lambda req, overlap: None, SimpleNamespace(sampling_params=params), True)
    assert (reason is None) == served
    assert served or "without the request's seed" in reason


SHELF = [find(folder.name) for folder in folders() if folder.name.startswith("sglang")]
ARMS = [
    pytest.param(one, arm, id=f"{one.folder.name}-{arm.name}")
    for one in SHELF
    for arm in one.recipe.arms
    if "{cost_table}" in arm.command
]


@pytest.mark.parametrize(("shelved", "arm"), ARMS)
def test_n_the_table_of_a_recipe_passes_every_check_of_the_start(monkeypatch, shelved, arm):
    """SGLang's parser and resolution, ours, and at the start's end the comparison with the running engine."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.dspark_components.dspark_sps import load_sps_table_from_path

    from specplug_sglang import dspark
    from specplug_sglang.argument_check import accept

    command, environment = resolve(shelved.recipe, arm, folder=shelved.folder, port=1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    load_plugins()
    stages = []
    accept(command, stages.append)
    assert stages == ["parsed", "config accepted"]
    path = command[command.index("--speculative-dspark-sps-table-path") + 1]
    assert len(load_sps_table_from_path(path).sample_batch_tokens) > 1
    view = SimpleNamespace(
        speculative_dspark_sps_table_path=path,
        speculative_draft_model_path="draft",
        speculative_dspark_confidence_sts_path=None,
    )
    facts = EngineFacts(engine="sglang", engine_version="0.5.23", device="another machine")
    policy = choose_policy(
        dspark.options(view), facts, budget=7, depth=7, trees=False, logger=logging.getLogger("specplug.test")
    )
    assert policy.reason == "", "the table says nothing, and nothing is trimmed"
    assert read_cost_table(path).provenance.engine == "sglang"


def test_n_every_recipe_with_a_table_names_it_in_an_arm():
    assert {one.values[0].folder for one in ARMS} == {one.folder for one in SHELF if one.recipe.cost_table}
    assert ARMS


ALIKE = [
    *("is_some", "is_none", "is_speculative", "is_eagle", "is_eagle3", "is_frozen_kv_mtp", "is_dflash"),
    *("is_uno", "is_dspark", "is_dflash_family", "is_standalone", "is_ngram", "need_topk", "has_draft_kv"),
    *("supports_target_verify_for_draft", "supports_ragged_verify", "carries_draft_hidden_states"),
]
# What DSPARK overlaps, or mixes into one step, and DDTREE does one after the other.
LESS = ["supports_grammar_overlap", "supports_prefill_shared_read_done", "supports_mixed_chunk"]


def test_r_every_predicate_of_sglang_is_answered_on_purpose():
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    ours, stock = (SpeculativeAlgorithm.from_string(name) for name in ("DDTREE", "DSPARK"))
    asked = {name for name in vars(SpeculativeAlgorithm) if name.startswith(("is_", "supports_"))}
    assert asked <= {*ALIKE, *LESS}, "SGLang has a new predicate: decide what DDTREE answers"
    assert {name: getattr(ours, name)() for name in ALIKE} == {name: getattr(stock, name)() for name in ALIKE}
    assert [(getattr(ours, name)(), getattr(stock, name)()) for name in LESS] == [(False, True)] * len(LESS)
    with pytest.raises(ValueError, match="reserved"):
        SpeculativeAlgorithm.register("DSPARK")


# Files of SGLang that ask for DSPARK by its name, past every predicate, and why DDTREE loses nothing there.
BY_NAME = {
    "arg_groups/attention_hook.py": "recurrent layers, which trees refuse",
    "arg_groups/deepseek_v4_hook.py": "a target with MLA, which trees refuse",
    "arg_groups/hicache_hook.py": "the hierarchical cache, which trees refuse",
    "arg_groups/kimi_k3_hook.py": "a target with recurrent layers",
    "arg_groups/kv_cache_hook.py": "4-bit caches and the unified pool, which trees refuse",
    "arg_groups/lora_hook.py": "LoRA, which trees refuse",
    "arg_groups/model_overrides/kimi_k3.py": "a target with recurrent layers",
    "arg_groups/model_overrides/minimax_m3.py": "a target whose own checks refuse another algorithm",
    "arg_groups/model_overrides/nemotron_h.py": "a target with recurrent layers",
    "arg_groups/speculative_hook.py": "disaggregation and block verification, which trees refuse",
    "arg_groups/validation_hook.py": "pipelines, which trees refuse, and features without a draft",
    "configs/model_config.py": "drafts inside other checkpoints, which trees cannot read",
    "disaggregation/utils.py": "disaggregation, which trees refuse",
    "managers/scheduler_components/metrics_reporter.py": "a reading for a socket that is off by default",
    "mem_cache/kv_cache_configurator.py": "recurrent layers, which trees refuse",
    "speculative/dspark_components/dspark_draft.py": "the draft's own input, which ours inherits",
    "speculative/dspark_components/dspark_worker_v2.py": "a label in its log, which ours inherits",
    "speculative/spec_info.py": "the enumeration itself",
    "speculative/spec_utils.py": "relays hidden states where a draft hands some on; ours hands on none",
}


def test_r_where_sglang_asks_for_a_name_ddtree_needs_no_answer():
    root = package_root("sglang") / "srt"
    name = re.compile(r"""["']DSPARK["']|SpeculativeAlgorithm\.DSPARK""")
    asking = [path for path in root.rglob("*.py") if name.search(path.read_text(encoding="utf-8"))]
    assert {path.relative_to(root).as_posix() for path in asking} == set(BY_NAME)


BY_HAND = re.compile(
    r"(import|from) specplug_(vllm|sglang)|load_(general_)?plugins|\bregister\(|ModelRegistry|HookRegistry|"
    r"SpeculativeAlgorithm\.|register_(model|algorithm)"
)


def scripts_that_register(text):
    """Lines that would load the plugin in the reader's own process: an engine's processes never see it."""
    return [line for line in text.splitlines() if BY_HAND.search(line)]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_r_no_document_registers_the_plugin_in_a_script(file: Path):
    assert scripts_that_register(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "from specplug_sglang.plugin import register",
        "specplug_vllm.plugin.register()",
        "load_general_plugins()",
        'ModelRegistry.models["x"] = Draft',
        '@SpeculativeAlgorithm.register("X")',
    ],
)
def test_r_a_script_that_does_is_found(line):
    assert scripts_that_register(f"text\n{line}\ntext") == [line]


def test_u_a_draft_of_another_target_is_refused():
    draft = str(models.path("deep-thin", "dspark"))
    with pytest.raises(ValueError, match="was not made for this target"):
        resolved("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", draft)
