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
_EQUAL = "--tune 4 --equal rows:7450000"
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
    "span:average=0.25",
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


# PerFedSI, appendix D: 20 % of the clients, one epoch, batch 10, momentum 0.5; its step sizes.
_SIX = (
    "local",
    "fedavg:weights=uniform",
    "ditto:weights=uniform",
    "srph",
    "prsh",
)
_EPOCH = "--cohort 0.2 --epochs 1 --batch-size 10 --momentum 0.5"


def _omniglot(clients: int, rounds: int, more: tuple[str, ...] = ()) -> Table:
    """One client per alphabet, or several."""
    ours = "perfedsi:side_encoder=two_layers"
    return Table(
        methods=(*_SIX, ours, *more),
        options=(
            *f"--data {{data}}/omniglot-{clients}.npz --partition natural --keep-test".split(),
            *f"{_EPOCH} --model omniglot --lr 0.05 --rounds {rounds}".split(),
            *f"--eval-every {rounds // 5}".split(),
        ),
        ours=ours,
        rivals=_SIX,
    )


def _cameras(clients: int, rounds: int) -> Table:
    """CIFAR-10 under four affine shifts; a tenth of the clients more is held out."""
    ours = "perfedsi:form=mask:join=pool3:side_encoder=none"
    return Table(
        methods=(*_SIX, ours),
        options=(
            *"--data {data}/cifar10.npz --partition affine:4".split(),
            *f"--clients {clients + clients // 10} --holdout-clients {clients // 10}".split(),
            *f"{_EPOCH} --model omniglot --lr 0.1 --rounds {rounds}".split(),
            *f"--eval-every {rounds // 5}".split(),
        ),
        ours=ours,
        rivals=_SIX,
    )


def _real(name: str, clients: int, rates: str, more: str) -> Table:
    """A table with natural clients, a quarter of them held out; z is given, or the mean row."""
    given, mean, random = (
        f"perfedsi{side}:side_encoder=none" for side in ("", ":side=mean", ":side=random")
    )
    return Table(
        methods=("local", "fedavg", "fedavg+ft", "perfedsi", given, mean, "perfedsi+ft", random),
        options=(
            *f"--data {{data}}/{name}-side.npz --partition natural".split(),
            *f"--holdout-clients {clients // 4} --rounds 100 --eval-every 50 --tune 4".split(),
            *f"--grid all:learning_rate={rates} {more}".split(),
        ),
        ours=given,
        rivals=("fedavg", mean, random),
    )


def _side_digits(partition: str, ours: str, others: tuple[str, ...]) -> Table:
    """What noise on the part that reads z costs, and what a z that says nothing costs."""
    plain = "fedavg:weights=uniform"
    random = ("perfedsi:side=random", "perfedsi:side=random:gate=true")
    return Table(
        methods=tuple(dict.fromkeys((plain, ours, *others, *random))),
        options=(
            *f"--data digits --clients 100 --partition {partition} --rounds 100".split(),
            *"--cohort 0.2 --steps 15 --lr 0.3 --eval-every 50 --holdout-clients 20".split(),
        ),
        ours=ours,
        rivals=tuple(name for name in (plain, *random) if name != ours),
    )


_GROUPS = "perfedsi:side=groups"
_NOISY = tuple(f"{_GROUPS}:side_noise={noise}" for noise in (0.01, 0.03, 0.1, 0.3, 1))

_TABLE_1 = (
    *("local", "fedavg", "fedper", "fedrep", "apfl", "cfl", "flute", "fedalt", "fedas"),
    *("pfedfda", "pflmf:rank=1", "pflmf:rank=10", "pflmf:rank=15", "span"),
)
TABLES: dict[str, Table] = {
    "permuted-10": _permuted(10, _MANY),
    **{f"permuted-{groups}": _permuted(groups) for groups in (3, 20, 1)},
    **{f"dirichlet-{alpha}": _label_shift(alpha) for alpha in ("0.1", "0.5", "1")},
    "table-1": Table(  # of Personalized Federated Learning via Low-Rank Matrix Optimization
        methods=_TABLE_1,
        options=(
            *"--data {data}/mnist.npz --clients 100 --rounds 100 --cohort 0.1".split(),
            *"--eval-every 50 --tune 4 --partition dirichlet:0.5".split(),
        ),
        rivals=("fedavg", "pflmf:rank=15"),
    ),
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
    "hospital-landmine": _hospital("--data {data}/landmine12.npz --partition natural"),
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
    "omniglot-50": _omniglot(50, 100),
    "omniglot-200": _omniglot(200, 250),
    "omniglot-500": _omniglot(500, 500),
    **{f"cameras-{clients}": _cameras(clients, 200) for clients in (100, 500)},
    "school": _real(
        "school", 139, "0.001,0.003,0.01,0.03", "--task regression --model linear --metrics rmse"
    ),
    "landmine": _real("landmine", 29, "0.01,0.03,0.1,0.3", "--metrics auroc,accuracy"),
    "side-groups": _side_digits("groups:5", _GROUPS, (*_NOISY, f"{_GROUPS}:gate=true")),
    "side-shift": _side_digits(
        "affine:4", f"{_GROUPS}:form=mask:join=hidden2", (_GROUPS, f"{_GROUPS}:personal=head")
    ),
    "side-iid": _side_digits("iid", "perfedsi:side=random:gate=true", ()),
}
