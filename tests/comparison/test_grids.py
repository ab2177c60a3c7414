"""What is tried: as much for one method as for the other, and only what the run would take."""

import pytest

from handspan.comparison.budget import read_equal
from handspan.comparison.grids import RATES, at_the_edge, best_trial, make_trials, read_grids
from handspan.core.errors import HandspanError

TEXTS = ["local", "fedavg", "ifca:k=2", "fedavg+ft"]


def trials(texts=TEXTS, grid=None, tune=None, equal="rounds", seed=0, settings=None, **options):
    shares = {text: (settings or {}).get(text, {}) for text in texts}
    return make_trials(texts, grid, tune, read_equal(equal), options, shares, seed)


def test_nothing_is_tuned_unless_asked_for():
    assert trials() == trials(tune=0) == {}


def test_four_trials_are_four_step_sizes_for_every_method():
    found = trials(tune=4)
    assert list(found) == TEXTS
    assert all(points == [{"learning_rate": rate} for rate in RATES] for points in found.values())


@pytest.mark.parametrize("tune", [1, 2, 3, 4])
def test_every_method_gets_as_many_trials_whatever_its_grid(tune):
    grid = ["ifca:k=2:lr=0.1,0.3:upload=sum,one_hot", "fedavg+ft:ft_steps=1,5,20:lr=0.1,1"]
    found = trials(grid=grid, tune=tune)
    assert {len(points) for points in found.values()} == {tune}
    assert all(len({str(point) for point in points}) == tune for points in found.values())


def test_points_that_are_drawn_are_the_same_for_grids_of_one_size_and_the_same_again():
    found = trials(tune=2)
    assert len({str(points) for points in found.values()}) == 1
    assert found == trials(tune=2)
    drawn = {str(trials(tune=2, seed=seed)["local"]) for seed in range(10)}
    assert len(drawn) > 1, "another seed draws others"


def test_grids_of_different_sizes_are_refused_without_a_number_of_trials():
    with pytest.raises(HandspanError, match=r"every method must get as many trials.*local 4"):
        trials(grid=["fedavg:lr=0.1,0.3"])


def test_a_grid_has_all_combinations_read_as_the_run_reads_them():
    found = trials(["ifca:k=2"], grid=["ifca:k=2:upload=sum,one_hot:lr=0.1,1"])["ifca:k=2"]
    assert found == [
        {"upload": "sum", "learning_rate": 0.1},
        {"upload": "sum", "learning_rate": 1.0},
        {"upload": "one_hot", "learning_rate": 0.1},
        {"upload": "one_hot", "learning_rate": 1.0},
    ]
    same = trials(["ifca"], grid={"ifca": {"k": ["2", 3], "learning_rate": [0.1, "0.3"]}})["ifca"]
    assert [(point["k"], point["learning_rate"]) for point in same] == [
        (2, 0.1), (2, 0.3), (3, 0.1), (3, 0.3),
    ]  # fmt: skip


def test_the_longest_text_that_fits_owns_a_grid_and_all_stands_for_the_rest():
    grids = read_grids(["ifca", "ifca:k=2"], ["ifca:k=2:lr=0.1,0.3", "ifca:k=3,4", "all:lr=1,2"])
    assert grids == {
        "ifca:k=2": {"lr": ["0.1", "0.3"]},
        "ifca": {"k": ["3", "4"]},
        "all": {"lr": ["1", "2"]},
    }


def test_the_grid_of_all_is_for_methods_without_one():
    found = trials(grid=["all:lr=0.1,0.2", "local:lr=0.5,0.6"])
    assert [point["learning_rate"] for point in found["local"]] == [0.5, 0.6]
    assert [point["learning_rate"] for point in found["fedavg"]] == [0.1, 0.2]


def test_the_amount_of_local_work_may_be_tried_where_a_budget_bounds_it():
    with pytest.raises(HandspanError, match="local work is the same for all"):
        trials(grid=["all:steps=5,15"])
    with pytest.raises(HandspanError, match="local work is the same for all"):
        trials(grid=["all:batch_size=10,all"])
    by_rows = trials(grid=["all:batch_size=10,all"], equal="rows:1000")
    assert [point["batch_size"] for point in by_rows["local"]] == [10, None]
    by_epochs = trials(grid=["all:batch-size=10,all"], epochs=2)  # epochs fix the rows
    assert [point["batch_size"] for point in by_epochs["local"]] == [10, None]
    assert trials(grid=["all:epochs=1,2"], equal="rows:1000", steps=5)["local"][0] == {"epochs": 1}


@pytest.mark.parametrize(
    ("grid", "tune", "told"),
    [
        (["local=0.1,0.3"], None, "begins with no method that is compared"),
        (["fedrep:lr=0.1,0.3"], None, "begins with no method that is compared"),
        ({"fedrep": {"lr": [0.1]}}, None, "'fedrep', which is not compared"),
        (["local:lr"], None, "write METHOD:field=a,b,c"),
        (["local:lr=0.1,,0.3"], None, "write METHOD:field=a,b,c"),
        (["local:lr=0.1,0.3", "local:lr=1,2"], None, "twice"),
        (["local:lr=0.1,0.10"], None, "holds lr=0.1 twice"),
        (["local:lr=0.1,fast"], None, "learning_rate takes a number"),
        (["local:lr=0.1,-1"], None, "at least 0"),
        (["local:rate=0.1,1"], None, "cannot vary 'rate'"),
        (["local:momentun=0,0.9"], None, "did you mean 'momentum'"),
        (["local:rounds=10,100"], None, "cannot vary 'rounds'"),
        (["local:seed=1,2"], None, "cannot vary 'seed'"),
        (["ifca:k=2:k=2,3"], None, "fixes k already"),
        (["ifca:k=2:upload=some,one_hot"], None, "upload must be"),
        (["all:k=2,3"], None, "cannot vary 'k'"),
        (["local:lr=0.1,1"], 0, "drop one"),
        (None, -1, "at least 0"),
        (None, 5, "has points (4): give it a larger one"),
    ],
)
def test_a_grid_that_cannot_be_meant_is_refused_in_one_sentence(grid, tune, told):
    with pytest.raises(HandspanError) as refusal:
        trials(grid=grid, tune=tune)
    assert told in str(refusal.value)


def test_the_best_trial_is_the_first_of_the_best_and_what_diverged_loses():
    assert best_trial([0.5, 0.7, 0.7, 0.6], True) == 1
    assert best_trial([0.5, 0.7, 0.2, 0.2], False) == 2
    assert best_trial([None, 0.1, float("nan")], True) == 1
    assert best_trial([None, 0.1, float("inf")], False) == 1
    assert best_trial([None, None], True) == 0


def test_a_choice_at_the_edge_of_its_grid_is_told():
    points = [{"learning_rate": rate, "upload": "sum"} for rate in (0.03, 0.1, 0.3)]
    assert at_the_edge(points, points[0]) == ["learning_rate"]
    assert at_the_edge(points, points[1]) == []
    assert at_the_edge(points[:2], points[0]) == [], "two values are all edge"
    flags = [{"nesterov": value} for value in (True, False)]
    assert at_the_edge(flags, flags[0]) == []
