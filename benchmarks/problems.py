"""What the measurements have in common: problems to run, and the machine they ran on."""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm
from handspan.core.data import FederatedData
from handspan.core.method import Setting
from handspan.core.task import Task
from handspan.models.convert import task_from_module
from handspan.models.zoo import make_model
from handspan.numerics.local_work import LocalWork
from handspan.registry import parse


@dataclass(frozen=True)
class Problem:
    """A method on a federation, ready to run."""

    algorithm: Algorithm
    data: FederatedData
    task: Task | None


def make_problem(
    method: str,
    data: FederatedData,
    *,
    cohort: int,
    model: str | None = None,
    work: LocalWork | None = None,
) -> Problem:
    """Build a method for a federation; without a model, a matrix problem."""
    sample = data.x.values if not isinstance(data.x, Tensor) else data.x
    task = None
    if model is not None:
        task = task_from_module(
            make_model(model, data.row_shape, data.num_classes or 1),
            num_outputs=data.num_classes,
            dtype=sample.dtype,
            device=sample.device,
        )
    setting = Setting(
        task=task,
        work=work or LocalWork(),
        num_clients=data.num_clients,
        cohort=cohort,
        rounds=1000,
        row_shape=data.row_shape,
        dtype=sample.dtype,
        device=sample.device,
    )
    return Problem(parse(method).build(setting), data, task)


def equal_clients(x: Any, y: Tensor | None, num_clients: int, classes: int | None) -> FederatedData:
    """Give each client the same number of consecutive rows, all of them for training."""
    count = torch.full((num_clients,), len(x) // num_clients)
    count[: len(x) % num_clients] += 1
    none = torch.zeros_like(count)
    return FederatedData(
        x=x,
        y=y,
        offsets=torch.cat([count.new_zeros(1), count.cumsum(0)]),
        num_train=count,
        num_validation=none,
        num_test=none,
        num_classes=classes,
    )


def synthetic_images(num_clients: int, rows: int, device: str = "cpu") -> FederatedData:
    """Images of MNIST's shape: brightness patterns of ten classes, in noise."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (num_clients * rows,), generator=generator)
    patterns = torch.rand(10, 28, 28, generator=generator)
    x = torch.empty(len(y), 28, 28)
    for part, label in zip(x.split(rows), y.split(rows), strict=True):  # no copies of the whole
        torch.add(
            0.5 * patterns[label], torch.rand(part.shape, generator=generator), alpha=0.5, out=part
        )
    return equal_clients(x.to(device), y.to(device), num_clients, 10)


def describe_machine(device: str = "cpu") -> str:
    """What the numbers were measured on, when, and at which commit."""
    name = torch.cuda.get_device_name() if device != "cpu" else _processor()
    return (
        f"{datetime.date.today()}  {name}, {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f})  "
        f"torch {torch.__version__}  Python {platform.python_version()}  commit {_commit()}"
    )


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def judge(*claims: tuple[str, str, bool]) -> int:
    """Print what was measured, what it has to be and whether it is; 1 if any claim fails."""
    for measured, bar, holds in claims:
        print(f"{measured:<44}{bar:<20}{'ok' if holds else 'MISSED'}", flush=True)
    return int(not all(holds for _, _, holds in claims))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_apart(module: str, *arguments: str) -> dict[str, Any]:
    """Run ``python -m module arguments`` and parse the JSON of its last line.

    Peak memory belongs to a process, so what is compared by it runs in processes of its own.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])
