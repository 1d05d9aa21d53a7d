"""CPU rig: stock SGLang's speculative decoding without a GPU and without the compiled sgl_kernel. Tests and
demo only, never a dependency of specplug.
"""
