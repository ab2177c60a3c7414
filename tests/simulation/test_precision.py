"""Products in less than float32: only where they are asked for, the same on every engine."""

import functools
from typing import ClassVar

import pytest
import torch

from handspan.core.errors import HandspanError
from handspan.data import load_data
from handspan.fitting import fit
from handspan.simulation import precision
from handspan.simulation.precision import multiplying


def flags():
    backends = torch.backends
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    return [place.fp32_precision for place in places]


def test_float32_means_float32_inside_a_run_and_nothing_is_changed_outside():
    before = flags()
    with multiplying():
        assert flags() == ["ieee"] * 3
        with multiplying("tf32"):
            assert flags() == ["tf32"] * 3
        assert flags() == ["ieee"] * 3
    assert flags() == before
    with pytest.raises(ValueError, match="inside"), multiplying("tf32"):
        raise ValueError("inside")
    assert flags() == before


class Watched(torch.nn.Linear):
    """A layer that notes in which precision it is used."""

    seen: ClassVar = set()

    def forward(self, x):
        self.seen.add(tuple(flags()))
        return super().forward(x.flatten(1))


@functools.cache
def scores(name, engine="stacked", method="fedavg", **more):
    Watched.seen.clear()
    data = load_data("digits", num_clients=4, seed=0)
    options = dict(rounds=2, cohort=4, steps=3, engine=engine, precision=name, eval_every=1)
    model = {"model": Watched(64, 10)} if method == "fedavg" else {"num_components": 2}
    result = fit(method, data, **options, **model, **more)
    return [*Watched.seen], [row["personal_loss_mean"] for row in result.history], result


def test_a_run_computes_as_it_was_told_and_tells_so():
    plain, tf32, half = (scores(name) for name in ("float32", "tf32", "bf16"))
    assert ("ieee",) * 3 in plain[0]
    assert ("tf32",) * 3 in tf32[0]
    assert ("tf32",) * 3 not in plain[0] + half[0]
    assert tf32[1] == plain[1], "a CPU has no tf32"
    assert half[1] != plain[1]
    assert half[1] == pytest.approx(plain[1], rel=0.02), "seven bits, not nonsense"
    assert half[2].config["training"]["precision"] == "bf16"
    state = half[2].state.server
    assert all(p.dtype == torch.float32 for p in state.params.values())


def test_bfloat16_takes_products_that_are_given_by_name():
    x, weight = torch.full((2, 3), 1.01), torch.full((4, 3), 1.01)
    with precision._Bfloat16Products():
        made = torch.nn.functional.linear(input=x, weight=weight)
    assert made.dtype == torch.float32 and not torch.equal(made, x @ weight.T)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"dtype": "float64"}, "float32 numbers"), ({"method": "fedmgs"}, "matrix method")],
)
def test_bfloat16_is_refused_where_it_means_nothing(options, told):
    with pytest.raises(HandspanError, match=told):
        scores("bf16", **options)


def test_bfloat16_is_the_same_on_both_engines():
    assert scores("bf16", "loop")[1] == pytest.approx(scores("bf16")[1], rel=1e-3)


def test_an_unknown_precision_is_refused():
    with pytest.raises(HandspanError, match="unknown precision 'fp8'"):
        fit("fedavg", load_data("digits", num_clients=4), precision="fp8")
