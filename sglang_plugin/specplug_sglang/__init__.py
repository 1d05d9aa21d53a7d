"""specplug's SGLang adapter: ``--speculative-algorithm DDTREE`` on a stock SGLang, and DSPARK with our
budget.

It translates and does not compute: the mathematics is in :mod:`specplug`. Every SGLang name it relies on is a
row of :data:`specplug_sglang.hooks.HOOKS`. Importing this package imports neither SGLang nor torch.
"""
