"""A Triton backend named `cpu` that never compiles: kernels run in Triton's interpreter, which needs no
backend.

vLLM only asks that such a backend exists. Triton loads `.compiler` and `.driver` of the package the entry
point names.
"""
