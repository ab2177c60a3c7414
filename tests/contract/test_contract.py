"""Every registered method, and every variant that changes its arithmetic, keeps the contract."""

import functools

import pytest

from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.registry import methods
from handspan.testing import CHECKS, Case
from handspan.testing.case import SEED

VARIANTS = {
    "apfl": ("apfl:adaptive=true:mix_every=step",),
    "fedavg": (
        "fedavg:server_optimizer=yogi:server_learning_rate=0.1",
        "fedavg:server_momentum=0.5:weights=uniform",
    ),
    "fedbasis": ("fedbasis:num_bases=2:mean=clients:upload=rank_one",),
    "cfl": ("cfl:mean_bound=10:client_bound=0:deviation=0:first_test=0:test_every=1",),
    "fedala": ("fedala:names=all:weight_learning_rate=5",),
    "fedmtl": ("fedmtl:relation=learned:relation_weight=0.01:relation_every=1",),
    "ifca": ("ifca:k=2:upload=sum",),
    "l2gd": ("l2gd:pull_probability=0.7",),
    "fedrep_linear": (
        "fedrep_linear:rank=2:head=gradient:start=projected:projected_rounds=2",
        "fedrep_linear:rank=2:head=shared:start=random",
    ),
    "perfedavg": ("perfedavg:variant=HF:batches=same",),
    "scaffold": ("scaffold:option=I",),
    "span": (
        "span:race=false",
        "span:race=false:cut=false:scaled=false:offset=false:factor=hidden.*",
    ),
    "fedmavg": ("fedmavg:num_components=2:missing=true:idle_clients=freeze",),
    "fedmgs": (
        "fedmgs:num_components=3:constants=paper:penalty_tolerance=0.9",
        "fedmgs:num_components=2:start=zero:sampling=weighted:row_set=simplex:gap_tolerance=1e-9",
    ),
    "pflmf": (
        "pflmf:rank=2:scaled=true:affine=true:v_for_basis=new",
        "pflmf:rank=2:factor=head:upload=rank_one:weights=examples",
        "pflmf:rank=3:participation=bernoulli:bernoulli_mean=expected:factor=hidden.*",
    ),
    "perfedsi": ("perfedsi:personal=head:side_noise=0.1",),
}
SEEDS = {"l2gd:pull_probability=0.7": 5}  # in two rounds its coin asks for every kind of contact
# Rounds in which everything has happened, for methods that decide later.
ROUNDS = {"span": 3, "span:race=false": 4}
WORKS = {
    "momentum": LocalWork(steps=3, batch_size=3, sgd=Sgd(momentum=0.5), adapt_steps=2),
    "nesterov": LocalWork(epochs=1, batch_size=4, sgd=Sgd(momentum=0.5, nesterov=True)),
    "full batch": LocalWork(steps=3, batch_size=None, schedule="cosine", adapt_steps=2),
    "weight decay": LocalWork(steps=3, batch_size=2, sgd=Sgd(weight_decay=0.1), adapt_steps=2),
}
WORKED = {"nesterov": "pflmf:rank=2", "full batch": "fedrep", "weight decay": "fedrep+ft"}


ALONE = ("fedrep+ft:ft_steps=3", "fedavg+prior:prior_reference=pooled", "fedrep+gate")
COSTLY = {"blocks_run_without_warning", "the_default_type_does_not_matter"}


@functools.cache
def case(text: str, work: str = "") -> Case:
    return Case(
        text,
        work=WORKS[work] if work else None,
        seed=SEEDS.get(text, SEED),
        watched_rounds=ROUNDS.get(text, 2),
    )


def texts() -> list[str]:
    """All methods and variants, and the extras one by one."""
    found = list(ALONE)
    for name in methods():
        found += [name, *VARIANTS.get(name, ())]
    return found


def extended() -> list[str]:
    """Every method that trains models, with all extras that there are for it."""
    found = []
    for name, method in methods().items():
        if method.problem == "matrix":
            continue
        has_classes = method.problem == "labels"
        has_model = case(name).algorithm.predict is None  # a mixture is none that +ft could tune
        prior = ("+prior", ":prior_training=balanced") if has_classes else ("", "")
        tuned = ("+ft", ":ft_steps=2:ft_stop=true:ft_check=1") if has_model else ("", "")
        found.append(f"{name}{prior[0]}{tuned[0]}+gate{prior[1]}{tuned[1]}")
    return found


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("text", texts())
def test_a_method_keeps_the_contract(text, check):
    CHECKS[check](case(text))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("text", "work"), [("pflmf:rank=2", "momentum"), *((t, w) for w, t in WORKED.items())]
)
def test_a_method_keeps_the_contract_whatever_the_local_work(text, work, check):
    CHECKS[check](case(text, work))


@pytest.mark.parametrize("check", [name for name in CHECKS if name not in COSTLY])
@pytest.mark.parametrize("text", extended())
def test_a_method_keeps_the_contract_with_all_extras(text, check):
    CHECKS[check](case(text))
