"""The command that is printed for a cell runs that cell again, and gives its numbers."""

import json
import shlex

import pyarrow.parquet
import pytest

import handspan
from handspan.comparison import read

SMALL = ("--clients", "10", "--cohort", "0.5", "--rounds", "2", "--steps", "2", "--threads", "1")
LOOP = ("--engine", "loop")
CASES = {
    "tuned": (
        "fedavg+ft:ft_steps=3,fedrep+gate",
        ("--tune", "2", "--seeds", "2", "--partition", "permuted:2", *LOOP),
    ),
    "a grid of settings, momentum and a schedule": (
        "ifca,fedprox",
        ("--grid", "ifca:k=2,3", "--grid", "fedprox:lr=0.1,0.3", "--seeds", "1", "--momentum",
         "0.5", "--nesterov", "--schedule", "exponential", "--decay", "0.9", "--weight-decay",
         "0.001", "--metrics", "loss,accuracy", "--batch-size", "all", *LOOP),
    ),
    "an equal number of rows": (
        "local,fedavg,ifca+prior",
        ("--equal", "rows:1500", "--seeds", "1", "--model", "linear", "--set",
         "prior_strength=2", *LOOP),
    ),
    "stacked blocks, sizes that differ, clients held out": (
        "fedavg+prior,fedrep",
        ("--engine", "stacked", "--block-size", "4", "--partition", "quantity:0.7+permuted:2",
         "--holdout-clients", "2", "--seeds", "1", "--dtype", "float64", "--adapt-steps", "3"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_command_of_every_cell_gives_its_numbers_again(name, call, timeless, tmp_path):
    texts, options = CASES[name]
    out = tmp_path / "c"
    code, screen, err = call("compare", texts, *SMALL, *options, "--out", str(out))
    assert code == 0, err
    assert "commands.txt repeats each run" in screen
    rows = json.loads((out / "comparison.json").read_text())
    told = read(out).tuning.get("methods", {})
    trials = [trial for entry in told.values() for trial in entry["trials"]]
    commands = (out / "commands.txt").read_text().splitlines()
    assert commands == [cell["command"] for cell in [*trials, *rows]]
    assert len(set(commands)) == len(commands) > 1
    for place, cell in enumerate([*trials, *rows]):
        program, *words = shlex.split(cell["command"])
        assert program == "handspan"
        again = tmp_path / str(place)
        code, _, err = call(*words, "--out", str(again))
        assert code == 0, err
        told, meant = (
            timeless(json.loads((folder / "summary.json").read_text()))
            for folder in (again, out / cell["cell"])
        )
        assert told == meant
        clients = [
            pyarrow.parquet.read_table(folder / "clients.parquet")
            for folder in (again, out / cell["cell"])
        ]
        assert clients[0].equals(clients[1])


def test_a_cell_of_given_data_says_that_it_has_no_command(by_seed, terms, tmp_path):
    table = handspan.compare(["local"], by_seed, seeds=1, engine="loop", **terms)
    assert table[0]["command"] is None
    assert table.commands == ["# local-seed0: given in Python, and so it has no command"]


def test_a_file_of_the_users_stands_in_the_command(call, tmp_path, monkeypatch):
    lines = ["client,label,a,b,age"]
    lines += [f"{i % 4},{i % 2},{i % 5},{(7 * i) % 3},{20 + i % 4}" for i in range(60)]
    (tmp_path / "my beds.csv").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    given = ("--data", "my beds.csv", "--partition", "natural", "--side-columns", "age")
    code, _, err = call("compare", "local,perfedsi", *given, *SMALL[2:], "--seeds", "1", "--out",
                        "c")  # fmt: skip
    assert code == 0, err
    for row in json.loads((tmp_path / "c" / "comparison.json").read_text()):
        code, _, err = call(*shlex.split(row["command"])[1:], "--out", "again" + row["method"])
        assert code == 0, err
        again = json.loads((tmp_path / f"again{row['method']}" / "summary.json").read_text())
        assert again["personal_accuracy_mean"] == row["personal_accuracy_mean"]
