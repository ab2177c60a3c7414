"""One factorisation as all methods for it see it: settings, start, objective, steps and schedule.

Rows x_j of all clients are explained by W (M x K), shared, and h_j (K), private:

    F(W, H) = 1/N sum_j |x_j - W h_j|^2
              + sum_j [ rho/2 ((1^T h_j)^2 - |h_j|^2) + nu/2 |h_j|^2 ]           (Eqs. 2, 35-36)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Stacked
from handspan.core.data import Batch, ClientData, Population, Round
from handspan.core.errors import HandspanError
from handspan.core.method import MethodConfig, Setting
from handspan.core.records import Record
from handspan.numerics.factorization import sets
from handspan.numerics.scanning import Scan
from handspan.numerics.sparse import times

REVEALS = "a client with no more rows than components shows them"
_SAFE = 0.51  # of a Lipschitz constant: any share above 1/2 descends


@dataclass(frozen=True, kw_only=True)
class FactorConfig(MethodConfig):
    """Settings that all federated factorisations have."""

    num_components: int = 10
    """Columns K of W: topics, clusters, signatures."""
    constants: str = "safe"
    """Inverse step sizes c, d: ``safe`` (see Deviations) or ``paper`` (as printed)."""
    row_set: str = "non_negative"
    """Where rows of H are kept: ``non_negative``, ``box`` ([0, row_radius]), ``simplex``, ``l1``,
    ``l2`` (balls), ``assignment`` (one-hot, found exactly: k-means) or ``none``."""
    row_radius: float = 1.0
    """Size of the simplex, ball or box of ``row_set``."""
    basis_set: str = "box"
    """Where columns of W are kept: ``box`` (the range of the data), ``non_negative`` (negative
    data are refused), ``simplex``, ``l1``, ``l2`` (balls) or ``none``."""
    basis_radius: float = 1.0
    """Size of the simplex or ball of ``basis_set``."""
    orthogonality: float = 1e-8
    """rho over |X|^2 / N: how strongly a row is pushed to one component."""
    shrinkage: float = 1e-10
    """nu over |X|^2 / N."""
    penalty_growth: float = 1.5
    """Factor of rho when the objective rests (SNCP); 1 keeps rho."""
    penalty_tolerance: float = 5e-5
    """Relative change eps of the objective below which it rests."""
    penalty_every: int = 0
    """Rounds after which rho grows in any case; 0 never."""
    stop_tolerance: float = 1e-8
    """Relative change eps below which the run ends; 0 never."""
    gap_tolerance: float = 0.0
    """Stationarity gap G_H + G_W (Eqs. 21-22) below which the run ends; 0 measures none."""

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        self.one_of("constants", ("safe", "paper"))
        self.one_of("row_set", sets.ROW_SETS)
        self.one_of("basis_set", sets.BASIS_SETS)
        self.at_least("num_components", 1)
        for name in ("orthogonality", "shrinkage", "penalty_tolerance", "stop_tolerance"):
            self.at_least(name, 0)
        for name in ("gap_tolerance", "penalty_every"):
            self.at_least(name, 0)
        self.at_least("penalty_growth", 1)
        for name in ("row_radius", "basis_radius"):
            if not getattr(self, name) > 0:
                raise HandspanError(f"{name} must be above 0, not {getattr(self, name)}")
        self.only_with(self.row_set in ("box", *sets.BALLS), "row_set=box or a ball", "row_radius")
        self.only_with(self.basis_set in sets.BALLS, "basis_set=simplex, l1 or l2", "basis_radius")


class FactorServer(Record):
    """W, and the numbers that the objective needs. All in float64: sums must not drift."""

    basis: Tensor  # (M, K), W
    num_rows: Tensor  # () N
    square_norm: Tensor  # () |X|^2
    low: Tensor  # () range of the data
    high: Tensor
    penalty: Tensor  # () rho
    shrinkage: Tensor  # () nu
    objective: Tensor  # () F when it was last known, at the present rho
    change: Tensor  # () eps: relative change of F in the last round
    gap_rows: Tensor  # () G_H, where it is measured
    gap_basis: Tensor  # () G_W
    scale: Tensor  # () of the random start; 1 once that is made


class FactorBroadcast(Record):
    """W and the numbers of the round."""

    basis: Tensor
    num_rows: Tensor
    penalty: Tensor
    shrinkage: Tensor
    scale: Tensor


class FactorClient(Record):
    """One row of H for each data row."""

    rows: Tensor  # (num, K)


S = TypeVar("S", bound=FactorServer)


def objective(
    fit: Tensor, hh: Tensor, num_rows: Tensor, penalty: Tensor, shrinkage: Tensor
) -> Tensor:
    """F(W, H) from |X - WH|^2 and H H^T: all that the penalty needs."""
    spread = (hh.sum() - hh.trace()) * penalty / 2
    return fit / num_rows + spread + shrinkage / 2 * hh.trace()


def fit_from_sums(square_norm: Tensor, basis: Tensor, hh: Tensor, xh: Tensor) -> Tensor:
    """|X - WH|^2 from H H^T and X H^T."""
    return square_norm - 2 * (basis * xh).sum() + (basis.T @ basis * hh).sum()


def largest(matrix: Tensor) -> Tensor:
    """Largest eigenvalue of symmetric matrices."""
    return torch.linalg.eigvalsh(matrix)[..., -1]


def inverse(constant: Tensor) -> Tensor:
    """Step size of a constant; a constant of 0 means that there is no step to take."""
    return torch.where(constant > 0, 1 / constant, torch.zeros_like(constant))


def gradient_map(quadratic: Tensor, linear: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """A, B of the gradient step X - step (X Q - L) = X A + B: one product for each step."""
    eye = torch.eye(len(quadratic), dtype=quadratic.dtype, device=quadratic.device)
    return eye - step * quadratic, step * linear


@dataclass(frozen=True)
class Factorization:
    """The functions that the methods share, bound to one problem."""

    config: FactorConfig
    setting: Setting

    def __post_init__(self) -> None:
        """Refuse what is no table."""
        if len(self.setting.row_shape) != 1:
            raise HandspanError("give rows of one axis to a factorisation (flatten images)")

    # -- start -------------------------------------------------------------------------------

    def first_server(self, key: Tensor, population: Population) -> dict[str, Tensor]:
        """Draw W in [0, 1); its scale and box follow from the scan."""
        zero, size = self.setting.scalar.double(), self.config.num_components
        if size > (rows := int(population.num_examples.sum())):
            raise HandspanError(f"num_components {size} exceeds the {rows} rows: lower it")
        draw = keys.uniform(keys.fold(key, "basis"), (self.setting.row_shape[0], size))
        fields = dict.fromkeys(
            ("square_norm", "low", "high", "penalty", "shrinkage", "gap_basis"), zero
        )
        infinite = torch.full_like(zero, torch.inf)
        return {
            **fields,
            "basis": draw.to(zero),
            "num_rows": population.num_examples.sum().to(zero),
            "objective": infinite,
            "change": infinite,
            "gap_rows": infinite,
            "scale": torch.ones_like(zero),
        }

    def init_client(self, key: Tensor, data: ClientData) -> FactorClient:
        """Draw H in [0, 1)."""
        shape = (int(data.num.max()), self.config.num_components)
        draw = keys.uniform(keys.fold(data.key, "rows"), shape)
        return FactorClient(rows=draw.to(self.setting.scalar))

    def take_scan(self, server: S, r: Stacked, round: Round) -> S:
        """Box, penalties and scale of the start."""
        scan: Scan = r.uploads
        square = scan.square_norm.double().sum()
        entries = server.num_rows * len(server.basis)
        scale = torch.sqrt(scan.total.double().sum() / entries / self.config.num_components)
        low = scan.low.min().double()
        if self.config.basis_set == "non_negative" and bool(low < 0):
            raise HandspanError("basis_set=non_negative needs data without negative entries")
        server = dataclasses.replace(
            server,
            square_norm=square,
            low=low,
            high=scan.high.max().double(),
            penalty=self.config.orthogonality * square / server.num_rows,
            shrinkage=self.config.shrinkage * square / server.num_rows,
            scale=scale,
        )
        return dataclasses.replace(
            server, basis=self.project(server.basis * scale, server.low, server.high)
        )

    def broadcast(self, server: FactorServer, round: Round) -> FactorBroadcast:
        """Send W in the type of the rows."""
        like = self.setting.scalar
        return FactorBroadcast(
            basis=server.basis.to(like),
            num_rows=server.num_rows.to(like),
            penalty=server.penalty.to(like),
            shrinkage=server.shrinkage.to(like),
            scale=server.scale.to(like),
        )

    # -- steps -------------------------------------------------------------------------------

    def project(self, basis: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Project the columns of W; the data lie between ``low`` and ``high``."""
        config = self.config
        return sets.project(config.basis_set, basis.T, config.basis_radius, low, high).T

    def project_rows(self, rows: Tensor) -> Tensor:
        """Project the rows of H."""
        zero = torch.zeros((), dtype=rows.dtype, device=rows.device)
        radius = self.config.row_radius
        return sets.project(self.config.row_set, rows, radius, zero, zero + radius)

    def curvature(self, b: FactorBroadcast) -> tuple[Tensor, Tensor]:
        """Hessian of F for one h_j, and the constant c: a step is 1/c times the gradient of F."""
        products = b.basis.T @ b.basis
        eye = torch.eye(len(products), dtype=products.dtype, device=products.device)
        ones = torch.ones_like(products)
        penalty = b.penalty * (ones - eye) + b.shrinkage * eye  # of R_H, Eq. 35
        hessian = 2 * products / b.num_rows + penalty
        if self.config.constants == "paper":  # lambda_max(W^T W) / N in units of F
            return hessian, largest(products) / b.num_rows
        return hessian, _SAFE * largest(hessian)

    def first_rows(self, b: FactorBroadcast, rows: Tensor, x: Any) -> Tensor:
        """Scale the drawn rows of H, and bring them into their set."""
        if self.config.row_set == "assignment":
            return sets.assigned(b.basis, times(x, b.basis))
        return self.project_rows(rows * b.scale)

    def row_steps(self, b: FactorBroadcast, rows: Tensor, projected: Tensor, steps: int) -> Tensor:
        """Eq. 28 for rows of H. Gradient: (2/N)(H W^T W - X W) + H P."""
        if self.config.row_set == "assignment":
            return sets.assigned(b.basis, projected)
        hessian, constant = self.curvature(b)
        move, shift = gradient_map(hessian, 2 * projected / b.num_rows, inverse(constant))
        for _ in range(steps):
            rows = self.project_rows(torch.addmm(shift, rows, move))
        return rows

    # -- schedule ----------------------------------------------------------------------------

    def objective(self, server: FactorServer, fit: Tensor, hh: Tensor) -> Tensor:
        """F at the server's penalty."""
        return objective(fit, hh, server.num_rows, server.penalty, server.shrinkage)

    def known(self, server: S, fit: Tensor, hh: Tensor, round: Round) -> S:
        """Take the objective of the round: its change eps, and the penalty schedule (SNCP)."""
        now = self.objective(server, fit, hh)
        change = (now - server.objective).abs() / server.objective.abs()
        change = torch.where(server.objective.isfinite(), change, torch.inf)
        grows = change < self.config.penalty_tolerance
        every = self.config.penalty_every
        if every and (int(round.index) + 1) % every == 0:
            grows = torch.ones_like(grows)
        penalty = torch.where(grows, server.penalty * self.config.penalty_growth, server.penalty)
        server = dataclasses.replace(server, penalty=penalty, change=change)
        # F at the new penalty, so that the next change compares like with like.
        return dataclasses.replace(server, objective=self.objective(server, fit, hh))

    def done(self, server: FactorServer) -> bool:
        """Whether the objective rests, or the gaps are closed."""
        gap = server.gap_rows + server.gap_basis
        return bool(server.change < self.config.stop_tolerance) or bool(
            gap < self.config.gap_tolerance
        )

    def describe(self, server: FactorServer) -> dict[str, float]:
        """Objective, and the gaps where they are measured."""
        told = {
            "objective": float(server.objective),
            "num_components": float(self.config.num_components),
            "penalty": float(server.penalty),
        }
        if self.config.gap_tolerance:
            told |= {"gap_rows": float(server.gap_rows), "gap_basis": float(server.gap_basis)}
        return told

    def labels(self, b: FactorBroadcast, client: FactorClient, batch: Batch) -> Tensor:
        """Component of each row: the largest of h_j; of an all-zero h_j the nearest column."""
        rows = client.rows
        nearest = sets.nearest_column(b.basis, times(batch.x, b.basis))
        return torch.where(rows.amax(1) > 0, rows.argmax(1), nearest)
