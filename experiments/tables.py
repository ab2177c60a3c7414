"""Tables by name: what is compared, on which data, on which terms.

Step sizes are chosen by four trials of each method on validation rows of the first seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Table:
    """One comparison.

    Attributes
    ----------
    methods
        As ``handspan compare`` takes them.
    options
        The rest of its command line; ``{data}`` stands for the folder of the data.
    ours
        The method that the claims are about.
    rivals
        Those that it is tested against, pair by pair.
    """

    methods: tuple[str, ...]
    options: tuple[str, ...]
    ours: str = "span"
    rivals: tuple[str, ...] = field(default=())


_PERMUTED = (
    "--data {data}/mnist.npz --clients 1000 --rounds 100 --cohort 0.1 --steps 15 "
    "--batch-size all --eval-every 50"
)
# Rows whose gradient 100 rounds of span take; FedAvg would take 5 % more.
_EQUAL = "--tune 4 --equal rows:7400000"
_FEW = ("fedavg", "fedavg+ft", "ifca:k=20", "fedavg_groups", "span")
_MANY = ("local", *_FEW[:2], "fedrep", "ifca:k=10", *_FEW[2:4], "pflmf", "span")


def _permuted(groups: int, methods: tuple[str, ...] = _FEW) -> Table:
    return Table(
        methods=methods,
        options=(*_PERMUTED.split(), *_EQUAL.split(), "--partition", f"permuted:{groups}"),
        rivals=("fedavg_groups", "fedavg"),
    )


def _label_shift(alpha: str) -> Table:
    return Table(
        methods=(
            "local",
            "fedavg+ft",
            "fedavg+prior",
            "fedavg+prior+ft",
            "fedrep",
            "ifca",
            "pflmf",
            "span",
            "span+ft",
        ),
        options=(
            *"--data {data}/mnist.npz --clients 100 --rounds 50 --cohort 0.1 --steps 15".split(),
            *f"--eval-every 25 --tune 4 --partition dirichlet:{alpha}".split(),
        ),
        ours="span+ft",
        rivals=("fedavg+ft", "fedavg+prior+ft"),
    )


_CIFAR = (
    "--data cifar10:{data} --partition dirichlet:0.5 --clients 100 --rounds 100 --cohort 0.1 "
    "--epochs 5 --batch-size 64 --model cnn --eval-every 50"
)
_ABLATED = (
    "span",
    "span:race=false",
    "span:cut=false",
    "span:shrink=false",
    "span:prior=false",
    "span:scaled=false",
    "span:offset=false",
    "span:average=0",
)


def _ablation(partition: str) -> Table:
    return Table(
        methods=("fedavg", "fedavg+prior", *_ABLATED),
        options=(
            *"--data digits --clients 100 --rounds 100 --cohort 0.2 --steps 15".split(),
            *f"--batch-size all --lr 0.3 --eval-every 50 --partition {partition}".split(),
        ),
        rivals=_ABLATED[1:],
    )


def _hospital(data: str) -> Table:
    return Table(
        methods=("local", "fedavg", "fedavg+ft", "fedrep", "ifca:k=3", "pflmf:rank=2", "span"),
        options=(*f"{data} --rounds 100 --cohort 12 --steps 15 --eval-every 50 --tune 4".split(),),
        rivals=("local",),
    )


TABLES: dict[str, Table] = {
    "permuted-10": _permuted(10, _MANY),
    **{f"permuted-{groups}": _permuted(groups) for groups in (3, 20, 1)},
    **{f"dirichlet-{alpha}": _label_shift(alpha) for alpha in ("0.1", "0.5", "1")},
    "cifar": Table(
        methods=("fedavg+ft", "fedavg+prior", "fedavg+prior+ft", "fedrep+ft", "span", "span+ft"),
        options=(*_CIFAR.split(), *"--tune 2 --grid all:learning_rate=0.05,0.1".split()),
        ours="span+ft",
        rivals=("fedavg+ft", "fedavg+prior+ft"),
    ),
    **{
        f"ablation-{name}": _ablation(partition)
        for name, partition in (
            ("permuted", "permuted:5"),
            ("groups", "groups:5"),
            ("dirichlet", "dirichlet:0.3"),
            ("iid", "iid"),
        )
    },
    "hospital-digits": _hospital("--data digits --clients 12 --partition quantity:1.5+permuted:3"),
    "hospital-landmine": _hospital("--data {data}/landmine12.npz --partition natural --clients 12"),
    "gate": Table(
        methods=("local", "fedavg+ft+gate", "fedrep+gate", "span+gate"),
        options=(
            *"--data digits --clients 100 --partition permuted:100 --rounds 100".split(),
            *"--cohort 0.2 --steps 15 --batch-size all --lr 0.3 --eval-every 50".split(),
        ),
        ours="span+gate",
        rivals=("local",),
    ),
    **{
        f"step-size-{lr}": Table(
            methods=("span",),
            options=(
                *_PERMUTED.split(),
                *f"--partition permuted:10 --seeds 1 --lr {lr}".split(),
            ),
        )
        for lr in ("0.1", "0.3", "1")
    },
}
