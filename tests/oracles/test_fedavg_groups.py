import pytest

from handspan.testing.oracles import models
from handspan.testing.oracles.fedavg import fedavg, fedavg_groups
from handspan.testing.references import Reference, arrays, close


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_every_planted_group_is_a_fedavg_of_its_own(weights):
    run = Reference(f"fedavg_groups:weights={weights}", cohort=3)
    clients, cohorts, batches = run.rows
    groups = run.data.groups.tolist()
    for group in range(3):
        first = {k: v[group] for k, v in run.first_server.models.params.items()}
        members = [[i for i in cohort if groups[i] == group] for cohort in cohorts]
        wanted = fedavg(
            clients, members, batches, models.gradient, arrays(first), weights=weights, **run.work
        )
        close({k: v[group] for k, v in run.server.models.params.items()}, wanted)
    present = [{groups[i] for i in cohort} for cohort in cohorts]
    assert any(len(some) < 3 for some in present), "no group was ever absent"


def test_the_first_group_starts_where_the_oracle_does():
    run = Reference("fedavg_groups")
    wanted = fedavg_groups(
        *run.rows, models.gradient, run.start, run.data.groups.numpy(), **run.work
    )
    close({k: v[0] for k, v in run.server.models.params.items()}, wanted[0])
