"""What the server of span sends, adds up and decides."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Model, Reduced
from handspan.core.data import Population, Round
from handspan.core.method import Setting
from handspan.core.records import Params, map_tensors, stack
from handspan.numerics.averaging import ModelBroadcast, ModelState, parts
from handspan.numerics.local_work import LocalWork
from handspan.numerics.low_rank import apply_map, gram, spectrum
from handspan.numerics.mixture import Centres, merged, moved, one_centre, split, updated
from handspan.numerics.spanning.canonical import canonical, sizes
from handspan.numerics.spanning.clients import Parts
from handspan.numerics.spanning.records import (
    CutBroadcast,
    JudgeBroadcast,
    ServeBroadcast,
    SpanBroadcast,
    SpanServer,
    SpanSums,
    WeighBroadcast,
)
from handspan.numerics.spanning.schedule import COMMON, PERSONAL, Schedule
from handspan.numerics.trials import Verdict, verdict

OWN = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Candidates for the weight of a client's own v; ties go to the first."""
APART = (6.0, 4.0, 2.8, 0.0)
"""Candidates for the inner standard deviations by which two centres are apart; 0 merges none."""
_PERSONAL_LEAD, _COMMON_LEAD = 0.9, 0.5  # shares of the other's loss that end a race early
_MISSED = 2.0  # standard errors by which dropped directions must be missed to come back
_LEAST_TO_SPLIT = 4.0  # clients, remembered ones included
_MEMORY = 0.8  # of the moments
_RIDGE = 1e-8  # of U^T U, relative to its mean diagonal


class SpanDecisions:
    """The functions of the server, bound to one problem."""

    def __init__(self, setting: Setting, made: Parts, schedule: Schedule) -> None:
        self.setting, self.made, self.schedule = setting, made, schedule
        self.work: LocalWork = setting.work

    def init(self, key: Tensor, population: Population) -> SpanServer:
        """Every direction is a fresh head."""
        made, width, device = self.made, self.made.width, self.setting.device
        params, buffers = made.task.init(key)
        names = (keys.fold(key, "direction", j) for j in range(width))
        starts = [parts(made.task.init(name)[0], made.names)[0] for name in names]
        offset, body = parts(params, made.names)
        if not made.offset:
            offset = {k: torch.zeros_like(p) for k, p in offset.items()}
        common = Model(params=params, buffers=buffers)

        def number(value: float) -> Tensor:
            return torch.tensor(value, dtype=torch.float64)

        cuts = len(self.schedule.cuts)
        return SpanServer(
            common=common,
            average=map_tensors(torch.zeros_like, common),
            averaged=number(0.0),
            body=body,
            buffers=buffers,
            basis=stack([offset, *starts]),  # type: ignore[list-item]
            moments=torch.eye(1 + width, dtype=torch.float64, device=device),
            centres=one_centre(made.groups, width, device),
            matrices=torch.zeros(cuts, width, width, dtype=torch.float64, device=device),
            shifts=torch.zeros(cuts, width, dtype=torch.float64, device=device),
            num_cuts=torch.tensor(0),
            mode=torch.tensor(self.schedule.first_mode),
            rank=torch.tensor(width),
            temperature=number(0.0),
            own=number(1.0),
            weighed=torch.tensor(0),
        )

    def rate(self, round: Round) -> Tensor:
        """Step size of the round."""
        return self.work.rate(round, self.setting.rounds, self.setting.scalar)

    # -- one model for all -------------------------------------------------------------------

    def common(self, server: SpanServer, round: Round) -> ModelBroadcast:
        """Send the model for all."""
        return ModelBroadcast(
            params=server.common.params,
            buffers=server.common.buffers,
            learning_rate=self.rate(round),
        )

    def combine_common(self, server: SpanServer, r: Reduced, round: Round) -> SpanServer:
        """Average models, over the cohort and over the last rounds."""
        like = ModelState(params=server.common.params, buffers=server.common.buffers)
        mean = r.mean(like=like)
        new = Model(params=mean.params, buffers=mean.buffers)
        if not self.schedule.averages(round, self.made.average):
            return dataclasses.replace(server, common=new)
        count = server.averaged + 1

        def blend(old: Tensor, value: Tensor) -> Tensor:
            return old + (value - old) / count.to(old)

        average = map_tensors(blend, server.average, new)
        return dataclasses.replace(server, common=new, average=average, averaged=count)

    # -- personal heads ----------------------------------------------------------------------

    def personal(self, server: SpanServer, round: Round) -> SpanBroadcast:
        """Send the directions in use."""
        return self._sent(server, round, int(server.rank))

    def _sent(self, server: SpanServer, round: Round, rank: int) -> SpanBroadcast:
        like = self.setting.scalar
        basis = {name: rows[: 1 + rank] for name, rows in server.basis.items()}
        products = gram(basis)[1:, 1:]
        cuts, centres = int(server.num_cuts), server.centres
        return SpanBroadcast(
            body=server.body,
            buffers=server.buffers,
            basis=basis,
            gram=products.to(like),
            inverse=self._inverse(products).to(like),
            means=centres.mean[:, :rank].to(like),
            is_there=(centres.count > 0).to(like),
            own=server.own.to(like),
            temperature=server.temperature.to(like),
            matrices=server.matrices[:cuts].to(like),
            shifts=server.shifts[:cuts].to(like),
            learning_rate=self.rate(round),
        )

    def _inverse(self, products: Tensor) -> Tensor:
        eye = torch.eye(len(products), dtype=torch.float64, device=products.device)
        if not self.made.scaled:
            return eye
        size = products.diagonal().mean().clamp(min=1e-30)
        return torch.linalg.inv(products + _RIDGE * size * eye)

    def combine_personal(self, server: SpanServer, r: SpanSums, round: Round) -> SpanServer:
        """Move body, basis and centres."""
        rank = int(server.rank)
        step = self._basis_step(r)

        def mean(old: Tensor, total: Tensor) -> Tensor:
            return (total / r.weight).to(old)

        basis = {name: rows.clone() for name, rows in server.basis.items()}
        for name, change in step.items():
            basis[name][: 1 + rank] += change.to(basis[name])
        moments = server.moments.clone()
        recent = moments[: 1 + rank, : 1 + rank]
        recent.copy_(_MEMORY * recent + (1 - _MEMORY) * r.spread / r.weight)
        new = dataclasses.replace(
            server,
            body=map_tensors(mean, server.body, r.body),
            buffers=map_tensors(mean, server.buffers, r.buffers),
            basis=basis,
            moments=moments,
        )
        return self._cluster(new, r, round)

    def _basis_step(self, r: SpanSums) -> Params:
        """U <- U + mean(D [1, v]^T) (mean([1, v] [1, v]^T) + lambda I)^-1."""
        first = 0 if self.made.offset else 1
        products = {name: rows[first:] / r.weight for name, rows in r.products.items()}
        moments = (r.moments / r.weight)[first:, first:]
        if self.made.scaled:
            eye = torch.eye(len(moments), dtype=torch.float64, device=moments.device)
            products = apply_map(torch.linalg.inv(moments + self.made.damping * eye), products)
        if first:
            products = {
                name: torch.cat([torch.zeros_like(rows[:1]), rows])
                for name, rows in products.items()
            }
        return products

    def _cluster(self, server: SpanServer, r: SpanSums, round: Round) -> SpanServer:
        if not self.schedule.clusters(server, round):
            return server
        centres = updated(server.centres, r.centres)
        if self.schedule.splits(round):
            centres = split(centres, self._gram(server), _LEAST_TO_SPLIT)
        return dataclasses.replace(server, centres=centres)

    def _gram(self, server: SpanServer) -> Tensor:
        rank = int(server.rank)
        return gram({name: rows[: 1 + rank] for name, rows in server.basis.items()})[1:, 1:]

    # -- the race ----------------------------------------------------------------------------

    def judge(self, server: SpanServer, round: Round) -> JudgeBroadcast:
        """Send both branches."""
        return JudgeBroadcast(common=server.common, inner=self.personal(server, round))

    def combine_judge(self, server: SpanServer, r: Reduced, round: Round) -> SpanServer:
        """Let the branch of less held-out loss go on, with the label prior where it helps."""
        found, is_last = verdict(r), self.schedule.must_end(round)
        if found is None:  # nobody has rows to spare: one model for all is the safe side
            return dataclasses.replace(server, mode=torch.tensor(COMMON)) if is_last else server
        told, best, own = 0.0, 0, len(found.losses) - 1
        if self.made.bias is not None:
            gain, error = found.gain(1, 0)
            told, best = (1.0, 1) if gain > error else (0.0, 0)
        is_personal = found.gain(own, best)[0] > 0
        leads = found.leads(own, best, _PERSONAL_LEAD), found.leads(best, own, _COMMON_LEAD)
        if not (is_last or any(leads)):
            return server
        return dataclasses.replace(
            server,
            mode=torch.tensor(PERSONAL if is_personal else COMMON),
            temperature=torch.tensor(told, dtype=torch.float64),
        )

    # -- cuts --------------------------------------------------------------------------------

    def cut(self, server: SpanServer, round: Round) -> CutBroadcast:
        """Send all directions, dormant ones too, and the candidates."""
        basis, matrix, shift, values = canonical(server, self.made.offset)
        count = int(server.num_cuts)
        matrices, shifts = server.matrices.clone(), server.shifts.clone()
        matrices[count], shifts[count] = matrix, shift
        changed = dataclasses.replace(
            server,
            basis=basis,
            matrices=matrices,
            shifts=shifts,
            num_cuts=torch.tensor(count + 1),
        )
        like, place = self.setting.scalar, torch.arange(self.made.width)
        masks = torch.stack([place < size for size in sizes(values, self.made.width)])
        products = gram(basis)[1:, 1:]
        inverses = torch.stack([self._masked_inverse(products, mask) for mask in masks])
        return CutBroadcast(
            inner=self._sent(changed, round, self.made.width),
            masks=masks.to(like),
            inverses=inverses.to(like),
        )

    def _masked_inverse(self, products: Tensor, mask: Tensor) -> Tensor:
        size = int(mask.sum())
        inverse = torch.zeros_like(products)
        inverse[:size, :size] = self._inverse(products[:size, :size])
        return inverse

    def combine_cut(self, server: SpanServer, r: Reduced, round: Round) -> SpanServer:
        """Keep the directions of least held-out loss."""
        basis, matrix, shift, values = canonical(server, self.made.offset)
        found = verdict(r)
        rank = int(server.rank)
        if found is not None:
            rank = self._chosen_size(found, sizes(values, self.made.width), rank)
        matrix[rank:], shift[rank:] = 0.0, 0.0
        count = int(server.num_cuts)
        matrices, shifts = server.matrices.clone(), server.shifts.clone()
        matrices[count], shifts[count] = matrix, shift
        return dataclasses.replace(
            server,
            basis=basis,
            moments=torch.eye(1 + self.made.width).to(server.moments),  # coordinates are white
            centres=moved(server.centres, matrix, shift),
            matrices=matrices,
            shifts=shifts,
            num_cuts=torch.tensor(count + 1),
            rank=torch.tensor(rank),
        )

    def _chosen_size(self, found: Verdict, tried: list[int], rank: int) -> int:
        """Least loss; dropped directions come back only if they are clearly missed."""
        best, current = int(rounded_argmin(found.losses)), tried.index(rank)
        gain, error = found.gain(best, current)
        return rank if tried[best] > rank and gain <= _MISSED * error else tried[best]

    # -- shrinking ---------------------------------------------------------------------------

    def levels(self, server: SpanServer) -> list[Centres]:
        """Centres merged to the degrees that are tried, those with the fewest centres first."""
        products, levels, centres = self._gram(server), list[Centres](), server.centres
        for apart in reversed(APART):
            centres = merged(centres, products, apart)
            levels.append(centres)
        return levels[::-1]

    def weigh(self, server: SpanServer, round: Round) -> WeighBroadcast:
        """Send the directions, and the candidates for the centres."""
        inner, rank = self.personal(server, round), int(server.rank)
        levels = self.levels(server)
        return WeighBroadcast(
            inner=inner,
            means=torch.stack([c.mean[:, :rank] for c in levels]).to(inner.means),
            is_there=torch.stack([c.count > 0 for c in levels]).to(inner.is_there),
        )

    def combine_weigh(self, server: SpanServer, r: Reduced, round: Round) -> SpanServer:
        """Choose the centres and the weight of the clients' own v."""
        found = verdict(r)
        server = dataclasses.replace(server, weighed=torch.tensor(1))
        if found is None:
            return server
        best = int(rounded_argmin(found.losses))
        for level, centres in enumerate(self.levels(server)):
            # The fewest centres that are not clearly worse, with no more of the clients' own v.
            place = level * len(OWN) + best % len(OWN)
            last = (level + 1) * len(OWN)
            place += int(rounded_argmin(found.losses[place:last]))
            gain, error = found.gain(best, place)
            if gain <= error:
                own = torch.tensor(OWN[place % len(OWN)], dtype=torch.float64)
                return self._settled(dataclasses.replace(server, centres=centres, own=own))
        raise AssertionError("the best candidate is not clearly worse than itself")

    def _settled(self, server: SpanServer) -> SpanServer:
        """With one centre and nothing of their own, clients have one model for all."""
        if float(server.own) > 0 or int((server.centres.count > 0).sum()) > 1:
            return server
        v = server.centres.mean[int(server.centres.count.argmax())]
        head = self._head(server, v)
        common = Model(params={**server.body, **head}, buffers=server.buffers)
        return dataclasses.replace(
            server,
            common=common,
            averaged=torch.zeros_like(server.averaged),  # those were of another model
            centres=one_centre(self.made.groups, self.made.width, v.device),
            mode=torch.tensor(COMMON),
        )

    def _head(self, server: SpanServer, v: Tensor) -> Params:
        v = torch.cat([v.new_ones(1), v])
        return {
            name: (v.to(rows) @ rows.flatten(1)).view(rows.shape[1:])
            for name, rows in server.basis.items()
        }

    # -- serving -----------------------------------------------------------------------------

    def serve(self, server: SpanServer, round: Round) -> ServeBroadcast:
        """Send what models are made of; directions that are not in use are zero."""
        width, rank = self.made.width, int(server.rank)
        if int(server.mode) != PERSONAL:  # while the race is open, the safe side is served
            server, rank = self._as_personal(server), 0
        sent = self._sent(server, round, rank)

        def filled(tensor: Tensor, *axes: int) -> Tensor:
            for axis in axes:
                shape = list(tensor.shape)
                shape[axis] = width - rank
                tensor = torch.cat([tensor, tensor.new_zeros(shape)], axis)
            return tensor

        inner = dataclasses.replace(
            sent,
            basis={name: filled(rows, 0) for name, rows in sent.basis.items()},
            gram=filled(sent.gram, 0, 1),
            inverse=filled(sent.inverse, 0, 1),
            means=filled(sent.means, 1),
        )
        share = server.centres.count / server.centres.count.sum()
        return ServeBroadcast(inner=inner, share=share.log().to(self.setting.scalar))

    def _as_personal(self, server: SpanServer) -> SpanServer:
        """One model for all, as a personal branch of rank 0."""
        model = self.shared_model(server)
        head, body = parts(model.params, self.made.names)
        basis = {
            name: torch.cat([head[name].unsqueeze(0), torch.zeros_like(rows[1:])])
            for name, rows in server.basis.items()
        }
        return dataclasses.replace(server, body=body, buffers=model.buffers, basis=basis)

    def shared_model(self, server: SpanServer) -> Model:
        """Return the model for all: averaged over the last rounds, or body and mean head."""
        if int(server.mode) == PERSONAL:
            head = self._head(server, server.moments[0, 1:])
            return Model(params={**server.body, **head}, buffers=server.buffers)
        return server.average if float(server.averaged) > 0 else server.common

    def describe(self, server: SpanServer) -> dict[str, Any]:
        """Directions of the span of the personal heads, the offset as one; their spectrum."""
        if int(server.mode) != PERSONAL:
            return {"rank": 1.0}
        rank = int(server.rank)
        basis = {name: rows[1 : 1 + rank] for name, rows in server.basis.items()}
        moments = server.moments[1 : 1 + rank, 1 : 1 + rank]
        seen = spectrum(basis, moments)
        if float(server.own) == 0:  # heads are those of the centres
            rank = min(rank, int((server.centres.count > 0).sum()) - self.made.offset)
        return {"rank": float(rank + self.made.offset), **seen}


def rounded_argmin(losses: Tensor) -> Tensor:
    """Position of the smallest loss; the first of those that are equal to 1e-9."""
    return (losses * 1e9).round().nan_to_num(nan=torch.inf).argmin()
