"""The compiler half of the `cpu` backend. Reaching it means a kernel escaped the interpreter: say so."""

from typing import NoReturn

from triton.backends import compiler


class InterpreterCompiler(compiler.BaseBackend):
    """Supports the target `cpu` and refuses every compilation."""

    @staticmethod
    def supports_target(target: compiler.GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "specplug-rig-interpreter"

    def parse_options(self, options: dict[str, object]) -> NoReturn:
        self._refuse()

    def add_stages(self, stages: dict[str, object], options: object, language: object) -> NoReturn:
        self._refuse()

    def load_dialects(self, context: object) -> NoReturn:
        self._refuse()

    def get_module_map(self) -> dict[str, object]:
        return {}

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            "a Triton kernel was about to be compiled for the rig's `cpu` backend, which only stands in "
            "while kernels are "
            "interpreted; set TRITON_INTERPRET=1 before the module that defines the kernel is imported"
        )
