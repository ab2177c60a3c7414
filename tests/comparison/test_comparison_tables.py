"""The table, in every form, against numbers computed by hand from the folders of its runs."""

import csv
import io
import json
import re

import numpy as np
import pyarrow.parquet
import pytest
from little import TERMS, federation
from scipy import stats

import handspan
from handspan.comparison import read
from handspan.core.errors import HandspanError

METHODS = ["local", "fedavg", "fedavg+ft:ft_steps=2", "ifca:k=2"]
ASKED = {"seeds": 3, "engine": "loop", "threads": 1}
LONGER = {**TERMS, "rounds": 10}


def held(seed, problem):
    """Clients for training, and two new ones."""
    return federation(seed), federation(seed + 100).subset(np.array([5, 6]))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison with trials and new clients."""
    out = tmp_path_factory.mktemp("c")
    return out, handspan.compare(METHODS, held, tune=2, out=out, **LONGER, **ASKED)


@pytest.fixture(scope="module")
def by_hand(compared):
    """Scores of all clients of all seeds by method, read from the runs' own folders."""
    out, _table = compared
    found = {method: [] for method in METHODS}
    for row in json.loads((out / "comparison.json").read_text()):
        clients = pyarrow.parquet.read_table(out / row["cell"] / "clients.parquet")
        found[row["method"]].append(clients["personal_accuracy"].to_numpy())
    return found


def lines_of(table):
    return {row["method"]: row for row in csv.DictReader(io.StringIO(table.table("csv")))}


def test_means_spread_and_worst_tenth_are_those_of_the_clients(compared, by_hand):
    lines = lines_of(compared[1])
    assert list(lines) == METHODS
    for method, seeds in by_hand.items():
        means = [values.mean() for values in seeds]
        assert float(lines[method]["mean"]) == pytest.approx(np.mean(means), rel=1e-9)
        assert float(lines[method]["std"]) == pytest.approx(np.std(means, ddof=1), rel=1e-9)
        worst = np.mean([values.min() for values in seeds])  # a tenth of 8 clients is one
        assert float(lines[method]["worst_decile"]) == pytest.approx(worst, abs=1e-9)


def test_tests_intervals_and_marks_are_those_of_a_computation_by_hand(compared, by_hand):
    lines = lines_of(compared[1])
    joined = {method: np.concatenate(seeds) for method, seeds in by_hand.items()}  # other clients
    best = max(METHODS, key=lambda method: np.mean([v.mean() for v in by_hand[method]]))
    rivals = [method for method in METHODS if method != best]
    raw = {}
    for method in rivals:
        d = np.round(joined[method] - joined[best], 12)
        ranks = stats.rankdata(np.abs(d))[d != 0]
        # Exact: the distribution of the sum of ranks over all signs, convolved rank by rank.
        size, share = round(2 * ranks.sum()), np.array([1.0])
        for rank in np.round(2 * ranks).astype(int):
            longer = np.zeros(len(share) + rank)
            longer[: len(share)] += share / 2
            longer[rank:] += share / 2
            share = longer
        assert len(share) == size + 1 and share.sum() == pytest.approx(1)
        positive = round(2 * ranks[d[d != 0] > 0].sum())
        raw[method] = min(1, 2 * min(share[: positive + 1].sum(), share[positive:].sum()))
        draws = np.random.default_rng(0).integers(0, len(d), (10_000, len(d)))
        low, high = np.quantile(d[draws].mean(1), [0.025, 0.975])
        told = {name: float(lines[method][name]) for name in ("difference", "low", "high", "p")}
        assert told == pytest.approx(
            {"difference": d.mean(), "low": low, "high": high, "p": raw[method]}, rel=1e-6
        )
        assert int(lines[method]["pairs"]) == len(d) == 24
    holm, largest = {}, 0.0
    for place, method in enumerate(sorted(rivals, key=raw.get)):
        largest = max(largest, min(1.0, (len(rivals) - place) * raw[method]))
        holm[method] = largest
    for method in rivals:
        assert float(lines[method]["p_holm"]) == pytest.approx(holm[method], rel=1e-6)
        assert lines[method]["mark"] == ("tie" if holm[method] > 0.05 else "")
    assert lines[best]["mark"] == "best"
    assert {lines[method]["mark"] for method in rivals} == {"tie", ""}, "both occur here"


def test_all_forms_show_the_same_numbers(compared):
    out, table = compared
    forms = {name: (out / f"table.{name}").read_text() for name in ("md", "csv", "tex")}
    assert forms == {
        "md": table.table("markdown"), "csv": table.table("csv"), "tex": table.table("latex"),
    }  # fmt: skip
    screen = table.table("text")
    for method, line in lines_of(table).items():
        mean, std = 100 * float(line["mean"]), 100 * float(line["std"])
        cell = f"{mean:.1f} ± {std:.1f}"
        name = method.replace("_", r"\_")
        begin = re.compile(rf"\| \**{re.escape(name)}[ *].*±")
        (row,) = [line for line in forms["md"].splitlines() if begin.match(line)]
        assert cell in row
        assert cell in screen
        assert cell.replace("±", r"$\pm$") in forms["tex"]
        assert ("≈" in row) == (line["mark"] == "tie")
        assert row.startswith("| **") == (line["mark"] == "best")


def test_every_form_tells_the_hashes_of_partition_and_data(compared, tmp_path, call):
    given = ("--partition", "quantity:0.5", "--clients", "8", "--rounds", "1", "--seeds", "2")
    out = tmp_path / "c"
    code, screen, _ = call("compare", "local,fedavg", *given, "--out", str(out))
    assert code == 0
    rows = json.loads((out / "comparison.json").read_text())
    hashes = {row["partition_hash"] for row in rows} | {row["fingerprint"] for row in rows}
    assert len(hashes) == 4
    files = [(out / name).read_text() for name in ("table.md", "table.csv", "table.tex")]
    assert all(code in form for form in [screen, *files] for code in hashes)


def test_the_trials_and_the_choice_stand_below_the_table(compared):
    markdown = compared[1].table("markdown")
    assert "trials: accuracy % on validation rows" in markdown
    for method, chosen in compared[1].chosen.items():
        name = method.replace("_", r"\_")
        assert f"{name}: lr={chosen['learning_rate']:g}" in markdown


def test_new_clients_have_a_column_for_each_number_of_rows(compared):
    _, table = compared
    (heading,) = [t for t in table.table("markdown").splitlines() if "new clients: accuracy" in t]
    assert [part.strip() for part in heading.split("|")[2:-1]] == [
        "0", "1", "2", "5", "10", "20", "all",
    ]  # fmt: skip
    assert "new clients against the rows they give" in table.table("text")


def test_a_comparison_read_from_its_folder_is_the_same(compared):
    out, table = compared
    again = read(out)
    assert list(again) == list(table) and again.tests == table.tests
    assert again.table("markdown") == table.table("markdown")


def test_a_comparison_without_folders_is_written_and_read(compared, tmp_path):
    table = handspan.compare(METHODS, held, **LONGER, **ASKED)
    folder = table.save(tmp_path / "c")
    again = read(folder)
    assert again.tests == table.tests
    assert again.table("latex") == table.table("latex")


def test_what_diverged_is_told_and_ranks_last(by_seed, terms):
    grid = {"fedavg": {"weight_decay": [1e30]}, "local": {"weight_decay": [0.0]}}
    table = handspan.compare(["fedavg", "local"], by_seed, grid=grid, metrics=["loss"], **terms,
                             **ASKED)  # fmt: skip
    lines = lines_of(table)
    assert (lines["local"]["mark"], lines["fedavg"]["mean"]) == ("best", "")
    assert "fedavg is not tested: some scores are not finite." in table.table("markdown")
    assert "Every trial diverged, so the first stands: fedavg." in table.table("markdown")


def test_a_lower_loss_is_better(by_seed, terms):
    table = handspan.compare(["local", "fedavg"], by_seed, metrics=["loss"], **terms, **ASKED)
    lines = lines_of(table)
    best = min(lines, key=lambda method: float(lines[method]["mean"]))
    assert lines[best]["mark"] == "best"
    (other,) = set(lines) - {best}
    assert float(lines[other]["difference"]) > 0


def test_seeds_that_share_their_clients_are_paired_by_client(terms):
    data = federation(0)
    table = handspan.compare(["local", "fedavg"], data, **terms, **ASKED)
    (test,) = table.tests["methods"]
    assert (test["pairs"], table.tests["same_clients"]) == (8, True)
    means = {
        method: np.mean([table.scores[method, seed] for seed in (0, 1, 2)], axis=0)
        for method in ("local", "fedavg")
    }
    sign = 1 if test["method"] == "local" else -1
    difference = sign * (means["local"] - means["fedavg"]).mean()
    assert test["difference"] == pytest.approx(difference)


def test_signs_that_mean_something_elsewhere_are_escaped(by_seed, terms):
    table = handspan.compare(["fedavg:weights=uniform"], by_seed, seeds=1, engine="loop", **terms)
    assert r"personal\_" not in table.table("latex")
    assert r"weights=uniform" in table.table("latex")
    table = handspan.compare(["fedavg:server_momentum=0.5"], by_seed, seeds=1, **terms)
    assert r"server\_momentum=0.5" in table.table("latex")
    assert r"server\_momentum=0.5" in table.table("markdown")


def test_an_unknown_form_is_refused(compared):
    with pytest.raises(HandspanError, match="text, markdown, csv, latex, not 'html'"):
        compared[1].table("html")
