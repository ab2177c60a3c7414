"""What ``handspan plot`` writes, and what it says where it writes nothing."""

import json
import shutil
import sys
import xml.etree.ElementTree as tree

import numpy as np
import pytest

import handspan
from conftest import COMMON, METHODS, command
from handspan.data import load_data
from handspan.runs import RunFolder

PFLMF = "pflmf-factor=head-scaled=true-rank=2"
CURVES = [f"accuracy-against-{what}" for what in ("rounds", "rows", "bytes", "seconds")]
OF_A_COMPARISON = [
    *CURVES, "spread", "gain", "partition", f"coordinates-{PFLMF}", f"spectrum-{PFLMF}",
]  # fmt: skip
ABOUT = "digits, permuted:2, 12 clients, 4 rounds, 2 seeds"


@pytest.fixture(scope="module")
def drawn(compared, tmp_path_factory):
    """Texts of all pictures of the comparison, by name; one of them as png as well."""
    out = tmp_path_factory.mktemp("pictures")
    found = handspan.plot(compared, out, formats=["svg"])
    assert found.skipped == {"newcomers": "no client was held out: train with --holdout-clients"}
    assert [path.name for path in found.files] == [f"{name}.svg" for name in OF_A_COMPARISON]
    return {path.stem: texts(path) for path in found.files}


def texts(path):
    """All texts of an svg, which therefore is well-formed."""
    return [part.text for part in tree.parse(path).iter() if part.tag.endswith("}text")]


def test_a_comparison_shows_every_picture_with_a_title_that_says_what_it_is_about(drawn):
    for name, found in drawn.items():
        assert any(text.startswith(ABOUT) for text in found), name


@pytest.mark.parametrize("name", [*CURVES, "spread"])
def test_methods_are_named_in_plain_text_beside_their_lines(name, drawn):
    for method in METHODS:
        assert any(text.startswith(method) for text in drawn[name]), method
    assert any("accuracy (%)" in text for text in drawn[name])


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "accuracy-against-rounds": "communication rounds",
        "accuracy-against-rows": "rows whose gradient was taken (thousands)",
        "accuracy-against-bytes": "megabytes sent, up and down",
        "accuracy-against-seconds": "seconds in rounds",
        "gain": "clients, sorted by gain (%)",
        "partition": "what each group calls the source's labels",
        f"spectrum-{PFLMF}": "cut: rank 2",
        f"coordinates-{PFLMF}": "colour and number: planted group",
    }.items(),
)
def test_axes_and_legends_say_what_they_show(name, words, drawn):
    assert words in drawn[name]


def test_a_run_shows_what_it_can_and_one_line_says_why_not_the_rest(trained, tmp_path, capsys):
    assert command("plot", trained, "--out", tmp_path, "--format", "png,pdf") == 0
    lines = capsys.readouterr().out.splitlines()
    names = [*CURVES, "spread", "newcomers", "partition"]
    wanted = [str(tmp_path / f"{name}.{form}") for name in names for form in ("png", "pdf")]
    assert lines[: len(wanted)] == wanted
    assert lines[len(wanted) :] == [
        "skipped gain: a single run has no local beside it: plot a comparison that has",
        "skipped coordinates: no method here keeps coordinates",
        "skipped spectrum: no method here keeps coordinates",
    ]
    assert (tmp_path / "spread.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "spread.pdf").read_bytes().startswith(b"%PDF")


def test_new_clients_have_a_line_over_the_rows_they_give(trained, tmp_path):
    found = handspan.plot(trained, tmp_path, formats=["svg"])
    told = texts(next(path for path in found.files if path.stem == "newcomers"))
    for words in ("rows that a new client gives", "mean over new clients", "0", "20", "all"):
        assert words in told


def test_many_groups_are_not_drawn_line_by_line_and_the_table_says_what_it_leaves_out(tmp_path):
    few = ("--clients", "30", "--rounds", "1", "--partition", "permuted:30")
    assert command("run", "local", *COMMON, *few, "--out", tmp_path / "r") == 0
    handspan.plot(tmp_path / "r", tmp_path / "out", formats=["svg"])
    told = texts(tmp_path / "out" / "partition.svg")
    assert "what each group calls the source's labels (20 of 30 groups)" in told
    assert "group 19" in told and "group 20" not in told


def test_pictures_lie_in_the_folder_itself_unless_told_otherwise(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "r")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    found = handspan.plot(run, formats=["svg"])
    assert {path.parent for path in found.files} == {run / "pictures"}
    assert all(path.read_bytes() == content for path, content in before.items()), "read only"
    assert not list(run.rglob("*.partial"))


def test_the_same_folder_gives_the_same_bytes(trained, tmp_path):
    one, other = (
        handspan.plot(trained, tmp_path / name, formats=["svg", "pdf"]).files for name in "ab"
    )
    for first, second in zip(one, other, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name


def test_the_callers_settings_of_matplotlib_stay_as_they_are(trained, tmp_path):
    import matplotlib

    with matplotlib.rc_context({"font.size": 17, "svg.fonttype": "path"}):
        before = dict(matplotlib.rcParams)
        path = handspan.plot(trained, tmp_path, formats=["svg"]).files[0]
        assert dict(matplotlib.rcParams) == before
    assert "communication rounds" in texts(path), "nor do they reach the pictures"


@pytest.fixture
def given(tmp_path):
    """A run on data that were given from Python, and these data."""
    data = load_data("digits", partition="permuted:2", num_clients=12, seed=0)
    handspan.fit(METHODS[2], data, rounds=1, engine="loop", threads=1, out=tmp_path / "run")
    return tmp_path / "run", data


def test_data_given_from_python_are_asked_for_and_then_used(given, tmp_path):
    folder, data = given
    found = handspan.plot(folder, tmp_path / "a", formats=["svg"])
    because = "the data were given from Python: call handspan.plot with data="
    assert found.skipped["partition"] == found.skipped["coordinates"] == because
    found = handspan.plot(folder, tmp_path / "b", formats=["svg"], data=data)
    assert {"partition", "coordinates", "spectrum"} <= {path.stem for path in found.files}


def test_a_single_evaluation_makes_no_line(given, tmp_path):
    found = handspan.plot(given[0], tmp_path / "a", formats=["svg"])
    assert {found.skipped[name] for name in CURVES} == {
        "there was a single evaluation, and a line needs two: lower --eval-every"
    }


def test_a_comparison_saved_from_python_shows_what_its_table_holds(given, tmp_path):
    table = handspan.compare(
        ["local", "fedavg"], given[1], seeds=1, rounds=2, engine="loop", threads=1
    )
    found = handspan.plot(table.save(tmp_path / "c"), tmp_path / "out", formats=["svg"])
    assert [path.stem for path in found.files] == ["spread", "gain"]
    assert found.skipped[CURVES[0]] == "the folders hold no history of single evaluations"


def test_private_coordinates_on_disk_and_inside_other_records_are_found(tmp_path):
    words = ("run", "pflmf+gate:factor=head:rank=2", *COMMON, "--store", "disk")
    assert command(*words, "--rounds", "1", "--out", tmp_path / "r") == 0
    found = handspan.plot(tmp_path / "r", tmp_path / "out", formats=["svg"])
    assert {"coordinates", "spectrum"} <= {path.stem for path in found.files}
    (told,) = [text for text in texts(tmp_path / "out" / "coordinates.svg") if "took part" in text]
    assert told == "not shown: 6 clients that never took part", "half of 12 did, in one round"


def complaint(capsys, *words):
    assert command("plot", *words) == 2
    told = capsys.readouterr().err
    assert told.startswith("handspan: ") and "Traceback" not in told
    assert told.count("\n") == 1, "one sentence"
    return told


def test_what_is_no_folder_of_handspan_is_refused(tmp_path, capsys):
    assert "there is no folder" in complaint(capsys, tmp_path / "nothing")
    assert "neither a run nor a comparison" in complaint(capsys, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_not_finished_is_refused(compared, trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "r")
    RunFolder(run).summary_path.unlink()
    assert "has not finished" in complaint(capsys, run)
    whole = shutil.copytree(compared, tmp_path / "c")
    rows = json.loads((whole / "comparison.json").read_text())
    (whole / "comparison.json").write_text(json.dumps(rows[:-1]))
    told = complaint(capsys, whole)
    assert "1 runs" in told and f"{METHODS[2]}, seed 1" in told
    assert not (run / "pictures").exists() and not (whole / "pictures").exists()


def test_unknown_formats_are_refused_before_anything_is_drawn(trained, tmp_path, capsys):
    told = complaint(capsys, trained, "--format", "png,svgg", "--out", tmp_path / "out")
    assert "unknown format 'svgg'" in told and "did you mean 'svg'" in told
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_hold_pictures_is_told(trained, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert "cannot create" in complaint(capsys, trained, "--out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_without_matplotlib_the_remedy_is_told(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = complaint(capsys, trained, "--out", tmp_path / "out")
    assert "pip install 'handspan[plots]'" in told
    assert not (tmp_path / "out").exists()


def test_a_source_that_has_changed_since_the_run_is_told(tmp_path):
    source = tmp_path / "rows.npz"
    rng = np.random.default_rng(0)

    def save(labels):
        np.savez(source, x=rng.normal(size=(60, 4)), y=labels)

    save(np.arange(60) % 3)
    few = ("--rounds", "1", "--clients", "4", "--cohort", "4", "--partition", "dirichlet:1")
    words = ("run", "fedavg", "--data", source, *COMMON, *few, "--out", tmp_path / "r")
    assert command(*words) == 0
    save(np.arange(60) // 30)
    found = handspan.plot(tmp_path / "r", tmp_path / "out", formats=["svg"])
    assert "has changed since the run" in found.skipped["partition"]
