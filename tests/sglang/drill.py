"""Run by the rig in every process of a server: takes one of DDTREE's hooks away before SGLang applies them,
in the launcher or in the scheduler alone, as SPECPLUG_TEST_DRILL says. SGLang itself says nothing of it."""

import multiprocessing
import os

from sglang.srt.plugins.hook_registry import HookRegistry

child = multiprocessing.parent_process() is not None
if child == (os.environ["SPECPLUG_TEST_DRILL"] == "scheduler"):
    del HookRegistry._hooks["sglang.srt.speculative.dspark_components.dspark_config.resolve_runtime_config"]
