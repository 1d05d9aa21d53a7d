"""The driver half of the `cpu` backend: one device, one stream, nothing to launch."""

from collections.abc import Callable, Sequence

import torch
from triton.backends import driver
from triton.backends.compiler import GPUTarget


class _DeviceProperties:
    """What vLLM and Triton read to size launches. The interpreter ignores them; they only need to be
    plausible.
    """

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 1 << 20,
            "multiprocessor_count": 2,
            "max_num_regs": 65536,
            "warpSize": 32,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }


class InterpreterDriver(driver.DriverBase):
    """Active whenever it is visible (see `specplug_rig.activate`)."""

    def __init__(self) -> None:
        self.utils = _DeviceProperties()

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "void*"

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Sequence[float]]:
        def run_once(kernel_call: Callable[[], None], **_: object) -> Sequence[float]:
            kernel_call()
            return [1.0, 1.0, 1.0]

        return run_once

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: torch.Tensor) -> None:
        pass
