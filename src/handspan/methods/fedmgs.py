"""FedMGS: federated matrix factorisation by sharing what makes up the gradient.

Objective (Eqs. 2, 35-36), rows x_j of all clients, W (M x K) shared, h_j (K) private
    F(W, H) = 1/N sum_j |x_j - W h_j|^2
              + sum_j [ rho/2 ((1^T h_j)^2 - |h_j|^2) + nu/2 |h_j|^2 ],   W in [low, high], H >= 0

Map
    Eq. 28      row_steps   Q1 projected gradient steps on the client's rows of H
    Eq. 31      row_steps   upload HH^T and XH^T, as differences to what was sent before
    Eqs. 29-30  combine     Q2 projected gradient steps on W from the running sums alone
    Eq. 37      combine     SNCP: rho grows by 1.5 when the objective has come to rest

Deviations
    Clients upload differences and compute their old sums from the stored H, so that the server
    keeps running sums only: W, HH^T, XH^T. The first round takes one upload of everybody's sums.
    ``constants=paper``: c and d as printed, gamma = 1 and without the regulariser; ``safe``: 0.51
    of the true Lipschitz constants, so that F descends. Labels are argmax_k h_jk; a row that is
    all zero takes the nearest column of W. Start: W, H = sqrt(mean |X| / K) * U[0, 1).

References
----------
    [1] Wang, Chang: Federated Matrix Factorization: Algorithm Design and Application to Data
        Clustering. IEEE Transactions on Signal Processing 2022. arXiv:2002.04930.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Algorithm, Cohort, Phase, Reduced, Stacked, Stage
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Method, MethodConfig, Setting
from handspan.core.records import Record
from handspan.numerics.projected import projected_steps
from handspan.numerics.scanning import Scan, scan_phase
from handspan.numerics.sparse import times, transposed_times


@dataclass(frozen=True, kw_only=True)
class FedMgsConfig(MethodConfig):
    """Settings of FedMGS."""

    num_components: int = 10
    """Columns K of W: topics, clusters."""
    row_steps: int = 10
    """Projected steps Q1 on H in a round."""
    shared_steps: int = 10
    """Projected steps Q2 on W in a round."""
    constants: str = "safe"
    """Step sizes: ``safe`` (0.51 of the Lipschitz constants) or ``paper`` (as printed)."""
    orthogonality: float = 1e-8
    """rho over |X|^2 / N: how strongly a row is pushed to one component."""
    shrinkage: float = 1e-10
    """nu over |X|^2 / N."""
    penalty_growth: float = 1.5
    """Factor of rho when the objective rests (SNCP); 1 keeps rho."""
    penalty_tolerance: float = 5e-5
    """Relative change of the objective below which it rests."""
    stop_tolerance: float = 1e-8
    """Relative change below which the run ends; 0 never."""
    non_negative: bool = False
    """Keep W >= 0 as well; negative data are refused then."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        self.one_of("constants", ("safe", "paper"))
        for name in ("num_components", "row_steps", "shared_steps"):
            self.at_least(name, 1)
        for name in ("orthogonality", "shrinkage", "penalty_tolerance", "stop_tolerance"):
            self.at_least(name, 0)
        self.at_least("penalty_growth", 1)


class FedMgsServer(Record):
    """W, the running sums of all clients, and the numbers that the objective needs."""

    basis: Tensor  # (M, K), W
    hh: Tensor  # (K, K), sum of h h^T
    xh: Tensor  # (M, K), sum of x h^T
    num_rows: Tensor  # () N
    square_norm: Tensor  # () |X|^2
    low: Tensor  # () box of W
    high: Tensor
    penalty: Tensor  # () rho
    shrinkage: Tensor  # () nu
    objective: Tensor  # () F after the last round
    change: Tensor  # () relative change of F in the last round
    scale: Tensor  # () of the random start; 1 once that is made


class FedMgsBroadcast(Record):
    """W and the numbers of the round."""

    basis: Tensor
    num_rows: Tensor
    penalty: Tensor
    shrinkage: Tensor
    scale: Tensor


class FedMgsClient(Record):
    """One row of H for each data row."""

    rows: Tensor  # (num, K)


class FedMgsWorking(Record):
    """H, and what goes up."""

    rows: Tensor
    hh: Tensor
    xh: Tensor


class FedMgsUpload(Record):
    """Change of the client's sums."""

    hh: Tensor  # (K, K)
    xh: Tensor  # (M, K)


def build(setting: Setting, config: FedMgsConfig) -> Algorithm:
    """Compose the algorithm."""
    if len(setting.row_shape) != 1:
        raise HandspanError("fedmgs factorises tables: give rows of one axis (flatten images)")
    method = _FedMgs(config, setting)
    sums = Stage(step=method.row_steps, steps=1, models=config.row_steps, sparse=True)
    start = Stage(step=method.sums_at_start, steps=1, sparse=True, forward_only=True)
    reveals = "a client with no more rows than components shows them"
    return Algorithm(
        name="fedmgs",
        init_server=method.init_server,
        init_client=method.init_client,
        setup=(
            scan_phase(setting.scalar, method.take_scan),
            Phase(
                name="start",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=(start,),
                end=method.end,
                combine=method.take_start,
                computes="all",
                uploads="all",
                cohort_update=method.cohort_start,
                infers=reveals,
            ),
        ),
        rounds=(
            Phase(
                name="factorise",
                broadcast=method.broadcast,
                begin=method.begin,
                stages=(sums,),
                end=method.end,
                combine=method.combine,
                cohort_update=method.cohort_update,
                infers=reveals,
            ),
        ),
        model=None,
        labels=method.labels,
        per_row=frozenset({"rows"}),
        done=lambda server: bool(server.change < config.stop_tolerance),
        describe=lambda server: {
            "objective": float(server.objective),
            "num_components": float(config.num_components),
        },
    )


@dataclass(frozen=True)
class _FedMgs:
    """The functions of the algorithm, bound to one problem."""

    config: FedMgsConfig
    setting: Setting

    def init_server(self, key: Tensor, population: Population) -> FedMgsServer:
        """Draw W in [0, 1); its scale and box follow from the scan."""
        zero, size = self.setting.scalar.double(), self.config.num_components
        if size > (rows := int(population.num_examples.sum())):
            raise HandspanError(f"num_components {size} exceeds the {rows} rows: lower it")
        draw = keys.uniform(keys.fold(key, "basis"), (self.setting.row_shape[0], size))
        nothing = zero.new_zeros(size, size)
        total = population.num_examples.sum().to(zero)
        return FedMgsServer(
            basis=draw.to(zero),
            hh=nothing,
            xh=zero.new_zeros(self.setting.row_shape[0], size),
            num_rows=total,
            square_norm=zero,
            low=zero,
            high=zero,
            penalty=zero,
            shrinkage=zero,
            objective=torch.full_like(zero, torch.inf),
            change=torch.full_like(zero, torch.inf),
            scale=torch.ones_like(zero),
        )

    def init_client(self, key: Tensor, data: ClientData) -> FedMgsClient:
        """Draw H in [0, 1)."""
        shape = (int(data.num.max()), self.config.num_components)
        draw = keys.uniform(keys.fold(data.key, "rows"), shape)
        return FedMgsClient(rows=draw.to(self.setting.scalar))

    # -- set-up ------------------------------------------------------------------------------

    def take_scan(self, server: FedMgsServer, r: Stacked, round: Round) -> FedMgsServer:
        """Box, penalties and scale of the start."""
        scan: Scan = r.uploads
        square = scan.square_norm.double().sum()
        entries = server.num_rows * len(server.basis)
        scale = torch.sqrt(scan.total.double().sum() / entries / self.config.num_components)
        low = scan.low.min().double()
        if self.config.non_negative and bool(low < 0):
            raise HandspanError("non_negative=true needs data without negative entries")
        return dataclasses.replace(
            server,
            basis=server.basis * scale,
            square_norm=square,
            low=low.clamp(min=0) if self.config.non_negative else low,
            high=scan.high.max().double(),
            penalty=self.config.orthogonality * square / server.num_rows,
            shrinkage=self.config.shrinkage * square / server.num_rows,
            scale=scale,
        )

    def sums_at_start(self, b: FedMgsBroadcast, k: FedMgsWorking, batch: Batch) -> FedMgsWorking:
        """Scale H, and sum."""
        rows = k.rows * b.scale * batch.weight.unsqueeze(1)
        return FedMgsWorking(rows=rows, hh=rows.T @ rows, xh=transposed_times(batch.x, rows))

    def cohort_start(
        self, b: FedMgsBroadcast, client: FedMgsClient, cohort: Cohort
    ) -> tuple[FedMgsClient, FedMgsUpload]:
        """Run ``sums_at_start`` on flat rows."""
        rows = client.rows * b.scale
        sent = rows * cohort.weights[cohort.segment.cpu()].to(rows).unsqueeze(1)
        return FedMgsClient(rows=rows), FedMgsUpload(
            hh=sent.T @ rows, xh=transposed_times(cohort.x, sent)
        )

    def take_start(self, server: FedMgsServer, r: Reduced, round: Round) -> FedMgsServer:
        """Take the sums of all clients."""
        total: FedMgsUpload = r.total
        server = dataclasses.replace(
            server,
            hh=total.hh.to(server.hh),
            xh=total.xh.to(server.xh),
            scale=torch.ones_like(server.scale),
        )
        return dataclasses.replace(server, objective=self.objective(server))

    # -- rounds ------------------------------------------------------------------------------

    def broadcast(self, server: FedMgsServer, round: Round) -> FedMgsBroadcast:
        """Send W. The server computes in float64: running sums must not drift."""
        like = self.setting.scalar
        return FedMgsBroadcast(
            basis=server.basis.to(like),
            num_rows=server.num_rows.to(like),
            penalty=server.penalty.to(like),
            shrinkage=server.shrinkage.to(like),
            scale=server.scale.to(like),
        )

    def begin(self, b: FedMgsBroadcast, client: FedMgsClient, data: ClientData) -> FedMgsWorking:
        """Start from the stored H."""
        size = self.config.num_components
        return FedMgsWorking(
            rows=client.rows,
            hh=b.basis.new_zeros(size, size),
            xh=torch.zeros_like(b.basis),
        )

    def row_steps(self, b: FedMgsBroadcast, k: FedMgsWorking, batch: Batch) -> FedMgsWorking:
        """Q1 projected steps on H, then the change of the sums."""
        real = batch.weight.unsqueeze(1)
        old = k.rows * real
        new = self.descend(b, old, times(batch.x, b.basis)) * real
        return FedMgsWorking(
            rows=new,
            hh=new.T @ new - old.T @ old,
            xh=transposed_times(batch.x, new - old),
        )

    def descend(self, b: FedMgsBroadcast, rows: Tensor, projected: Tensor) -> Tensor:
        """Eq. 28 for rows of H; ``projected`` is X W. Gradient: (2/N)(H W^T W - X W) + H P."""
        products = b.basis.T @ b.basis
        eye = torch.eye(len(products), dtype=products.dtype, device=products.device)
        ones = torch.ones_like(products)
        penalty = b.penalty * (ones - eye) + b.shrinkage * eye  # of R_H, Eq. 36
        curvature = 2 * products / b.num_rows + penalty
        # c_p of the paper, in units of F: lambda_max(W^T W) / N; all clients share one W.
        largest = products / b.num_rows if self.config.constants == "paper" else 0.51 * curvature
        return projected_steps(
            rows,
            curvature,
            2 * projected / b.num_rows,
            curvature=largest,
            steps=self.config.row_steps,
            low=torch.zeros_like(b.scale),
        )

    def cohort_update(
        self, b: FedMgsBroadcast, client: FedMgsClient, cohort: Cohort
    ) -> tuple[FedMgsClient, FedMgsUpload]:
        """Run ``row_steps`` on flat rows: one sparse product for the cohort, each way."""
        old = client.rows
        new = self.descend(b, old, times(cohort.x, b.basis))
        weight = cohort.weights[cohort.segment.cpu()].to(new).unsqueeze(1)
        change = (new - old) * weight
        hh = (new * weight).T @ new - (old * weight).T @ old
        return FedMgsClient(rows=new), FedMgsUpload(hh=hh, xh=transposed_times(cohort.x, change))

    def end(
        self, b: FedMgsBroadcast, k: FedMgsWorking, data: ClientData
    ) -> tuple[FedMgsClient, FedMgsUpload]:
        """Keep H; upload the change of the sums."""
        return FedMgsClient(rows=k.rows), FedMgsUpload(hh=k.hh, xh=k.xh)

    def combine(self, server: FedMgsServer, r: Reduced, round: Round) -> FedMgsServer:
        """Q2 projected steps on W (Eq. 30), then the penalty schedule."""
        change: FedMgsUpload = r.total
        hh = server.hh + change.hh.to(server.hh)
        xh = server.xh + change.xh.to(server.xh)
        quadratic, linear = 2 * hh / server.num_rows, 2 * xh / server.num_rows  # G1, G2 (Eq. 29)
        basis = projected_steps(
            server.basis,
            quadratic,
            linear,
            curvature=(0.5 if self.config.constants == "paper" else 0.51) * quadratic,
            steps=self.config.shared_steps,
            low=server.low,
            high=server.high,
        )
        server = dataclasses.replace(server, basis=basis, hh=hh, xh=xh)
        objective = self.objective(server)
        relative = (objective - server.objective).abs() / server.objective.abs()
        rests = relative < self.config.penalty_tolerance
        penalty = torch.where(rests, server.penalty * self.config.penalty_growth, server.penalty)
        server = dataclasses.replace(server, penalty=penalty, change=relative)
        # F at the new penalty, so that the next change compares like with like.
        return dataclasses.replace(server, objective=self.objective(server))

    def objective(self, server: FedMgsServer) -> Tensor:
        """F(W, H) from the running sums alone."""
        basis, hh = server.basis, server.hh
        fit = server.square_norm - 2 * (basis * server.xh).sum() + (basis.T @ basis * hh).sum()
        spread = (hh.sum() - hh.trace()) * server.penalty / 2
        return fit / server.num_rows + spread + server.shrinkage / 2 * hh.trace()

    def labels(self, b: FedMgsBroadcast, client: FedMgsClient, batch: Batch) -> Tensor:
        """Component of each row: the largest of h_j; of an all-zero h_j the nearest column."""
        rows = client.rows
        distance = (b.basis * b.basis).sum(0) - 2 * times(batch.x, b.basis)
        return torch.where(rows.amax(1) > 0, rows.argmax(1), distance.argmin(1))


METHOD = Method(
    name="fedmgs",
    title="FedMGS",
    paper="Wang, Chang 2022",
    config=FedMgsConfig,
    build=build,
    uploads="changes of HH^T and XH^T; once least, largest, sum and norm of the rows",
    private="one row of H for each data row",
    inferable="the rows themselves, of a client with no more rows than components",
    numbers={
        "scan": "4",
        "start": "num_components * (p + num_components)",
        "factorise": "num_components * (p + num_components)",
    },
    problem="matrix",
)
