"""Repairs of Triton 3.9's interpreter, where it differs from compiled Triton.

- `tl.dot` on bfloat16 multiplies the raw bit patterns (bf16 is stored as uint16): both operands are widened
  to fp32 first.
- masks that are not boolean arrays are refused: integers in `tl.load`, and what `and` of two scalars gives.
- `tl.device_assert` and overflow checks are off unless asked for.
- every call of a device function rebuilds the patched `tl` that its kernel already runs under, a third of the
  time of vLLM's sampling kernels: once a launch is enough.

`install()` from a conftest, after TRITON_INTERPRET=1 is set and before a kernel is imported. Not repaired:
`a and b` on tensors evaluates to b (write `&`), and autotuning over several configurations fails.
"""

import dataclasses

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install(*, device_asserts: bool = False) -> None:
    """Repair the interpreter of this process; idempotent. `device_asserts` also turns on asserts and
    overflow checks.
    """
    builder = interpreter.InterpreterBuilder
    if not getattr(builder, "_specplug_rig", False):
        builder._specplug_rig = True
        builder.create_dot = _widening_dot(builder.create_dot)
        builder.create_masked_load = _boolean_mask(builder.create_masked_load, position=1)
        builder.create_masked_store = _boolean_mask(builder.create_masked_store, position=2)
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    if device_asserts:
        options = interpreter.interpreter_builder.options
        interpreter.interpreter_builder.options = dataclasses.replace(options, debug=True)


def _once_a_launch(plain):
    """Skip patching `tl` for a device function while its kernel's own patch is in place."""
    patched: set[int] = set()  # ids of the language modules that the running launch has patched

    def patch_lang(fn):
        languages = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if languages and languages <= patched:
            return interpreter._LangPatchScope()
        scope = plain(fn)
        if not patched:
            patched.update(languages)
            restore = scope.restore

            def end_of_launch():
                patched.clear()
                restore()

            scope.restore = end_of_launch
        return scope

    return patch_lang


def _widening_dot(plain):
    def create_dot(self, a, b, accumulator, *rest):
        return plain(self, _bf16_to_fp32(a), _bf16_to_fp32(b), accumulator, *rest)

    return create_dot


def _bf16_to_fp32(handle):
    """bf16 is the upper half of fp32: shift the stored uint16 up by 16 bits and reinterpret."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.view(np.uint16).astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _boolean_mask(plain, *, position: int):
    """Wrap a builder method whose positional argument `position` (self not counted) is the mask."""

    def wrapped(self, *args, **kwargs):
        mask = args[position]
        if mask is not None and mask.data.dtype != np.bool_:
            boolean = interpreter.TensorHandle(mask.data.astype(np.bool_), tl.int1)
            args = (*args[:position], boolean, *args[position + 1 :])
        return plain(self, *args, **kwargs)

    return wrapped
