"""Which rows each step of each client sees, in which order: pure functions of a key.

A client's plan is the same alone, in any cohort, under any padding and on any engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Phase, Stage
from handspan.core.data import FederatedData
from handspan.simulation import profile

_LARGEST = torch.iinfo(torch.int64).max
# Clients whose row counts differ by less than this share a padded shape: at most a quarter of the
# rows of a group are padding, and the shape depends on the cohort alone, never on the block size.
_LEAST_FILL = 0.75
_LEAST_FILL_ROUNDED = 0.8  # where widths are rounded up on top of it


@dataclass(frozen=True)
class StagePlan:
    """Batches of one stage for a block of clients.

    Attributes
    ----------
    rows
        (c, steps or 1, width) positions inside the client's part of the store.
    weight
        (c, steps or 1, width) 1 for real rows, 0 for padding (which repeats a real row).
    keys
        (c, steps) key of each step.
    num_steps
        (c,) steps of each client, on the CPU.
    is_constant
        Whether all steps see the same rows: then the second axis has length 1.
    is_full
        (steps or 1,) whether no row of a step is padding, as far as is known; on the CPU.
    """

    rows: Tensor
    weight: Tensor
    keys: Tensor
    num_steps: Tensor
    is_constant: bool
    is_full: Tensor

    def select(self, index: Tensor) -> StagePlan:
        """Plans of the clients at ``index``."""
        there = index.to(self.rows.device, non_blocking=True)
        return StagePlan(
            self.rows[there],
            self.weight[there],
            self.keys[there],
            self.num_steps[index],
            self.is_constant,
            self.is_full,
        )

    @property
    def steps(self) -> int:
        """Steps of the longest client."""
        return int(self.num_steps.max()) if len(self.num_steps) else 0


@dataclass(frozen=True)
class Block:
    """Clients that run together, and their plans, one per stage.

    Ids and counts are on the CPU, where shapes are decided; the plans' numbers are where the
    rows are.
    """

    ids: Tensor
    num: Tensor  # (c,) training rows
    plans: tuple[StagePlan, ...]
    longest: int  # training rows of the longest client that shares the padded shape
    is_alone: bool  # a single client, whose padded shape nobody shares, however blocks are cut

    def select(self, index: Tensor) -> Block:
        """Some of its clients, or all in another order."""
        plans = tuple(plan.select(index) for plan in self.plans)
        return replace(self, ids=self.ids[index], num=self.num[index], plans=plans, is_alone=False)


def batch_rows(stage: Stage, num: Tensor) -> Tensor:
    """Rows of a full batch of each client: all rows when there are fewer than asked for."""
    return num if stage.batch_size is None else num.clamp(max=stage.batch_size)


def step_counts(stage: Stage, num: Tensor) -> Tensor:
    """Steps of each client in a stage."""
    width = batch_rows(stage, num).clamp(min=1)
    per_pass = (num + width - 1) // width
    if stage.steps is not None:
        return torch.where(num > 0, stage.steps, 0)
    return per_pass * (1 if stage.epochs is None else stage.epochs)


def count_rows(stage: Stage, num: Tensor) -> int:
    """Rows that a stage passes through the model, over the given clients."""
    width = batch_rows(stage, num).clamp(min=1)
    per_pass = (num + width - 1) // width
    steps = step_counts(stage, num)
    passes = torch.where(num > 0, steps // per_pass.clamp(min=1), 0)
    rest = (steps - passes * per_pass) * width  # a cut pass has no short batch
    return round(int((passes * num + rest).sum()) * stage.models)


def plan_stage(stage: Stage, num: Tensor, base: Tensor, k: Tensor, width: int) -> StagePlan:
    """Plan one stage for a block of clients.

    Parameters
    ----------
    num, base
        (c,) rows of each client that the stage may use, and where they begin; on the CPU.
    k
        (c,) keys; the plan is made on their device, with the same numbers on all.
    width
        Padded rows of a batch, at least that of every client.
    """
    count, size = step_counts(stage, num), batch_rows(stage, num)
    is_whole, longest, steps = size == num, int(num.max()), max(1, int(count.max()))
    per_pass = (num + size.clamp(min=1) - 1) // size.clamp(min=1)
    passes = max(1, int(((count + per_pass - 1) // per_pass.clamp(min=1)).max()))
    is_full = _are_full(num, size, per_pass, steps, width)
    sizes = torch.stack([num, base, size, per_pass, is_whole.long()])
    num, base, size, per_pass, whole = sizes.to(k.device, non_blocking=True).unsqueeze(2)
    step = torch.arange(steps, device=k.device)
    place = torch.arange(width, device=k.device)
    step_keys = keys.fold(k.unsqueeze(1), step)
    if bool(is_whole.all()):  # every batch holds all rows: stored order
        real = place < num
        rows = torch.where(real, place, 0) + base
        return StagePlan(rows.unsqueeze(1), real.unsqueeze(1), step_keys, count, True, is_full[:1])
    order = _permutations(k, num, passes, longest, whole.bool())
    turn = step // per_pass.clamp(min=1)  # (c, steps): which pass
    first = (step - turn * per_pass) * size
    position = first.unsqueeze(2) + place  # (c, steps, width)
    real = (place < size.unsqueeze(2)) & (position < num.unsqueeze(2))
    index = torch.where(real, turn.clamp(max=passes - 1).unsqueeze(2) * longest + position, 0)
    rows = order.gather(1, index.flatten(1)).view_as(index)
    rows = torch.where(real, rows, 0) + base.unsqueeze(2)
    return StagePlan(rows, real, step_keys, count, False, is_full)


def _are_full(num: Tensor, size: Tensor, per_pass: Tensor, steps: int, width: int) -> Tensor:
    """Which steps have no padding: all clients fill the width, and none is at its last batch."""
    if not bool((size == width).all()):
        return torch.zeros(steps, dtype=torch.bool)
    turn = torch.arange(steps) % per_pass.unsqueeze(1)
    return ((turn + 1) * width <= num.unsqueeze(1)).all(0)


def _permutations(k: Tensor, num: Tensor, passes: int, longest: int, in_order: Tensor) -> Tensor:
    """Fresh permutation of each client's rows for each pass, (c, passes * longest)."""
    place = torch.arange(longest, device=k.device)
    pass_keys = keys.fold(k.unsqueeze(1), "pass", torch.arange(passes, device=k.device))
    draw = keys.bits(pass_keys, (longest,)) & _LARGEST
    draw = torch.where(in_order.unsqueeze(2), place, draw)
    draw = torch.where(place < num.unsqueeze(2), draw, _LARGEST)  # padding goes last
    return draw.argsort(dim=2, stable=True).flatten(1)


def groups(num: Tensor, measure: Tensor | None = None, least: float = _LEAST_FILL) -> list[Tensor]:
    """Positions of clients that share a padded shape, longest first.

    The grouping depends on the cohort alone, so that numbers do not depend on the block size.
    ``measure`` is what must be similar, where it is not the number of rows: it grows with it.
    """
    if not len(num):
        return []
    order = num.argsort(descending=True, stable=True)
    sizes = (num if measure is None else measure)[order].tolist()
    cuts, head = [0], sizes[0]
    for position, size in enumerate(sizes):
        if size < least * head:
            cuts.append(position)
            head = size
    cuts.append(len(sizes))
    return [order[a:b] for a, b in pairwise(cuts)]


def rounded_up(count: int) -> int:
    """Room for so many: few different numbers, eight between a power of two and the next."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit


@dataclass(frozen=True)
class Part:
    """Clients of a block before it is planned."""

    ids: Tensor
    widths: tuple[int, ...]  # padded rows of a batch, for each stage
    longest: int
    is_alone: bool


class Blocks:
    """Blocks of a phase's clients, in an order that depends on the cohort alone.

    Parameters
    ----------
    phase, ids, data
        What is run, and by whom.
    k
        Key of the plans.
    block_size
        Clients of a block.
    ends
        Where blocks end in any case: numbers of clients, in the order of the blocks.
    device
        Where plans are made; on the CPU by default.
    few_shapes
        Whether shapes should come again rather than be narrow: clients share a block wherever
        their batches are equally wide, and other widths are rounded up.
    """

    def __init__(
        self,
        phase: Phase,
        ids: Tensor,
        data: FederatedData,
        k: Tensor,
        block_size: int,
        ends: Sequence[int] = (),
        device: torch.device | None = None,
        few_shapes: bool = False,
    ) -> None:
        self._phase, self._data, self._key, self._device = phase, data, k, device
        self._spans = [data.span(stage.rows) for stage in phase.stages]
        self.parts: list[Part] = []
        num, first = data.num_train[ids], 0
        self._is_rounded = few_shapes and int(num.min()) < int(num.max())
        for group in self._groups(num) if few_shapes else groups(num):
            members = ids[group]
            widths = tuple(
                self._width(stage, span[1][members])
                for stage, span in zip(phase.stages, self._spans, strict=True)
            )
            longest, last = int(num[group].max()), first + len(members)
            cuts = sorted({first, last, *(end for end in ends if first < end < last)})
            for begin, end in pairwise(cuts):
                for start in range(begin - first, end - first, block_size):
                    stop = min(start + block_size, end - first)
                    self.parts.append(Part(members[start:stop], widths, longest, len(group) == 1))
            first = last

    def _groups(self, num: Tensor) -> list[Tensor]:
        """Clients whose batches are about equally wide, however many steps they make."""
        widest = [stage.batch_size for stage in self._phase.stages if stage.batch_size is not None]
        if not widest or len(widest) < len(self._phase.stages):  # a stage of all rows, or per row
            return groups(num, least=_LEAST_FILL_ROUNDED)
        return groups(num, num.clamp(max=max(widest)), _LEAST_FILL_ROUNDED)

    def _width(self, stage: Stage, num: Tensor) -> int:
        """Padded rows of a batch."""
        width = max(1, int(batch_rows(stage, num).max()))
        if not self._is_rounded or width == stage.batch_size:
            return width
        return rounded_up(width)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Block]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Block:
        with profile.part("plan"):
            return self._plan(self.parts[index])

    def _plan(self, part: Part) -> Block:
        ids = part.ids.to(self._device or part.ids.device, non_blocking=True)
        plans = tuple(
            plan_stage(
                stage,
                count[part.ids],
                base[part.ids],
                keys.fold(self._key, self._phase.name, place, ids),
                width,
            )
            for place, (stage, (base, count), width) in enumerate(
                zip(self._phase.stages, self._spans, part.widths, strict=True)
            )
        )
        num = self._data.num_train[part.ids]
        return Block(part.ids, num, plans, part.longest, part.is_alone)
