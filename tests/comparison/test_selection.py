"""Settings are chosen on validation rows; test rows cannot have a say."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import handspan
from handspan.core.data import Csr, FederatedData
from handspan.core.errors import HandspanError
from handspan.data.selection import selection_data

METHODS = ["local", "fedavg+ft:ft_steps=3", "fedavg+gate", "fedavg+ft:ft_stop=true:ft_steps=5"]
ENGINE = {"engine": "loop", "threads": 1}


def numbered(sizes, **options):
    """Each row is its own number."""
    numbers = np.arange(sum(sizes), dtype="float64")
    parts = np.split(numbers[:, None], np.cumsum(sizes)[:-1])
    return FederatedData.from_clients(
        [(part, part[:, 0]) for part in parts], standardize=False, task="regression", **options
    )


def rows_of(data, kind):
    first, count = data.span(kind)
    return [
        data.y[o + f : o + f + c].tolist()
        for o, f, c in zip(data.offsets[:-1].tolist(), first.tolist(), count.tolist(), strict=True)
    ]


def test_a_trial_has_training_and_validation_rows_and_scores_the_validation_rows():
    data = numbered([3, 20, 9, 40])
    trial = selection_data(data)
    assert rows_of(trial, "test") == rows_of(data, "validation")
    assert rows_of(trial, "all") == rows_of(data, "train")
    assert trial.num_rows == int((data.num_train + data.num_validation).sum())
    assert torch.equal(trial.x[:, 0], trial.y), "rows and labels stay together"
    tested = {value for client in rows_of(data, "test") for value in client}
    assert not tested & set(trial.y.tolist())


def test_a_method_that_chooses_gets_as_large_a_share_of_validation_rows_from_the_training_rows():
    data = numbered([3, 20, 9, 40])
    trial = selection_data(data)
    assert data.num_validation.tolist() == [0, 3, 1, 6]
    assert data.num_train.tolist() == [2, 12, 6, 24]
    assert trial.num_validation.tolist() == [0, 2, 0, 4]  # 12 * 3/15, 6 * 1/7, 24 * 6/30
    assert (trial.num_train > 0).all()


def test_compressed_rows_are_cut_as_dense_ones_are():
    dense = numbered([6, 20, 9])
    x = dense.x
    row = torch.arange(len(x))
    sparse = Csr(
        indptr=torch.arange(len(x) + 1), indices=0 * row, values=x[:, 0],
        num_columns=torch.tensor(1),
    )  # fmt: skip
    cut = selection_data(dataclasses.replace(dense, x=sparse))
    assert torch.equal(cut.x.to_dense(), selection_data(dense).x)


def test_data_without_validation_rows_are_refused():
    for data in (numbered([6, 20], validation_fraction=0.0), numbered([3, 4])):
        with pytest.raises(HandspanError, match="the data have none"):
            selection_data(data)
    with pytest.raises(HandspanError, match="the data have none"):
        selection_data(dataclasses.replace(numbered([6, 20]), y=None))


def test_a_trial_scores_the_validation_rows_of_a_run_that_saw_the_training_rows_alone(
    by_seed, terms
):
    table = handspan.compare(["fedavg+ft:ft_steps=3"], by_seed, seeds=1, tune=4, **terms, **ENGINE)
    data, _ = by_seed(0, "labels")
    alone = dataclasses.replace(  # the same rows with the test rows struck out by hand
        data,
        num_test=data.num_validation + data.num_test,
        num_validation=torch.zeros_like(data.num_validation),
    )
    for trial in table.tuning["methods"]["fedavg+ft:ft_steps=3"]["trials"]:
        rate = trial["setting"]["learning_rate"]
        run = handspan.fit(
            "fedavg+ft:ft_steps=3", alone, **terms, **ENGINE, learning_rate=rate
        )  # fmt: skip
        begin = data.offsets[:-1] + data.num_train
        accuracy = []
        for i, (first, count) in enumerate(
            zip(begin.tolist(), data.num_validation.tolist(), strict=True)
        ):
            part = slice(first, first + count)
            model = run.personal_model(i)
            outputs = run.problem.task.predict(model.params, model.buffers, data.x[part], None)
            accuracy.append(float((outputs.argmax(1) == data.y[part]).double().mean()))
        assert trial["score"] == pytest.approx(np.mean(accuracy), abs=1e-12)


def scrambled(data):
    """Other labels and other features in all test rows, and in no other row."""
    first, count = data.span("test")
    begin = data.offsets[:-1] + first
    rows = torch.cat(
        [torch.arange(a, a + c) for a, c in zip(begin.tolist(), count.tolist(), strict=True)]
    )
    x, y = data.x.clone(), data.y.clone()
    x[rows] = 1e6 * torch.randn(len(rows), x.shape[1], generator=torch.Generator().manual_seed(1))
    y[rows] = (y[rows] + 1) % data.num_classes
    return dataclasses.replace(data, x=x, y=y)


def test_no_choice_depends_on_a_test_row(by_seed, terms):
    def other(seed, problem):
        data, held_out = by_seed(seed, problem)
        return scrambled(data), held_out

    told = []
    for data in (by_seed, other):
        table = handspan.compare(METHODS, data, seeds=1, tune=4, **terms, **ENGINE)
        told.append((table.tuning, [row["personal_accuracy_mean"] for row in table]))
    (tuning, scores), (same, others) = told
    assert same == tuning, "every trial has the same score, to the last digit"
    assert others != scores, "and the test rows did change"


def test_every_method_has_as_many_trials_on_the_first_seed_and_keeps_its_choice(
    by_seed, terms, tmp_path
):
    table = handspan.compare(
        METHODS, by_seed, seeds=2, seed=3, tune=3, out=tmp_path, **terms, **ENGINE
    )
    tuning = json.loads((tmp_path / "tuning.json").read_text())
    assert (tuning["seed"], tuning["rows"]) == (3, "validation")
    folders = [path.parent for path in (tmp_path / "trials").glob("*/summary.json")]
    assert len(folders) == 3 * len(METHODS)
    assert all(folder.name.endswith("-seed3") for folder in folders)
    for method in METHODS:
        trials = tuning["methods"][method]["trials"]
        assert len(trials) == 3
        scores = [trial["score"] for trial in trials]
        best = trials[scores.index(max(scores))]["setting"]
        for row in table:
            if row["method"] == method:
                assert row["chosen"] == best
                config = json.loads((tmp_path / row["cell"] / "config.json").read_text())
                assert config["training"]["learning_rate"] == best["learning_rate"]
                assert config["training"]["seed"] == row["seed"]


def test_a_score_that_is_better_when_lower_chooses_the_lowest(by_seed, terms):
    table = handspan.compare(
        ["fedavg"], by_seed, seeds=1, tune=4, metrics=["loss"], **terms, **ENGINE
    )
    scores = [trial["score"] for trial in table.tuning["methods"]["fedavg"]["trials"]]
    best = table.tuning["methods"]["fedavg"]["trials"][int(np.argmin(scores))]
    assert table.chosen == {"fedavg": best["setting"]}


def test_a_setting_of_the_method_is_tuned_like_an_option(by_seed, terms):
    table = handspan.compare(
        ["ifca"], by_seed, seeds=1, grid={"ifca": {"k": [1, 2]}}, **terms, **ENGINE
    )
    assert table.chosen["ifca"] in ({"k": 1}, {"k": 2})
    assert table[0]["chosen"] == table.chosen["ifca"]
    assert table[0]["num_groups"] <= table.chosen["ifca"]["k"]
