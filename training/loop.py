"""What every training run has in common: the schedule, the step, the log, and the command line."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

__all__ = ["Learning", "Paced", "command", "schedule", "write_plan"]

log = logging.getLogger("training")

KEPT = 0.98  # of the running mean of a figure, at every step


class Paced(Protocol):
    """What a plan says of its steps."""

    @property
    def steps(self) -> int:
        """How many there are, if it does not stop before."""

    @property
    def rate(self) -> float:
        """The highest learning rate."""

    @property
    def warmup(self) -> int:
        """After how many steps it is reached."""

    @property
    def weight_decay(self) -> float:
        """Of AdamW."""


PlanType = TypeVar("PlanType", bound=Any)


def schedule(step: int, warmup: int, steps: int) -> float:
    """Linear warm-up, then cosine to a fiftieth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.02 + 0.98 * (1 + float(torch.cos(torch.tensor(done * torch.pi)))) / 2


class Learning:
    """AdamW along the schedule, with gradients clipped to a norm of 1, and a log of running means.

    Attributes:
        last: after which step it ends: `plan.stop` where a plan has one, else `plan.steps`.
        done: how many steps were taken.
    """

    def __init__(
        self, plan: Paced, parameters: Iterable[nn.Parameter], *, decayed: bool = True, logged: int = 100
    ) -> None:
        """Begin.

        Args:
            plan: steps, rate, warm-up and weight decay.
            parameters: what learns.
            decayed: whether the weight decay reaches parameters of one axis (biases, norms), too.
            logged: after how many steps there is a line in the log.
        """
        self.plan, self.logged = plan, logged
        self.last: int = getattr(plan, "stop", 0) or plan.steps
        self.done = 0
        self._parameters = list(parameters)
        groups = [{"params": self._parameters, "weight_decay": plan.weight_decay}]
        if not decayed:
            flat = [parameter for parameter in self._parameters if parameter.ndim < 2]
            deep = [parameter for parameter in self._parameters if parameter.ndim >= 2]
            groups = [{"params": deep, "weight_decay": plan.weight_decay}, {"params": flat, "weight_decay": 0.0}]
        self._optimiser = torch.optim.AdamW(groups, plan.rate, (0.9, 0.98))
        self._running: dict[str, float] = {}
        self._started = time.monotonic()

    def step(self, parts: Mapping[str, torch.Tensor], weights: Mapping[str, float]) -> None:
        """Take one step.

        Args:
            parts: parts of the loss, and figures that are only logged.
            weights: of the parts that count; those that are missing this time are left out.
        """
        for group in self._optimiser.param_groups:
            group["lr"] = self.plan.rate * schedule(self.done, self.plan.warmup, self.plan.steps)
        loss = sum((weight * parts[name] for name, weight in weights.items() if name in parts), torch.zeros(()))
        self._optimiser.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimiser.step()
        self.done += 1
        for name, value in parts.items():
            self._running[name] = KEPT * self._running.get(name, value.item()) + (1 - KEPT) * value.item()
        if self.done % self.logged == 0:
            figures = " ".join(f"{name} {value:.3f}" for name, value in self._running.items())
            log.info("step %d  %s  (%.0f s)", self.done, figures, time.monotonic() - self._started)

    def due(self, every: int, *, after: int = 0) -> bool:
        """Whether it is time to save and measure: every so many steps behind the first ones, and at the end."""
        behind = self.done - after
        return self.done == self.last or (behind > 0 and behind % every == 0)


def write_plan(plan: Any, out: Path) -> None:
    """Write every number of a run beside its weights."""
    (out / "plan.json").write_text(json.dumps(asdict(plan), indent=2) + "\n", encoding="utf-8")


def command(
    about: str | None,
    plans: Mapping[str, PlanType],
    train: Callable[[PlanType, Path], None],
    arguments: Sequence[str] | None = None,
) -> None:
    """The command line of a module that trains: which run, where to, and every number of its plan as an option.

    Args:
        about: what the module says of itself.
        plans: the runs by name; a single one need not be named.
        train: trains by a plan into a folder.
        arguments: in place of those that the program was called with.
    """
    parser = argparse.ArgumentParser(description=about)
    names = list(plans)
    parser.add_argument("--run", choices=names, required=len(names) > 1, default=names[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    for name, default in asdict(plans[names[0]]).items():
        if name != "model" and isinstance(default, (int, float, str)):
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default))
    given = vars(parser.parse_args(arguments))
    out, threads, plan = given.pop("out"), given.pop("threads"), plans[given.pop("run")]
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(message)s",
        handlers=[logging.StreamHandler(), logging.FileHandler(out / "train.log", mode="w")],
    )
    train(replace(plan, **{name: value for name, value in given.items() if value is not None}), out)
