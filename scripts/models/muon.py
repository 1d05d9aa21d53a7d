"""Optimiser of both trainings: Muon (Jordan et al., 2024) for the matrices, AdamW for everything else."""

from collections.abc import Iterable

import torch
from torch import nn

MUON_RATE = 0.02
ADAM_RATE = 3e-3
WARM_UP_STEPS = 20
FLOOR = 0.02  # factor of the learning rate at the end


class MuonAdamW:
    """Both optimisers under one rate: linear warm-up, constant for `hold` of the steps, then linear decay."""

    def __init__(self, module: nn.Module, steps: int, hold: float = 0.4) -> None:
        matrices, self.rest = split(module)
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(self.rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.module, self.steps, self.hold, self.done = module, steps, hold, 0

    def step(self) -> None:
        """One update from the gradients in place, which are then dropped."""
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0)
        factor = rate_factor(self.done, self.steps, self.hold)
        self.muon.step(MUON_RATE * factor)
        self.adam.param_groups[0]["lr"] = ADAM_RATE * factor
        self.adam.step()
        self.module.zero_grad(set_to_none=True)
        self.done += 1


class Muon:
    """Momentum, then an orthogonalised update."""

    def __init__(self, matrices: Iterable[torch.Tensor], momentum: float = 0.95) -> None:
        self.matrices, self.momentum = list(matrices), momentum
        self.buffers = [torch.zeros_like(matrix) for matrix in self.matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update of every matrix that has a gradient."""
        for matrix, buffer in zip(self.matrices, self.buffers, strict=True):
            if matrix.grad is None:
                continue
            buffer.lerp_(matrix.grad, 1 - self.momentum)
            update = orthogonalised(matrix.grad.lerp(buffer, self.momentum))
            matrix.add_(update, alpha=-rate * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)


def rate_factor(step: int, steps: int, hold: float) -> float:
    """Factor of the learning rate at a 0-based step."""
    done = step / steps
    decay = 1.0 if done < hold else max(FLOOR, (1 - done) / (1 - hold))
    return min(1.0, (step + 1) / WARM_UP_STEPS) * decay


def split(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices for Muon, the rest for AdamW); embeddings and the small heads belong to the rest."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        small = any(word in name for word in ("embed", "markov", "confidence"))
        (matrices if parameter.dim() == 2 and not small else rest).append(parameter)
    return matrices, rest


def orthogonalised(gradient: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """About the nearest matrix with orthonormal rows or columns: a quintic Newton-Schulz iteration."""
    x = gradient / (gradient.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x
