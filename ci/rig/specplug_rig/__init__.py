"""CPU rig: vLLM's model runner V2 under Triton's interpreter. Tests and demo only, never a dependency of
specplug.
"""
