"""CFL: one model that is split in two, again and again, where its clients pull apart.

Objective
    for each cluster c of an unknown partition:  min over theta_c of  sum_i in c |D_i|/|D_c| f_i

Map
    Alg. 3, l. 1, Eq. (30)   split_one     |sum_i |D_i|/|D_c| Delta_i| < eps_1: theta_c stands still
    Alg. 3, l. 2, Eq. (47)   split_one     alpha_ij = cos(Delta_i, Delta_j), weight updates
    Alg. 3, l. 3, Eq. (23)   bipartition   least greatest alpha_ij between two groups
    Alg. 3, l. 4, Eq. (31)   split_one     max_i |Delta_i| >= eps_2: and yet clients would move on
    Alg. 3, l. 4, Eq. (36)   split_one     sqrt((1 - alpha_cross)/2) > gamma_max
    round form               means         theta_c <- theta_c + mean_i Delta_i, in the NEW clusters

Deviations
    eps_1 and eps_2 are shares of the largest |mean Delta| so far (``relative``), after a rule of
    thumb that takes a tenth of it for eps_1, and up to ten times eps_1 for eps_2; 0.3 rather than
    0.1, because drawn cohorts keep a model moving. ``relative=false`` takes them as they are. No
    gamma_max is given in the paper: 0.5. Models stand in ``max_clusters`` slots, and a full house
    is not split. A cluster is tested only on the updates of all its members: where a cohort is
    drawn, a full round of all clients takes the place of the round of a test. A new client goes
    down the tree of splits by its own update at each theta*, to the branch whose mean unit update
    it is nearer to; the paper compares with the cached updates of all members (the greatest
    cosine), which would have to be kept, n d numbers at each split, and shown to it. Similarities
    and norms are rounded to 1e-9. Running statistics are averaged in the clusters.

References
----------
    [1] Sattler, Mueller, Samek: Clustered Federated Learning: Model-Agnostic Distributed Multi-Task
        Optimization under Privacy Constraints. IEEE Transactions on Neural Networks and Learning
        Systems 32(8), 2021. arXiv:1910.01991v1.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import WEIGHTS, Algorithm, Model, Phase, Stacked, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Empty, Params, Record, map_tensors, take
from handspan.numerics.averaging import Training, begin_training, sgd_step
from handspan.numerics.carrying import rounded
from handspan.numerics.clusters import bipartition, mean_by_cluster, sum_by_cluster
from handspan.numerics.local_work import LocalWork
from handspan.numerics.low_rank import gram, weighted_sum


@dataclass(frozen=True, kw_only=True)
class CFLConfig(MethodConfig):
    """Settings of CFL."""

    max_clusters: int = 8
    """Models that the server has room for; 1 is FedAvg."""
    mean_bound: float = 0.3
    """Bound eps_1: a cluster whose mean update is shorter stands still."""
    client_bound: float = 1.0
    """Bound eps_2: it is split only if some client's update is at least as long."""
    relative: bool = True
    """Whether the bounds are shares of the longest mean update so far, or lengths."""
    deviation: float = 0.5
    """gamma_max, 0 to 1: greatest relative deviation of a client's gradient from its cluster's."""
    first_test: int = 20
    """Rounds before the first test; 20 in the authors' code."""
    test_every: int = 5
    """Rounds from test to test; the paper tests in every round."""
    weights: str = "examples"
    """Weights inside a cluster: ``examples`` (the paper) or ``uniform``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self.at_least("max_clusters", 1)
        self.at_least("first_test", 0)
        self.at_least("test_every", 1)
        self.at_least("mean_bound", 0)
        self.at_least("client_bound", 0)
        self.one_of("weights", WEIGHTS)
        if not 0 <= self.deviation <= 1:
            raise HandspanError(f"deviation must lie in [0, 1], not {self.deviation}")


class CFLServer(Record):
    """Models in slots, who belongs to which, and the tree of splits.

    Slot j > 0 was split off slot ``parent[j]`` when that stood at ``anchors[j]``; ``stayed[j]`` and
    ``left[j]`` are the mean unit updates of those who stayed and of those who left.
    """

    models: Model  # leading axis: slots
    cluster: Tensor  # (n,) int64 slot of each client
    count: Tensor  # () int64 slots in use
    longest: Tensor  # () float64 longest mean update so far
    has_news: Tensor  # () int64 1 if clients must be told their cluster
    parent: Tensor  # (slots,) int64
    anchors: Model  # leading axis: slots
    stayed: Params  # leading axis: slots
    left: Params  # leading axis: slots


class CFLBroadcast(Record):
    """To each client its cluster's model; and the step size."""

    params: Params
    buffers: Params
    cluster: Tensor  # () int64
    learning_rate: Tensor


class ClusterBroadcast(Record):
    """To each client its cluster."""

    cluster: Tensor  # () int64


class TreeBroadcast(Record):
    """The tree of splits, for new clients."""

    anchors: Model
    stayed: Params
    left: Params
    parent: Tensor
    count: Tensor
    learning_rate: Tensor


class ModelsBroadcast(Record):
    """All models, for serving."""

    models: Model


class CFLClient(Record):
    """The client's cluster, as it was told."""

    cluster: Tensor  # () int64


def means(server: CFLServer, stacked: Stacked) -> Model:
    """Mean model of the arrived clients of each cluster; a cluster without any keeps its own."""
    slots = torch.arange(len(server.parent), device=server.cluster.device)
    choice = server.cluster[stacked.ids].unsqueeze(1) == slots
    return mean_by_cluster(server.models, sum_by_cluster(choice, stacked.uploads, stacked.weights))


def longest(server: CFLServer, stacked: Stacked) -> Tensor:
    """Length of the longest mean update of a cluster so far."""
    old, new = server.models.params, means(server, stacked).params
    squares = [(new[n] - v).double().flatten(1).square().sum(1) for n, v in old.items()]
    return torch.maximum(server.longest, torch.stack(squares).sum(0).sqrt().max())


def slot_of(stacked: Any, slot: int) -> Any:
    """One row of a record whose leading axis are slots."""
    return map_tensors(lambda rows: rows[slot], stacked)


def with_slot(stacked: Any, slot: int, row: Any) -> Any:
    """Return the record with another row in one slot."""
    index = torch.tensor([slot])

    def put(rows: Tensor, new: Tensor) -> Tensor:
        return rows.index_copy(0, index.to(rows.device), new.unsqueeze(0).to(rows))

    return map_tensors(put, stacked, row)


def split(config: CFLConfig, server: CFLServer, stacked: Stacked) -> CFLServer:
    """Test every cluster all of whose clients have sent what they trained."""
    for slot in range(int(server.count)):
        members = (server.cluster == slot).nonzero().flatten()
        place = torch.isin(stacked.ids, members)
        has_room = int(server.count) < config.max_clusters
        if has_room and len(members) > 1 and int(place.sum()) == len(members):
            old, new = slot_of(server.models, slot).params, take(stacked.uploads.params, place)
            delta = {name: new[name].double() - value for name, value in old.items()}
            weights = stacked.weights[place]
            server = split_one(config, server, slot, members, delta, weights)
    return server


def split_one(
    config: CFLConfig,
    server: CFLServer,
    slot: int,
    members: Tensor,
    delta: Params,
    weights: Tensor,
) -> CFLServer:
    """Split a cluster in two, if it stands still and its clients pull apart."""
    products, share = gram(delta), weights / weights.sum()
    norm = products.diagonal().clamp(min=0).sqrt()
    inverse = 1 / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    # Eq. (47), (23)
    leaves, cross = bipartition(rounded(products * inverse * inverse.unsqueeze(1)) / 1e9)
    mean_norm = (share @ products @ share).clamp(min=0).sqrt()
    unit = server.longest if config.relative else torch.ones_like(server.longest)
    is_still = rounded(mean_norm) < rounded(config.mean_bound * unit)  # Eq. (30)
    would_move = rounded(norm.max()) >= rounded(config.client_bound * unit)  # Eq. (31)
    is_apart = ((1 - cross) / 2).sqrt() > config.deviation  # Eq. (36)
    if not bool(is_still & would_move & is_apart):
        return server
    new, parent = int(server.count), slot_of(server.models, slot)

    def direction(group: Tensor) -> Params:
        return weighted_sum(delta, inverse * group / group.sum())

    return dataclasses.replace(  # the new slot is filled by ``means``: all its clients have sent
        server,
        cluster=server.cluster.index_fill(0, members[leaves], new),
        count=server.count + 1,
        has_news=torch.ones_like(server.has_news),
        parent=with_slot(server.parent, new, server.parent.new_tensor(slot)),
        anchors=with_slot(server.anchors, new, parent),
        stayed=with_slot(server.stayed, new, direction(~leaves)),
        left=with_slot(server.left, new, direction(leaves)),
    )


def build(setting: Setting, config: CFLConfig) -> Algorithm:
    """Compose the algorithm."""
    task = setting.model
    work: LocalWork = setting.work
    everyone_comes = setting.cohort >= setting.num_clients

    def is_test(round: Round) -> bool:
        late = int(round.index) - config.first_test
        return late >= 0 and late % config.test_every == 0

    def rate(round: Round) -> Tensor:
        return work.rate(round, setting.rounds, setting.scalar)

    def init_server(key: Tensor, population: Population) -> CFLServer:
        params, buffers = task.init(key)
        one, slots = Model(params=params, buffers=buffers), config.max_clusters
        models = map_tensors(lambda t: t.expand(slots, *t.shape).clone(), one)
        nothing = map_tensors(torch.zeros_like, models)
        number = torch.zeros((), dtype=torch.int64, device=setting.device)
        return CFLServer(
            models=models,
            cluster=number.repeat(int(population.num_clients)),
            count=number + 1,
            longest=number.to(torch.float64),
            has_news=number,
            parent=number.repeat(slots),
            anchors=nothing,
            stayed=nothing.params,
            left=nothing.params,
        )

    def init_client(key: Tensor, data: ClientData) -> CFLClient:
        return CFLClient(cluster=torch.zeros_like(data.num))

    def to(server: CFLServer, ids: Tensor, round: Round) -> CFLBroadcast:
        cluster = server.cluster[ids]
        own: Model = take(server.models, cluster)
        return CFLBroadcast(
            params=own.params, buffers=own.buffers, cluster=cluster, learning_rate=rate(round)
        )

    def end(b: CFLBroadcast, k: Training, data: ClientData) -> tuple[CFLClient, Model]:
        return CFLClient(cluster=b.cluster), Model(params=k.params, buffers=k.buffers)

    def combine(server: CFLServer, stacked: Stacked, round: Round) -> CFLServer:
        ids, weights = stacked.ids.to(setting.device), stacked.weights.to(setting.device)
        stacked = dataclasses.replace(stacked, ids=ids, weights=weights)
        server = dataclasses.replace(server, longest=longest(server, stacked))
        if is_test(round):
            server = split(config, server, stacked)
        return dataclasses.replace(server, models=means(server, stacked))

    train = Phase(
        name="train",
        broadcast=lambda server, round: to(server, round.ids, round),
        begin=begin_training(work.sgd),
        stages=(Stage(step=sgd_step(task, work.sgd), **work.whole()),),
        end=end,
        combine=combine,
        per_client=frozenset({"params", "buffers", "cluster"}),
        reduce="stack",
        weight=WEIGHTS[config.weights],
        infers="the client's cluster; gradients of the whole model: inversion attacks apply",
    )
    test = dataclasses.replace(
        train,
        name="test",
        broadcast=lambda server, round: to(server, torch.arange(len(server.cluster)), round),
        when=lambda server, round: is_test(round),
        computes="all",
        uploads="all",
    )
    tell = Phase(
        name="tell",
        broadcast=lambda server, round: ClusterBroadcast(cluster=server.cluster),
        begin=lambda b, client, data: client,
        end=lambda b, k, data: (CFLClient(cluster=b.cluster), Empty()),
        combine=lambda server, reduction, round: dataclasses.replace(
            server, has_news=torch.zeros_like(server.has_news)
        ),
        when=lambda server, round: bool(server.has_news),
        per_client=frozenset({"cluster"}),
        computes="all",
        uploads="all",
        infers="nothing: nothing is sent",
    )
    drawn = dataclasses.replace(train, when=lambda server, round: not is_test(round))

    def model(b: ModelsBroadcast, client: CFLClient) -> Model:
        index = client.cluster.unsqueeze(0)
        return map_tensors(lambda rows: rows.index_select(0, index).squeeze(0), b.models)

    return Algorithm(
        name="cfl",
        init_server=init_server,
        init_client=init_client,
        rounds=(train, tell) if everyone_comes else (drawn, test, tell),
        adapt=descent(setting, config),
        model=model,
        deploy=lambda server, round: ModelsBroadcast(models=server.models),
        deploy_unbatched=frozenset({"models"}),
        cluster=lambda client: client.cluster,
        describe=lambda server: {"clusters": float(server.count)},
    )


def descent(setting: Setting, config: CFLConfig) -> Phase:
    """Return the phase in which a new client goes down the tree of splits.

    It trains the model of every split, theta*, at once, and compares its updates with those of the
    two branches.
    """
    work: LocalWork = setting.work
    train_step = sgd_step(setting.model, work.sgd)
    splits = range(1, config.max_clusters)

    def broadcast(server: CFLServer, round: Round) -> TreeBroadcast:
        return TreeBroadcast(
            anchors=server.anchors,
            stayed=server.stayed,
            left=server.left,
            parent=server.parent,
            count=server.count,
            learning_rate=work.rate(round, setting.rounds, setting.scalar),
        )

    def begin(b: TreeBroadcast, client: CFLClient, data: ClientData) -> Training:
        params, buffers = b.anchors.params, b.anchors.buffers
        return Training(params=params, buffers=buffers, velocity=work.sgd.start(params))

    def step(b: TreeBroadcast, k: Training, batch: Batch) -> Training:
        return torch.vmap(lambda one: train_step(b, one, batch), randomness="error")(k)

    def end(b: TreeBroadcast, k: Training, data: ClientData) -> tuple[CFLClient, None]:
        def nearness(direction: Params) -> Tensor:
            """Inner product of the client's update with a branch's direction, for each split."""
            parts = [
                ((k.params[n] - anchor) * direction[n]).flatten(1).to(torch.float64).sum(1)
                for n, anchor in b.anchors.params.items()
            ]
            return rounded(torch.stack(parts).sum(0))

        goes = nearness(b.left) > nearness(b.stayed)
        cluster = torch.zeros_like(b.count)
        for slot in splits:
            is_here = (b.parent[slot] == cluster) & (slot < b.count)
            cluster = torch.where(is_here & goes[slot], slot, cluster)
        return CFLClient(cluster=cluster), None

    stage = Stage(step=step, models=config.max_clusters, **work.whole())
    return Phase(
        name="adapt",
        broadcast=broadcast,
        begin=begin,
        stages=(stage,) if splits else (),
        end=end,
        unbatched=frozenset({"anchors", "stayed", "left"}),
    )


METHOD = Method(
    name="cfl",
    title="CFL",
    paper="Sattler et al. 2021",
    config=CFLConfig,
    build=build,
    uploads="the whole model",
    private="nothing but the number of its cluster",
    inferable="the client's cluster; rows, by gradient inversion",
    numbers={"train": "d", "test": "d"},
)
