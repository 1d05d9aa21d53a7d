"""A decoding loop over Hugging Face Transformers: oracle of the tests, engine of ``specplug evaluate``.

noise       sampling noise keyed by (seed, position)
target      any causal language model of full attention, over a preallocated KV cache
draft       the DFlash or DSpark block forward, over its own cache of context
method      how a block becomes a tree: chain, tree, and two trees to compare with
loop        plain and speculative decoding of a batch
prompts, library                    what is asked
evaluation, records, figures, report   every method on every prompt, and what came of it

Only ``target`` and ``draft`` import transformers (extra ``specplug[local]``); nothing else of specplug does.
"""
