"""specplug's vLLM adapter: `{"method": "ddtree"}` on a stock vLLM.

It translates and does not compute: the mathematics is in :mod:`specplug`. Every vLLM name it relies on is a
row of :data:`specplug_vllm.hooks.HOOKS`. Importing this package imports neither vLLM nor torch.
"""
