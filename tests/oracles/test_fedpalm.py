import pytest
from factoring import flat, problem_of

from handspan.testing.oracles.fedpalm import fedpalm
from handspan.testing.references import Reference, close

CASES = (
    "pairs=1",
    "pairs=3:constants=paper:orthogonality=0.01:shrinkage=0.005",
    "pairs=2:sampling=uniform:idle_clients=freeze:orthogonality=0.01",
)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("text", CASES)
def test_fedpalm_takes_the_pairs_of_its_paper(text, sparse, engine):
    text = f"fedpalm:num_components=3:penalty_growth=1:{text}"
    run = Reference(text, engine=engine, sparse=sparse)
    W, H = fedpalm(**problem_of(Reference(text)), pairs=run.spec.config.pairs)
    close(run.server.basis, W)
    for got, wanted in zip(flat(run), H, strict=True):
        close(got, wanted)


def test_all_clients_are_weighted_by_their_rows():
    run = Reference("fedpalm:num_components=3:penalty_growth=1", cohort=11)
    close(run.server.basis, fedpalm(**problem_of(run), pairs=1)[0])
