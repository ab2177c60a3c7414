"""Every mistake gets one sentence with its remedy and exit code 2, and damages nothing."""

import re
import shlex

import numpy as np
import pytest
import scipy.sparse

from handspan.cli import main


def complain(call, words, told):
    """Call the command line wrongly, and look at how it says so."""
    code, _, complaint = call(*words)
    assert code == 2, complaint
    assert told in complaint
    lines = complaint.splitlines()
    assert len(lines) == 1 and lines[0].startswith("handspan: "), complaint
    return lines[0]


OPTIONS = {
    "run fedavgg": "did you mean 'fedavg'",
    "run fedavg+fft": "did you mean 'ft'",
    "run ''": "unknown method ''",
    "run fedavg+ft+ft": "+ft stands twice",
    "run fedmgs+ft": "trains no model on labels",
    "run fedrep:rnak=3": "no setting 'rnak'",
    "run pflmf:rnk=3": "did you mean 'rank'",
    "run pflmf:rank=abc": "rank takes a whole number",
    "run pflmf:rank=0": "rank must be at least 1",
    "run pflmf:rank=500": "rank 500 exceeds the 100 clients",
    "run pflmf:rank": "write key=value",
    "run ifca:k=1000000": "k 1000000 exceeds the 100 clients",
    "run fedmgs:num_components=2000": "exceeds the 1797 rows",
    "run pflmf:preset=algorithm1:scaled=true": "drop scaled",
    "run pflmf:damping=0.1": "damping belongs to scaled=true",
    "run pflmf:bernoulli_mean=expected": "belongs to participation=bernoulli",
    "run fedavg:beta1=0.5": "beta1 belongs to server_optimizer=adam",
    "run fedavg:server_optimizer=adm": "must be sgd, adam or yogi",
    "run local+ft:ft_steps=-1": "at least 0",
    "run fedavg --set foo": "key=value",
    "run fedavg --set rank=3": "no setting 'rank'",
    "run fedavg --partition permutd:5": "did you mean 'permuted'",
    "run fedavg --partition dirichlet:0": "must be a positive number",
    "run fedavg --partition dirichlet:0.5:50": "need 5000 rows",
    "run fedavg --partition shards:20:exact": "impossible",
    "run fedavg --partition shards:2:exct": "write the partition as shards:S[:exact]",
    "run fedavg --partition permuted:101": "more groups than the 100 clients",
    "run fedavg --partition natural": "has no client ids",
    "run fedavg --partition natural:writer": "has no array 'writer'",
    "run fedavg --data missing.npz": "no file missing.npz",
    "run fedavg --data häßlich.npz": "no file häßlich.npz",
    "run fedavg --data digitz": "did you mean 'digits'",
    "run fedavg --data .": "cannot read .",
    "run fedavg --data ''": "unknown source ''",
    "run fedavg --keep-test": "no test rows of its own",
    "run fedavg --clients 0": "at least 1",
    "run fedavg --clients 2000": "too many",
    "run fedavg --clients 99999999999999999999": "too many",
    "run fedavg --clients many": "clients takes a whole number",
    "run fedavg --holdout-clients 100": "cannot hold out",
    "run fedavg --cohort 500": "does not fit a federation of 100",
    "run fedavg --cohort 0": "at least one client",
    "run fedavg --cohort -3": "at least one client",
    "run fedavg --cohort 1.5": "give one in (0, 1]",
    "run fedavg --cohort x": "cohort takes a fraction",
    "run fedavg --rounds 0": "at least 1",
    "run fedavg --rounds 1e400": "rounds takes a whole number",
    "run fedavg --rounds 2.5": "rounds takes a whole number",
    "run fedavg --seed -1": "between 0 and 2**63 - 1",
    "run fedavg --seed 9223372036854775808": "between 0 and 2**63 - 1",
    "run fedavg --steps 3 --epochs 2": "not both",
    "run fedavg --steps -1": "at least 1",
    "run fedavg --batch-size 0": "at least 1",
    "run fedavg --lr nan": "takes a number",
    "run fedavg --lr -0.1": "at least 0",
    "run fedavg --momentum 1": "must lie in [0, 1)",
    "run fedavg --nesterov": "needs momentum",
    "run fedavg --schedule cos": "choose constant, exponential or cosine",
    "run fedavg --decay 0.5": "belongs to the exponential schedule",
    "run fedavg --model nope": "no model 'nope'",
    "run fedavg --model ''": "no model ''",
    "run fedavg --model nope.py:make": "no model file 'nope.py'",
    "run fedmgs --model mlp": "takes no model",
    "run fedavg --engine warp": "unknown engine",
    "run fedavg --engine loop --workers 2": "engine loop has no workers: add --engine workers",
    "run fedavg --workers 0": "workers must be at least 1",
    "run fedavg --device tpu": "unknown device",
    "run fedavg --dtype float16": "unknown dtype",
    "run fedavg --threads 0": "at least 1",
    "run fedavg --threads 99999": "at most 1024",
    "run fedavg --store disk": "give --out",
    "run fedavg --metrics accurcy": "did you mean 'accuracy'",
    "run fedavg --metrics accuracy,accuracy": "stands twice",
    "run fedavg --metrics rmse": "rmse scores regression",
    "run fedavg --task matrix": "needs labels",
    "run perfedsi": "needs side information",
    "run fedavg_groups": "needs planted groups",
    "run fedavg --resume": "--resume needs --out",
    "run fedavg --config none.toml": "cannot read none.toml",
    "run fedavg --frob 3": "No such option",
    "run": "Missing argument",
    "runn fedavg": "No such command",
    "compare ''": "name at least one method",
    "compare fedavg,fedavg": "stands twice",
    "compare fedavg --set rank=3": "none of the methods",
    "compare fedavg --seeds 0": "at least 1",
    "compare fedavg --seeds 99999999999999999999": "at most 10000",
    "compare fedavg --equal rowz:9": "rounds, rows:N or bytes:N",
    "compare fedavg --shard 3/2": "numbered 1/2 to 2/2",
    "adapt nowhere --data x.npz": "no file x.npz",
    "predict nowhere --client 0 --data x.npz --out p": "no file x.npz",
    "export nowhere --client 0 --to m.safetensors": "no run folder",
    "export nowhere --client one --to m.safetensors": "valid integer",
    "plot nowhere": "no folder nowhere",
}


@pytest.mark.parametrize("line", OPTIONS)
def test_an_option_that_cannot_be_meant(line, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = ["--out", "results"] if line.split()[0] in ("run", "compare") else []
    out = out if line not in ("run", "run fedavg --store disk", "run fedavg --resume") else []
    complain(call, [*shlex.split(line), *out], OPTIONS[line])
    assert not list(tmp_path.iterdir()), "nothing is left on disk"


def _with(**changed):
    return lambda arrays: {**arrays, **{name: make(arrays) for name, make in changed.items()}}


def _without(*names):
    return lambda arrays: {name: array for name, array in arrays.items() if name not in names}


def _put(name, place, value):
    def change(arrays):
        array = arrays[name].astype(np.result_type(arrays[name], type(value)))
        array[place] = value
        return array

    return _with(**{name: change})


def _compressed(**changed):
    def change(arrays):
        rows = scipy.sparse.csr_array(np.where(arrays["x"] > 0.5, arrays["x"], 0))
        parts = {"data": rows.data, "indices": rows.indices, "indptr": rows.indptr}
        parts["shape"] = np.array(rows.shape)
        parts.update({name: make(parts[name]) for name, make in changed.items()})
        return {**parts, "y": arrays["y"], "client": arrays["client"]}

    return change


FILES = {
    "x has NaN or infinity in row 3": _put("x", (3, 2), np.nan),
    "x has NaN or infinity in row 4": _put("x", (4, 0), np.inf),
    "y has NaN or infinity in row 5": _put("y", 5, np.nan),
    "label -1 in row 5": _put("y", 5, -1),
    "label 1000000000 in row 7": _put("y", 7, 10**9),
    "there are 200 rows": _with(y=lambda a: a["y"][:-1]),
    "needs one class number per row": _with(y=lambda a: np.stack([a["y"]] * 2, 1)),
    "y must hold numbers": _with(y=lambda a: np.array(["cat"] * 200)),
    "y in bad.npz is an array of Python objects": _with(y=lambda a: np.array([None] * 200)),
    "x in bad.npz is an array of Python objects": _with(x=lambda a: a["x"].astype(object)),
    "x of bad.npz must hold numbers": _with(x=lambda a: a["x"].astype(complex)),
    "x of bad.npz is empty": _with(x=lambda a: a["x"][:0]),
    "x of bad.npz must be an array": _with(x=lambda a: np.float32(3)),
    "client '99' has only one row": _put("client", 0, 99),
    "client of bad.npz has shape (5,)": _with(client=lambda a: a["client"][:5]),
    "client ids has NaN": _put("client", 3, np.nan),
    "must hold x, or x_train and x_test": _without("x"),
    "fedavg needs labels y": _without("y"),
    "bad.npz has no client ids": _without("client"),
    "side has 7 rows for 10 clients": _with(side=lambda a: a["side"][:7]),
    "side of bad.npz has NaN": _put("side", (2, 1), np.nan),
    "rows of different shapes": lambda a: {
        **{f"{name}_train": a[name] for name in ("x", "y")},
        "x_test": a["x"][:, :5], "y_test": a["y"],
    },
    "indptr and shape of bad.npz do not make a sparse matrix": _compressed(
        indices=lambda part: part + 100
    ),
    "do not make a sparse matrix: save": _compressed(indptr=lambda part: part[::-1]),
    "of bad.npz do not make": _compressed(shape=lambda part: part[:1]),
    "row 0 (counted from 0) of bad.npz": _compressed(data=lambda part: part * np.nan),
}  # fmt: skip


@pytest.mark.parametrize("told", FILES)
def test_a_file_that_cannot_be_used(told, call, arrays, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("bad.npz", **FILES[told](arrays))
    words = ["run", "fedavg", "--data", "bad.npz", "--partition", "natural", "--out", "results"]
    complain(call, words, told)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.npz"]


@pytest.mark.parametrize("size", [0, 10, 500, -1])
def test_a_file_that_was_cut_off(size, call, table, tmp_path):
    (tmp_path / "bad.npz").write_bytes(table.read_bytes()[:size])
    complain(call, ["run", "fedavg", "--data", tmp_path / "bad.npz"], "damaged, cut off or no .npz")


def test_what_is_no_file(call, tmp_path):
    (tmp_path / "a.npz").mkdir()
    complain(call, ["run", "fedavg", "--data", tmp_path / "a.npz"], "is a folder")
    (tmp_path / "b.npz").symlink_to(tmp_path / "gone.npz")
    complain(call, ["run", "fedavg", "--data", tmp_path / "b.npz"], "no file")


MODELS = {
    "raise RuntimeError('boom')": "line 1: RuntimeError: boom",
    "def make_model():\n    raise ValueError('boom')": "line 2: ValueError: boom",
    "def make_model(:": "SyntaxError",
    "import sys\nsys.exit(3)": "SystemExit: 3",
    "import nowhere_to_be_found": "No module named 'nowhere_to_be_found'",
    "def make_modle(): ...": "did you mean 'make_modle'",
    "def make_model():\n    return 3": "returned int, not a torch module",
    "def make_model(depth): ...": "asks for 'depth'",
    "from torch import nn\ndef make_model():\n    return nn.Flatten()": "no trainable parameters",
    "from torch import nn\ndef make_model():\n    return nn.Linear(3, 2)": "forward failed",
    "from torch import nn\ndef make_model():\n    return nn.Linear(6, 2)": "2 outputs where 3",
}


@pytest.mark.parametrize("text", MODELS)
def test_a_model_file_that_cannot_be_used(text, call, table, tmp_path):
    (tmp_path / "net.py").write_text(text + "\n")
    words = ["run", "fedavg", "--data", table, "--clients", 10, "--model"]
    complain(call, [*words, tmp_path / "net.py"], MODELS[text])


CONFIGS = {
    "roundz = 5": "did you mean 'rounds'",
    "rounds = = 5": "is no TOML file",
    "rounds = 'five'": "rounds takes a whole number, not 'five'",
    "rounds = [1, 2]": "rounds takes a whole number",
    "rounds = 1979-05-27": "rounds takes a whole number",
    "lr = 1\nlearning_rate = 2": "gives learning_rate twice",
    "set = 3": "[set] must be a table",
    "[set]\nwieghts = 'uniform'": "did you mean 'weights'",
    "[training]\nrounds = 5": "unknown option 'training'",
    "method = 'fedavg'": "unknown option 'method'",
}


@pytest.mark.parametrize("text", CONFIGS)
def test_a_configuration_that_cannot_be_used(text, call, tmp_path):
    (tmp_path / "c.toml").write_text(text + "\n")
    complain(call, ["run", "fedavg", "--config", tmp_path / "c.toml"], CONFIGS[text])


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_a_configuration_that_is_no_text(content, call, tmp_path):
    path = tmp_path / "c.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    complain(call, ["run", "fedavg", "--config", path], "c.toml")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Make runs of a network, of one that reads side information, and of a factorisation."""
    folder = tmp_path_factory.mktemp("mistakes")
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(60, 6)).astype("float32"), "y": np.arange(60) % 3}
    rows |= {"client": np.repeat(np.arange(6), 10), "side": rng.normal(size=(6, 3))}
    np.savez(folder / "train.npz", **rows)
    common = f"--data {folder / 'train.npz'} --partition natural --rounds 1 --engine loop --steps 1"
    with pytest.MonkeyPatch.context() as patch:
        for method in ("fedavg", "perfedsi", "fedmgs:num_components=2"):
            words = f"run {method} {common} --threads 1 --out {folder / method.split(':')[0]}"
            patch.setattr("sys.argv", ["handspan", *words.split()])
            main()
    return folder


GOOD = {"x": np.zeros((8, 6), dtype="float32"), "y": np.arange(8) % 3}
SERVED = {
    "predict RUN/fedavg --client 6 --data new.npz --out p": ("there is no client 6", {}),
    "predict RUN/fedavg --client -1 --data new.npz --out p": ("there is no client -1", {}),
    "predict RUN/fedavg --client 1 --data new.npz --out q": (
        "rows have shape (9,)", {"x": np.zeros((3, 9))},
    ),
    "predict RUN/fedavg --client 1 --data new.npz --out r": ("is empty", {"x": GOOD["x"][:0]}),
    "predict RUN/fedavg --client 1 --data new.npz --out s": ("NaN", {"x": GOOD["x"] * np.nan}),
    "predict RUN/fedavg --client 1 --data new.npz --out t": ("no array 'x'", {"x": None}),
    "predict RUN/fedavg --client 1 --data none.npz --out p": ("no file none.npz", {}),
    "predict RUN/fedavg --client 1 --data new.npz --out .": ("it is a folder", {}),
    "predict RUN/fedavg --client 1 --data new.npz --out new.npz/p": ("Not a directory", {}),
    "predict RUN/fedavg --client 1 --data new.npz --out no/where/p": ("No such file", {}),
    "predict RUN --client 1 --data new.npz --out p": ("no run folder", {}),
    "predict RUN/fedmgs --client 1 --data new.npz --out p": ("no personal models", {}),
    "export RUN/fedavg --client 6 --to m": ("there is no client 6", {}),
    "export RUN/fedavg --client 1 --to .": ("it is a folder", {}),
    "export RUN/fedavg --client 1 --to new.npz/m": ("Not a directory", {}),
    "export RUN/fedmgs --client 1 --to m": ("no personal models", {}),
    "adapt RUN/fedavg --data new.npz": ("no array 'y'", {"y": None}),
    "adapt RUN/fedavg --data new.npz --steps 1": ("label 3 in row 3", {"y": np.arange(8) % 4}),
    "adapt RUN/fedavg --data new.npz --steps 2": ("label -1", {"y": np.arange(8) % 3 - 1}),
    "adapt RUN/fedavg --data new.npz --steps 3": ("y has shape (7,)", {"y": np.arange(7) % 3}),
    "adapt RUN/fedavg --data new.npz --steps 4": ("one id per row", {"client": np.arange(3)}),
    "adapt RUN/fedavg --data new.npz --steps 0": ("at least 1", {}),
    "adapt RUN/fedavg --data new.npz --out new.npz/a": ("Not a directory", {}),
    "adapt RUN/perfedsi --data new.npz": ("needs its side information: 3", {}),
    "adapt RUN/perfedsi --data new.npz --steps 1": ("3 numbers, not 5", {"side": np.ones((1, 5))}),
    "adapt RUN/fedmgs --data new.npz": ("serves no new clients", {}),
}  # fmt: skip


@pytest.mark.parametrize("line", SERVED)
def test_a_request_that_a_run_cannot_serve(line, call, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told, changed = SERVED[line]
    rows = {name: array for name, array in {**GOOD, **changed}.items() if array is not None}
    np.savez("new.npz", **rows)
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    complain(call, line.replace("RUN", str(trained)).split(), told)
    assert [path.name for path in tmp_path.iterdir()] == ["new.npz"]
    assert all(path.read_bytes() == content for path, content in before.items())


def test_places_that_cannot_be_written_to(call, tmp_path):
    (tmp_path / "file").write_text("precious")
    for out, told in {"file": "is no run folder", "file/below": "Not a directory"}.items():
        complain(call, ["run", "fedavg", "--clients", 10, "--out", tmp_path / out], told)
        words = ["compare", "fedavg", "--seeds", 1, "--clients", 10, "--out", tmp_path / out]
        complain(call, words, "cannot create")
    words = ["partition", "--clients", 10, "--out", tmp_path / "file" / "p.npz"]
    complain(call, words, "Not a directory")
    assert (tmp_path / "file").read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_complaint_is_one_sentence_even_where_torch_says_more(call, table, tmp_path):
    text = "def make_model():\n    raise ValueError('one\\ntwo\\n\\nthree')\n"
    (tmp_path / "net.py").write_text(text)
    told = complain(
        call, ["run", "fedavg", "--data", table, "--clients", 10, "--model", tmp_path / "net.py"],
        "ValueError: one",
    )  # fmt: skip
    assert re.search(r"one.*two.*three", told)
