"""What the oracles of factorisations are given of a run."""

import numpy as np

from handspan.core.federation import draw_round


def cohorts_of(run):
    """Who uploads in each round, and how often each was drawn."""
    drawn = [
        draw_round(t, run.simulation.population, run.cohort, run.algorithm.sampling, run.seed)
        for t in range(run.rounds)
    ]
    return [dict(zip(r.ids.tolist(), r.multiplicity.tolist(), strict=True)) for r in drawn]


def problem_of(run):
    """Matrices with data rows as columns, first W and H, and the numbers that follow from X."""
    config, clients = run.spec.config, run.rows[0]
    columns = [x.T for x, _ in clients]
    whole = np.concatenate(columns, axis=1)
    scale = np.sqrt(np.abs(whole).mean() / config.num_components)
    H = [run.first_clients.rows[i, : x.shape[1]].numpy().T * scale for i, x in enumerate(columns)]
    W = run.first_server.basis.numpy() * scale
    size = (whole**2).sum() / whole.shape[1]
    return {
        "clients": columns,
        "cohorts": cohorts_of(run),
        "W": np.clip(W, whole.min(), whole.max()),
        "H": H,
        "idle_compute": config.idle_clients == "compute",
        "rho": config.orthogonality * size,
        "nu": config.shrinkage * size,
        "constants": config.constants,
        "row_weights": config.sampling == "uniform" or run.cohort == len(columns),
    }


def flat(run):
    rows, num = run.clients.rows, run.data.num_train.tolist()
    return [rows[i, :n].numpy().T for i, n in enumerate(num)]
