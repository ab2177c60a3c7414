"""The command line as users meet it: results, files, and one sentence for every mistake."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from handspan.cli import main

QUICK = ["--clients", "10", "--rounds", "2", "--engine", "loop", "--threads", "1"]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and complaint of ``handspan ARGUMENTS``."""
    before, sys.argv = sys.argv, ["handspan", *arguments]
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Make a table of ten clients with 20 rows each and three side columns."""
    rng = np.random.default_rng(0)
    path = tmp_path / "table.npz"
    np.savez(
        path,
        x=rng.normal(size=(200, 6)).astype("float32"),
        y=rng.integers(0, 3, 200),
        client=np.repeat(np.arange(10), 20),
        side=rng.normal(size=(10, 3)),
    )
    return path


def test_a_profile_tells_where_the_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = call(capsys, "run", "fedavg", *QUICK, "--profile")
    assert code == 0
    for part in ("plan", "gather", "steps", "reduce", "evaluate", "save", "other"):
        assert re.search(rf"^ *{part} +\d+\.\d\d +\d+%", text, re.MULTILINE), part


def test_run_prints_a_table_and_writes_the_run_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "x"
    code, text, _ = call(
        capsys, "run", "fedrep", *QUICK, "--partition", "permuted:2", "--out", str(out)
    )
    assert code == 0
    assert "fedrep" in text and "accuracy %" in text
    summary = json.loads((out / "summary.json").read_text())
    wanted = {
        "method", "rounds", "seconds", "seconds_total", "personal_accuracy_mean",
        "personal_accuracy_pooled", "global_accuracy_pooled", "worst_decile",
        "heldout_accuracy_mean", "rows", "forward_rows", "bytes_up", "bytes_down", "engine",
    }  # fmt: skip
    assert wanted <= set(summary)
    assert summary["global_accuracy_pooled"] is None
    assert summary["heldout_accuracy_mean"] is None
    assert 0 <= summary["personal_accuracy_mean"] <= 1
    clients = pyarrow.parquet.read_table(out / "clients.parquet")
    assert clients.num_rows == 10
    assert {"client", "group", "num_test", "personal_accuracy"} <= set(clients.column_names)
    assert len((out / "history.jsonl").read_text().splitlines()) == 1
    assert (out / "checkpoint.safetensors").stat().st_mode & 0o777 == 0o600


def test_compare_writes_one_summary_per_method_and_seed_and_takes_over_finished_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [
        "compare", "local,fedavg+ft:ft_steps=3", *QUICK, "--seeds", "2", "--holdout-clients", "2",
        "--out", str(tmp_path / "c"),
    ]  # fmt: skip
    code, text, _ = call(capsys, *arguments)
    assert code == 0
    rows = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("local", 0), ("fedavg+ft:ft_steps=3", 0), ("local", 1), ("fedavg+ft:ft_steps=3", 1),
    ]  # fmt: skip
    assert all(row["heldout_accuracy_mean"] is not None for row in rows)
    assert " *" in text, "the best method is marked"
    code, again, _ = call(capsys, *arguments)
    assert code == 0
    assert again == text, "finished runs are taken over, seconds included"


def test_set_in_compare_goes_to_every_method_that_has_the_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, _ = call(
        capsys, "compare", "fedavg,ifca:k=2", *QUICK, "--seeds", "1", "--set", "k=3",
        "--set", "weights=uniform", "--out", str(tmp_path / "c"),
    )  # fmt: skip
    assert code == 0
    config = json.loads((tmp_path / "c" / "ifca-k=2-seed0" / "config.json").read_text())
    assert config["settings"] == {"k": "3", "weights": "uniform"}


def test_options_come_from_a_toml_file_and_the_command_line_goes_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "options.toml"
    file.write_text('rounds = 5\nclients = 10\nlr = 0.2\nthreads = 1\n[set]\nweights = "uniform"\n')
    out = tmp_path / "x"
    code, _, _ = call(
        capsys, "run", "fedavg", "--config", str(file), "--rounds", "2", "--engine", "loop",
        "--out", str(out),
    )  # fmt: skip
    assert code == 0
    config = json.loads((out / "config.json").read_text())
    assert config["training"]["rounds"] == 2
    assert config["training"]["learning_rate"] == 0.2
    assert config["settings"] == {"weights": "uniform"}


def test_new_clients_predictions_and_export(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, table: Path
) -> None:
    out = str(tmp_path / "run")
    natural = ["--data", str(table), "--partition", "natural", "--cohort", "0.5"]
    code, _, complaint = call(capsys, "run", "perfedsi", *QUICK[2:], *natural, "--out", out)
    assert code == 0, complaint
    before = {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}
    code, text, _ = call(capsys, "adapt", out, "--data", str(table))
    assert code == 0
    assert re.search(r"mean accuracy \d+\.\d % over 10 new clients", text)
    rows = tmp_path / "rows.npz"
    np.savez(rows, x=np.zeros((7, 6), dtype="float32"))
    target = tmp_path / "p.parquet"
    code, _, _ = call(
        capsys, "predict", out, "--client", "7", "--data", str(rows), "--out", str(target)
    )
    assert code == 0
    predicted = pyarrow.parquet.read_table(target).to_pydict()
    total = [sum(predicted[f"probability_{c}"][row] for c in range(3)) for row in range(7)]
    assert total == pytest.approx([1.0] * 7)
    model = tmp_path / "m.safetensors"
    code, _, _ = call(capsys, "export", out, "--client", "7", "--to", str(model))
    assert code == 0
    assert model.stat().st_mode & 0o777 == 0o600
    assert all(path.read_bytes() == content for path, content in before.items()), "read only"


def test_version_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    from handspan import __version__
    from handspan.registry import methods

    assert call(capsys, "--version") == (0, f"handspan {__version__}\n", "")
    _, text, _ = call(capsys, "list")
    assert all(name in text for name in methods())


def test_divergence_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = call(capsys, "run", "fedavg", *QUICK, "--lr", "1e30")
    assert code == 0
    assert "fedavg diverged" in text


def test_progress_tells_rounds_speed_and_the_score_in_per_cent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from handspan import commands

    clock = iter([10.0, 10.0, 12.0])
    monkeypatch.setattr(commands.time, "perf_counter", lambda: next(clock))
    with commands.bars() as progress:
        assert progress.disable, "silence where nobody looks"
        tell = commands.follow(progress, "fedavg")
        tell(1, 9, {})
        tell(5, 9, {"personal_loss_mean": 1.0, "personal_accuracy_mean": 0.664})
        (task,) = progress.tasks
        assert (task.completed, task.total) == (5, 9)
        assert task.fields["status"] == "round 5/9, 2.0 rounds/s, personal accuracy 66.4 %"
