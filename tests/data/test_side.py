"""Where side information comes from: columns of a table, ids, groups, the clients' own rows."""

import dataclasses

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import handspan
from handspan.cli import app
from handspan.core.errors import HandspanError
from handspan.data import load_data, mean_embedding, split_holdout
from handspan.data.side import new_side, with_side
from handspan.evaluation.newcomers import first_rows

WARDS, ROWS = 8, 12


def table(path, **changed):
    """A CSV of wards: two features, a label, and three columns about the wards."""
    rng = np.random.default_rng(0)
    about = {
        "beds": [10 * ward for ward in range(WARDS)],
        "town": [("north", "south", "east")[ward % 3] for ward in range(WARDS)],
        "age": [40.5 + ward for ward in range(WARDS)],
        **changed,
    }
    lines = [f"ward,x,y,died,{','.join(about)}"]
    for row in range(WARDS * ROWS):
        ward = row % WARDS
        told = ",".join(str(values[ward]) for values in about.values())
        x, y = rng.normal(size=2)
        lines.append(f"w{ward},{x:.3f},{y:.3f},{int(x + (ward % 2) > 0.5)},{told}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def read(path, columns="beds,town,age", **options):
    text = f"{path}:client=ward:label=died:side={columns}"
    return load_data(text, partition="natural", **options)


def test_numbers_are_standardised_and_texts_one_hot(tmp_path):
    data = read(table(tmp_path / "beds.csv"))
    side = data.side.numpy()
    assert side.shape == (WARDS, 1 + 3 + 1) and data.row_shape == (2,)
    assert np.allclose(side[:, [0, 4]].mean(0), 0, atol=1e-6)
    assert np.allclose(side[:, [0, 4]].std(0), 1, atol=1e-6)
    towns = np.array(["east", "north", "south"])
    assert [towns[row.argmax()] for row in side[:, 1:4]] == ["north", "south", "east"] * 2 + [
        "north", "south",
    ]  # fmt: skip


def test_gaps_are_told_and_silent_clients_are_average_ones(tmp_path):
    beds = [10, "", 30, "", 50, 60, 70, 80]
    data = read(table(tmp_path / "beds.csv", beds=beds), "beds")
    known = np.array([0, 2, 4, 5, 6, 7])
    assert data.side[:, 1].tolist() == [0, 1, 0, 1, 0, 0, 0, 0]
    assert data.side[[1, 3], 0].tolist() == [0, 0]
    assert np.allclose(data.side[known, 0].mean(), 0, atol=1e-6)
    assert any("2 clients without side information ('w1', ...)" in r for r in data.info["remarks"])
    towns = read(
        table(tmp_path / "towns.csv", town=["a", "", "b", "a", "a", "b", "a", "b"]), "town"
    )
    assert towns.side[1].tolist() == [0, 0]


def test_held_out_clients_teach_nothing_and_their_own_categories_are_unknown(tmp_path):
    path = table(tmp_path / "beds.csv", town=[f"town {ward // 2}" for ward in range(WARDS)])
    data, held_out = split_holdout(read(path, holdout_clients=3, seed=1), 3, 1)
    assert np.allclose(data.side[:, 0].mean(), 0, atol=1e-6)
    recipe = data.info["side"]["columns"]
    trained = {recipe[1]["categories"].index(text) for text in recipe[1]["categories"]}
    assert data.side.shape[1] == 2 + len(trained)
    outside = set(recipe[1]["known"]) - set(recipe[1]["categories"])
    alone = held_out.side[:, 1:-1].sum(1) == 0
    assert int(alone.sum()) == 2 * len(outside)


@pytest.mark.parametrize(
    ("changed", "columns", "words"),
    [
        ({"beds": [7] * WARDS}, "beds", "beds are the same for all clients"),
        ({"beds": [""] * WARDS}, "beds", "'beds'.* is empty"),
        ({"town": ["1", "x"] * 4}, "town", "'town'.* mixes numbers and texts"),
        ({}, "bed", "no column 'bed'; did you mean 'beds'"),
        ({}, "x", "side column 'x' changes within client 'w0' at row"),
    ],
)
def test_columns_that_describe_nobody_are_told(tmp_path, changed, columns, words):
    with pytest.raises(HandspanError, match=words):
        read(table(tmp_path / "beds.csv", **changed), columns)


def test_a_constant_column_is_left_out_with_a_remark(tmp_path):
    data = read(table(tmp_path / "beds.csv", beds=[7] * WARDS))
    assert data.side.shape[1] == 3 + 1
    assert any("'beds' is the same for all clients" in remark for remark in data.info["remarks"])


RUN = "--rounds 2 --threads 1 --engine loop --eval-every 0"


def test_a_table_with_three_side_columns_takes_one_command(tmp_path):
    path = table(tmp_path / "beds.csv")
    line = (
        f"run perfedsi --data {path} --client-column ward --label-column died "
        f"--side-columns beds,town,age --partition natural --holdout-clients 2 {RUN}"
    )
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, done.output
    assert "new clients: accuracy % with rows" in done.output


def test_a_method_that_needs_side_information_says_where_to_get_it():
    done = CliRunner().invoke(app, f"run perfedsi --data digits --clients 9 {RUN}".split())
    assert "side=clients, groups or mean" in str(done.exception)
    done = CliRunner().invoke(app, f"run perfedsi:side=groups --clients 9 {RUN}".split())
    assert "plants none: take side=clients" in str(done.exception)


def test_a_new_client_is_told_in_the_tables_terms(tmp_path):
    data = read(table(tmp_path / "beds.csv"), standardize=False)
    quick = {"rounds": 1, "engine": "loop", "threads": 1, "eval_every": 0}
    result = handspan.fit("perfedsi", data, **quick)
    x, y = np.zeros((3, 2), np.float32), [0, 1, 1]
    known = result.adapt(x, y, side={"beds": 20, "town": "east", "age": 42.5})
    torch.testing.assert_close(known._served.side, data.side[2].float(), rtol=0, atol=1e-6)
    strange = result.adapt(x, y, side={"town": "atlantis"})
    assert not strange._served.side.any()
    with pytest.raises(HandspanError, match="no side column 'bed'; did you mean 'beds'"):
        result.adapt(x, y, side={"bed": 20})
    with pytest.raises(HandspanError, match="takes a number, not 'many'"):
        result.adapt(x, y, side={"beds": "many"})
    with pytest.raises(HandspanError, match="needs its side information: 5 numbers"):
        result.adapt(x, y)


def digits(clients=12):
    return split_holdout(load_data("digits", partition="affine:4", num_clients=clients), 3, 0)


def test_ids_and_groups_become_one_hot():
    data, held_out = with_side("clients", *digits(), 0)
    assert torch.equal(data.side, torch.eye(9)) and not held_out.side.any()
    data, held_out = with_side("groups", *digits(), 0)
    assert data.side.argmax(1).tolist() == data.groups.tolist()
    assert held_out.side.argmax(1).tolist() == held_out.groups.tolist()
    given = digits()
    assert with_side("given", *given, 0) == given


def test_the_mean_of_rows_is_standardised_over_the_clients_that_train():
    data, held_out = digits()
    made, beside = with_side("mean", data, held_out, 0)
    assert made.side.shape == (9, 64) and beside.side.shape == (3, 64)
    first = data.x[: int(data.num_train[0])].flatten(1).double().mean(0)
    recipe = made.info["side"]
    wanted = (first - torch.tensor(recipe["mean"])) * torch.tensor(recipe["scale"])
    torch.testing.assert_close(made.side[0], wanted, rtol=1e-5, atol=1e-6)
    moving = made.side.std(0, correction=0) > 0
    assert torch.allclose(
        made.side.std(0, correction=0)[moving], torch.ones(int(moving.sum())).double()
    )
    coded, _ = mean_embedding(data, lambda rows: rows.flatten(1)[:, :5] ** 2, held_out)
    assert coded.side.shape == (9, 5) and coded.info["side"]["kind"] == "embedding"


def test_a_new_client_of_such_a_run_needs_nothing_but_its_rows():
    data, _ = digits()
    quick = {"rounds": 1, "engine": "loop", "threads": 1, "eval_every": 0}
    rows = np.random.default_rng(0).integers(0, 17, (6, 8, 8)).astype(np.uint8)
    mean = handspan.fit("perfedsi:side=mean", data, **quick)
    recipe = mean.problem.data.info["side"]
    flat = mean.transform(rows).flatten(1).double().mean(0)
    wanted = (flat - torch.tensor(recipe["mean"])) * torch.tensor(recipe["scale"])
    served = mean.adapt(rows, [0] * 6)._served.side
    torch.testing.assert_close(served.double(), wanted, rtol=1e-4, atol=1e-4)
    ids = handspan.fit("perfedsi:side=clients", data, **quick)
    assert not ids.adapt(rows, [0] * 6)._served.side.any()


def test_clients_without_training_rows_are_average_ones():
    data, _ = digits()
    first = data.num_train * (torch.arange(9) == 0)
    counts = {"num_train": data.num_train - first, "num_test": data.num_test + first}
    made, _ = with_side("mean", dataclasses.replace(data, **counts), None, 0)
    assert not made.side[0].any()
    assert torch.allclose(made.side[1:].mean(0), torch.zeros(64).double(), atol=1e-9)
    spread = made.side[1:].std(0, correction=0)
    assert torch.allclose(spread[spread > 0], torch.ones(int((spread > 0).sum())).double())


def test_the_mean_of_rows_is_that_of_the_rows_that_a_new_client_gives():
    data, guests = with_side("mean", *digits(), 0)
    assert not first_rows(guests, 0).side.any()
    recipe = data.info["side"]
    begin = int(guests.offsets[1])
    mean = guests.x[begin : begin + 2].flatten(1).double().mean(0)
    wanted = (mean - torch.tensor(recipe["mean"])) * torch.tensor(recipe["scale"])
    torch.testing.assert_close(first_rows(guests, 2).side[1], wanted, rtol=1e-5, atol=1e-6)
    everything = first_rows(guests, None).side
    torch.testing.assert_close(everything, guests.side, rtol=1e-9, atol=1e-9)
    _, others = with_side("groups", *digits(), 0)
    assert torch.equal(first_rows(others, 0).side, others.side)


def test_columns_are_refused_by_a_run_without_any():
    for given in ({}, {"beds": 3}):
        with pytest.raises(HandspanError, match="has no side columns: give its side information"):
            new_side({}, given, torch.zeros(0, 3), 2)
