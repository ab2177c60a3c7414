"""Which cells a comparison has, what they are called, and whose they are."""

import json

import pytest
from torch import nn

from handspan.comparison.plan import make_plan, read_shard
from handspan.core.errors import HandspanError
from handspan.options import DataOptions

TEXTS = ["local", "fedavg", "ifca:k=2", "fedrep", "fedavg+ft"]


def plan(methods=TEXTS, **changes):
    given = {
        "seeds": 3, "seed": 7, "settings": {}, "options": {"rounds": 2}, "data_options": None,
        "tune": None, "grid": None, "equal": "rounds", "shard": None, "stage": "all",
    }  # fmt: skip
    return make_plan(methods, **{**given, **changes})


def test_all_trials_have_the_first_seed_and_final_runs_all_seeds():
    made = plan(tune=2)
    assert [cell.seed for cell in made.trial_cells()] == [7] * 10
    finals = list(made.final_cells({text: {"learning_rate": 0.3} for text in TEXTS}))
    assert [(cell.seed, cell.text) for cell in finals] == [
        (seed, text) for seed in (7, 8, 9) for text in TEXTS
    ]
    assert all(cell.choice == {"learning_rate": 0.3} for cell in finals)


@pytest.mark.parametrize("stage", ["all", "tune", "final"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_cell_belongs_to_one_shard(stage, count):
    shards = [plan(tune=2, shard=f"{i + 1}/{count}", stage=stage) for i in range(count)]
    trials = [[cell.is_mine for cell in one.trial_cells()] for one in shards]
    finals = [[cell.is_mine for cell in one.final_cells({})] for one in shards]
    once = [1] * 10, [1] * 15
    assert [sum(owners) for owners in zip(*trials, strict=True)] == [
        entry * (stage != "final") for entry in once[0]
    ]
    assert [sum(owners) for owners in zip(*finals, strict=True)] == [
        entry * (stage != "tune") for entry in once[1]
    ]


def test_a_shard_of_both_stages_waits_for_no_other():
    one = plan(tune=2, shard="2/3")
    tried = {cell.text for cell in one.trial_cells() if cell.is_mine}
    run = {cell.text for cell in one.final_cells({}) if cell.is_mine}
    assert tried == run == {"fedavg", "fedavg+ft"}
    whole = [cell.text for cell in one.trial_cells() if cell.is_mine]
    assert whole == ["fedavg"] * 2 + ["fedavg+ft"] * 2


def test_without_trials_cells_are_dealt_one_by_one():
    sizes = [sum(c.is_mine for c in plan(shard=f"{i}/4").final_cells({})) for i in (1, 2, 3, 4)]
    assert sorted(sizes) == [3, 4, 4, 4]


@pytest.mark.parametrize("stage", ["tune", "final"])
@pytest.mark.parametrize("count", [2, 4, 5, 15, 20])
def test_shards_share_evenly_and_no_shard_gets_one_method_alone(stage, count):
    made = [plan(tune=4, stage=stage, shard=f"{i + 1}/{count}") for i in range(count)]
    shares = [
        [c for c in (one.trial_cells() if stage == "tune" else one.final_cells({})) if c.is_mine]
        for one in made
    ]
    sizes = list(map(len, shares))
    assert max(sizes) - min(sizes) <= 1, "each takes as long as the other"
    assert all(len({c.text for c in mine}) > 1 for mine in shares if len(mine) > 2)


def test_a_name_that_no_file_system_takes_is_cut_and_stays_its_own():
    long = "pflmf:factor=" + "x" * 400
    names = [cell.name() for cell in plan([f"{long}{i}" for i in (1, 2)], seeds=1).final_cells({})]
    assert len(set(names)) == 2
    assert all(len(name) < 255 and name.startswith("pflmf-factor=xx") for name in names)


def test_names_of_folders_are_safe_and_differ():
    made = plan(["ifca:k=2", "ifca:k=2:upload=sum", "pflmf:factor=^(fc|head)"], tune=4)
    cells = [*made.trial_cells(), *made.final_cells({"ifca:k=2": {"learning_rate": 0.3}})]
    names = [cell.name() for cell in cells] + [cells[0].name(rounds=12)]
    assert len(set(names)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789=.+_-@/") for name in names)
    assert "ifca-k=2@learning_rate=0.3-seed7" in names
    assert "trials/ifca-k=2@learning_rate=0.03@rounds=12-seed7" in names


def test_what_two_shards_agree_in_is_json_and_says_nothing_of_how_they_run():
    data = DataOptions(partition="permuted:2")
    one = plan(data_options=data, shard="1/2", options={"rounds": 2, "engine": "loop"})
    other = plan(data_options=data, shard="2/2", options={"rounds": 2, "threads": 3})
    assert one.describe() == other.describe() == json.loads(json.dumps(one.describe()))
    assert plan(data_options=data, options={"rounds": 3}).describe() != one.describe()


def test_what_is_given_from_python_is_described_by_its_name():
    def custom(outputs, y):
        return 0.0

    made = plan(options={"model": nn.Linear(2, 2), "metrics": [custom, "accuracy"]})
    options = made.describe()["options"]
    assert (options["model"], options["metrics"]) == ("Linear", "custom,accuracy")


def test_settings_go_to_the_methods_that_have_the_field():
    made = plan(settings={"k": 3, "ft_steps": 5}, methods=["ifca", "ifca+ft", "fedavg+ft"])
    assert made.settings == {
        "ifca": {"k": 3}, "ifca+ft": {"k": 3, "ft_steps": 5}, "fedavg+ft": {"ft_steps": 5},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"methods": [" "]}, "at least one method"),
        ({"methods": ["local", "local"]}, "'local' stands twice"),
        ({"methods": ["locl"]}, "did you mean 'local'"),
        ({"settings": {"rank": 3}}, "none of the methods has a setting 'rank'"),
        ({"stage": "last"}, "--stage takes all, tune, final"),
        ({"stage": "tune"}, "nothing to do: give --tune or --grid"),
        ({"shard": "3/2"}, "numbered 1/2 to 2/2"),
        ({"shard": "0/2"}, "numbered 1/2 to 2/2"),
        ({"shard": "half"}, "takes i/n"),
        ({"shard": "1/"}, "takes i/n"),
        ({"shard": "²/3"}, "takes i/n"),
        ({"equal": "lines:3"}, "takes rounds, rows:N or bytes:N"),
        ({"methods": ["fedmgs"], "tune": 4}, "leaves none to choose settings on"),
        ({"data_options": DataOptions(validate=True)}, "--validate is for run"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_data_are_read(changes, told):
    with pytest.raises(HandspanError) as refusal:
        plan(**changes)
    assert told in str(refusal.value)


def test_shards_are_counted_from_one():
    assert read_shard(None) == (1, 1)
    assert read_shard(" 2/3 ") == (2, 3)
