"""What the paper of pFL-MF says of it: Theorem 1, Figure 1 and Examples 1 to 3."""

import numpy as np
import pytest
import torch
from torch import nn

from handspan.core import keys
from handspan.core.federation import run
from handspan.evaluation.clustering import clustering_scores
from handspan.models.convert import task_from_module
from handspan.numerics.local_work import LocalWork
from handspan.testing.case import numbers
from handspan.testing.quadratics import QuadraticTask, quadratic
from handspan.testing.references import Reference, arrays, close
from handspan.testing.toys import labelled


class Drawn(QuadraticTask):
    """Quadratic losses whose directions start at random."""

    def init(self, key):
        draw = keys.normal(keys.fold(key, "start"), tuple(self.start["w"].shape))
        return {"w": 0.7 * draw}, {}


def reference(text, targets, work=None, *, curvatures=None, **options):
    """Reference on f_i(w) = 1/2 (w - a_i)^T A_i (w - a_i); targets (n, d), A_i diagonal."""
    targets = torch.as_tensor(targets, dtype=torch.float64)
    data = quadratic(targets, curvatures)
    task = Drawn(w=torch.zeros(targets.shape[1], dtype=torch.float64))
    options = {"cohort": len(targets), "engine": "stacked", **options}
    return Reference(text, work or LocalWork(batch_size=None), data=data, task=task, **options)


def factors(made):
    """U (d, r) and V (n, r) of a run, as they are now."""
    return made.server.basis["w"].numpy().T, made.clients.coordinates.numpy()


# -- Theorem 1 -------------------------------------------------------------------------------

TARGETS = np.random.default_rng(0).normal(size=(5, 4))
RANK, STEP = 2, 0.08


def gradients(u, v):
    """Gradients of F(U, V) = 1/(2n) |V U^T - A|^2, and F."""
    error = v @ u.T - TARGETS
    n = len(TARGETS)
    return error.T @ v / n, error @ u / n, (error**2).sum() / (2 * n)


def smoothness(u, v):
    """Bound on the norm of the Hessian of F, hence on L of Assumption 1."""
    error = np.linalg.norm(v @ u.T - TARGETS, 2)
    return (np.linalg.norm(u, 2) ** 2 + np.linalg.norm(v, 2) ** 2 + error) / len(TARGETS)


def trajectory(participation, steps, rounds, seed):
    """(U^t, V^t) for all t under the iteration of Section A.1."""
    n = len(TARGETS)
    text = f"pflmf:rank={RANK}:shared_steps=1:personal_steps={steps}:u_learning_rate={STEP}"
    text += f":v_learning_rate={participation * STEP / (steps * n)}"
    if participation < 1:
        text += ":participation=bernoulli:bernoulli_mean=expected"
    made = reference(text, TARGETS, seed=seed, cohort=round(participation * n))
    store, everyone = made.simulation.store, torch.arange(n)
    first = (arrays(made.first_server.basis)["w"].T, made.first_clients.coordinates.numpy())
    seen = [first]

    def look(state):
        v = store.read(everyone).coordinates.numpy().copy()
        seen.append((arrays(state.server.basis)["w"].T, v))

    options = {"rounds": rounds, "cohort": made.cohort, "seed": seed}
    run(made.algorithm, made.simulation, hooks=(look,), **options)
    return seen


def sides(seen, steps, participation, weight):
    """Left and right side of the bound; ``weight`` multiplies the gradients by V."""
    rounds, total, smooth = len(seen) - 1, 0.0, 0.0
    for u, v in seen[:-1]:
        total += (gradients(u, v)[0] ** 2).sum()
        for _ in range(steps):  # the local steps of everybody, from the same U
            slope = gradients(u, v)[1]
            total += weight * (slope**2).sum() / steps
            smooth = max(smooth, smoothness(u, v))
            v = v - participation * STEP / steps * slope
    tail = np.linalg.svd(TARGETS, compute_uv=False)[RANK:]
    gap = gradients(*seen[0])[2] - (tail**2).sum() / (2 * len(TARGETS))
    slack = 1 - 2 * STEP * smooth
    assert slack > 0, f"the step is too large for L = {smooth}"
    return total / rounds, 2 * gap / (STEP * rounds * slack)


@pytest.mark.parametrize("steps", [1, 4])
def test_theorem_1_holds_when_all_take_part(steps):
    for rounds in (3, 30):
        left, right = sides(trajectory(1.0, steps, rounds, seed=1), steps, 1.0, weight=1.0)
        assert left <= right
        assert left > 1e-3 * right, "the bound is of the right size"


def test_with_part_of_the_clients_the_bound_holds_with_the_square_of_p():
    # Bernoulli clients: the noise of the step on U is the only one, and is bounded on the way.
    p, rounds, runs = 0.6, 20, 8
    left = right = noise = 0.0
    for seed in range(runs):
        seen = trajectory(p, 1, rounds, seed)
        a, b = sides(seen, 1, p, weight=p**2)
        left, right = left + a / runs, max(right, b)
        for u, v in seen[:-1]:  # variance of 1/(pn) sum over the cohort of grad f_i v_i^T
            each = np.einsum("nd,nr->ndr", v @ u.T - TARGETS, v) / len(TARGETS)
            noise = max(noise, (1 - p) / p * (each**2).sum())
    smooth = max(smoothness(*pair) for pair in seen)
    assert left <= right + 2 * STEP * smooth * noise / (1 - 2 * STEP * smooth)


@pytest.mark.parametrize(("p", "printed"), [(1.0, True), (0.5, False), (0.1, False)])
def test_as_printed_theorem_1_fails_below_full_participation(p, printed):
    # f = (u v - a)^2 / 2 from u = 1 and v = 0, one client, full gradients: v moves with
    # probability p, by p eta. u hardly moves: its gradient is of the order of a^2.
    smooth, a = 1.1, 0.01
    eta = 1 / (4 * smooth)
    error, total = a**2, 0.0  # E (v - a)^2, and its sum over the rounds
    for _ in range(20_000):
        total += error
        error *= 1 - 2 * p**2 * eta + p**3 * eta**2
    bound = 16 * smooth * a**2 / 2
    assert (total <= bound) == printed
    assert p**2 * total <= bound, "with the weight p^2 it holds"


def test_the_run_is_the_iteration_of_the_theorem():
    (u, v), (after_u, after_v) = trajectory(1.0, 2, 1, seed=3)
    slope_u = gradients(u, v)[0]
    close(after_u, u - STEP * slope_u, 1e-12)
    for _ in range(2):
        v = v - STEP / 2 * gradients(u, v)[1]
    close(after_v, v, 1e-12)


# -- Figure 1 and the examples ---------------------------------------------------------------

# Steps preconditioned by the Gram matrices: on these losses alternating least squares.
EXACT = "scaled=true:v_for_basis=new:u_learning_rate=1:v_learning_rate=1:shared_steps=1"
EXACT += ":personal_steps=1:damping=1e-12:gram_ridge=1e-12"


def test_figure_1_rank_one_is_the_truncated_svd_without_centring():
    points = np.array([[2.0, 1.0], [1.0, 1.5], [-1.0, -0.2], [3.0, 2.5]])
    u, v = factors(reference(f"pflmf:rank=1:{EXACT}", points, rounds=12))
    left, values, right = np.linalg.svd(points)
    close(v @ u.T, values[0] * np.outer(left[:, 0], right[0]), 1e-6)


def test_example_1_opposite_labels_need_one_direction_and_a_sign():
    data = labelled(sizes=(12,) * 8, num_groups=0, side=False)
    y = (data.x[:, 0] > 0).long()
    owner = torch.repeat_interleave(torch.arange(8), data.offsets.diff())
    data = type(data)(
        **{**vars(data), "y": torch.where(owner % 2 == 0, y, 1 - y), "num_classes": 2}
    )
    task = task_from_module(nn.Linear(4, 2, bias=False), dtype=torch.float64)
    work = LocalWork(batch_size=None, learning_rate=0.5, steps=6)
    made = Reference("pflmf:rank=1", work, rounds=60, cohort=8, data=data, task=task)
    outputs = numbers(made.state, made.simulation, task)["outputs"]
    first = (data.offsets[:-1] + data.num_train + data.num_validation).tolist()
    rows = [torch.arange(a, b) for a, b in zip(first, data.offsets[1:].tolist(), strict=True)]
    assert (outputs.argmax(1) == data.y[torch.cat(rows)]).double().mean() > 0.9
    sign = made.clients.coordinates[:, 0].sign()
    assert torch.equal(sign, sign[0] * (-1.0) ** torch.arange(8))


def test_example_2_clusters_need_as_many_directions_and_show_in_the_coordinates():
    centres = np.array([[2.0, 0.0, 1.0, 0.0], [0.0, -2.0, 0.0, 1.0], [1.0, 1.0, -2.0, 0.5]])
    group = np.arange(9) % 3
    made = reference(f"pflmf:rank=3:{EXACT}", centres[group], rounds=12)
    u, v = factors(made)
    close(v @ u.T, centres[group], 1e-6)
    same = np.linalg.norm(v[:, None] - v[None], axis=2) < 1e-4
    assert clustering_scores(torch.tensor(group), torch.tensor(same.argmax(1)))["ari"] == 1.0
    few_u, few_v = factors(reference(f"pflmf:rank=2:{EXACT}", centres[group], rounds=12))
    least = np.linalg.svd(centres[group], compute_uv=False)[2] ** 2
    assert ((few_v @ few_u.T - centres[group]) ** 2).sum() >= least - 1e-9


def test_example_3_scores_that_nobody_showed_are_found():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(16, 2)) @ rng.normal(size=(2, 8))
    shown = torch.tensor(rng.random((16, 8)) < 0.7).double()
    text = f"pflmf:rank=2:{EXACT}".replace("personal_steps=1", "personal_steps=4")
    made = reference(text, scores, curvatures=shown, rounds=60)
    u, v = factors(made)
    hidden = (1 - shown).numpy().astype(bool)
    missed = np.abs(v @ u.T - scores)[hidden]
    assert hidden.sum() > 30 and missed.max() < 0.05 * np.abs(scores).max()
