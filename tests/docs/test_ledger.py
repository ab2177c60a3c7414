"""The ledger: formulas are what is sent, and the tables tell what the methods do."""

import dataclasses

import pytest
from typer.testing import CliRunner

from handspan import ledger
from handspan.cli import app
from handspan.core import keys
from handspan.core.records import tensors
from handspan.registry import methods, parse
from handspan.testing.toys import NUM_GROUPS, problem

OWN = {n: m for n, m in methods().items() if m.build.__module__.startswith("handspan.")}


def symbols(made, config):
    """Values of the symbols of the formulas on a toy problem, counted from its task and rows."""
    width = made.data.row_shape[-1]
    known = {"p": width, "groups": NUM_GROUPS, **dataclasses.asdict(config)}
    if made.setting.task is None:
        return known
    task = made.setting.task
    params, buffers = task.init(keys.key(0))
    norms = {name.rpartition(".")[0] for name in buffers}
    size = {name: value.numel() for name, value in params.items()}
    head = sum(size[name] for name in task.head)
    side = None if made.data.side is None else made.data.side[0]
    features = task.features(params, buffers, made.data.x[:2], side)
    return {
        **known,
        "d": sum(size.values()),
        "h": head,
        "b": sum(size.values()) - head,
        "v": sum(count for name, count in size.items() if name.rpartition(".")[0] in norms),
        "c": task.num_outputs,
        "f": features.shape[-1],
    }


@pytest.mark.parametrize("name", OWN)
def test_formulas_are_what_is_sent(name):
    spec = parse(name)
    made = problem(spec.method)
    sent = ledger.first_uploads(spec.build(made.setting), made.data)
    counts = {p: sum(t.numel() for t in tensors(u)) for p, (_, u) in sent.items()}
    known = symbols(made, spec.config)
    for phase, formula in spec.method.numbers.items():
        assert counts[phase] == eval(formula, {"__builtins__": {}}, known), f"{phase}: {formula}"
    if name != "span":  # its candidates depend on the federation
        assert {p for p, count in counts.items() if count} == set(spec.method.numbers)


def test_single_uploads_are_shown_where_the_method_compares_them():
    shown = {e.method.name: e.shown for e in map(ledger.entry, map(OWN.get, ("cfl", "fedmgs")))}
    assert shown == {"cfl": ("train", "test"), "fedmgs": ("scan",)}
    assert ledger.entry(OWN["ifca"]).shown == ("train",)
    assert ledger.entry(OWN["apfl"]).shown == ()


def test_rows_are_those_of_the_plan():
    fedavg, apfl = (ledger.entry(OWN[name]) for name in ("fedavg", "apfl"))
    assert fedavg.rows == 3 * 100 + 3 * 32  # 15 steps of 32 rows: three passes, and three steps
    assert apfl.rows == 2 * fedavg.rows
    assert ledger.entry(OWN["ifca"]).forward_rows == 10 * 100


def test_the_command_prints_the_tables(monkeypatch):
    monkeypatch.setattr(ledger, "entries", lambda: (ledger.entry(OWN["fedas"]),))
    done = CliRunner().invoke(app, ["list", "--detail"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for told in ("b + 1", "33,284", "Yang et al. 2024", "d = 8,970"):
        assert told in done.output
