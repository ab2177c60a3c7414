"""Tables with a client column: what becomes of each column, and every table that is refused."""

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from handspan.core.errors import HandspanError
from handspan.data import load_data, load_source
from handspan.data.table_text import split_columns, with_columns
from handspan.options import DataOptions, from_values

ROWS = 12
TABLE = {
    "client": [f"ward {row % 3}" for row in range(ROWS)],
    "age": [20 + row for row in range(ROWS)],
    "kind": [("b", "a", "c")[row % 3] for row in range(ROWS)],
    "weight": [row / 4 for row in range(ROWS)],
    "label": [row % 2 for row in range(ROWS)],
}


def write(tmp_path, columns, ending="csv"):
    path = tmp_path / f"made.{ending}"
    if ending == "parquet":
        parquet.write_table(pa.table(columns), path)
    else:
        lines = [",".join(columns)]
        lines += [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
        path.write_text("\n".join(lines) + "\n")
    return str(path)


def changed(**columns):
    made = {**TABLE, **columns}
    return {name: values for name, values in made.items() if values is not None}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_numbers_stay_and_texts_become_one_hot(tmp_path, ending):
    source = load_source(write(tmp_path, TABLE, ending))
    expected = np.zeros((ROWS, 5))
    expected[:, 0] = TABLE["age"]
    expected[np.arange(ROWS), [1 + "abc".index(kind) for kind in TABLE["kind"]]] = 1
    expected[:, 4] = TABLE["weight"]
    assert np.array_equal(source.x, expected) and source.kind == "table"
    assert source.y.tolist() == TABLE["label"] and source.classes == ()
    assert source.client.tolist() == TABLE["client"]
    assert set(source.fields) == {"client", "age", "kind"}
    assert source.fields["kind"].tolist() == TABLE["kind"]


def test_columns_are_standardised_by_training_rows(tmp_path):
    data = load_data(write(tmp_path, TABLE), partition="natural")
    assert data.names == ("ward 0", "ward 1", "ward 2") and data.num_classes == 2
    train = [
        data.x[int(start) : int(start + count)]
        for start, count in zip(data.offsets, data.num_train, strict=False)
    ]
    train = np.concatenate([rows.numpy() for rows in train])
    assert np.allclose(train.mean(axis=0), 0, atol=1e-6)
    assert np.allclose(train.std(axis=0), 1, atol=1e-6)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_columns_can_have_other_names(tmp_path, ending):
    columns = {"ward": TABLE["client"], "died": TABLE["label"], "age": TABLE["age"]}
    columns["beds"] = [10.5 + row % 3 for row in range(ROWS)]
    columns["town"] = ["xyx"[row % 3] for row in range(ROWS)]
    path = write(tmp_path, columns, ending)
    text = f"{path}:client=ward:label=died:side=beds,town"
    data = load_data(text, partition="natural", standardize=False)
    given = load_data(
        path,
        partition="natural",
        standardize=False,
        client_column="ward",
        label_column="died",
        side_columns=["beds", "town"],
    )
    assert data.fingerprint() == given.fingerprint() and data.info["source"] == text
    beds = 1.5**0.5  # standardised over the three wards
    assert np.allclose(data.side, [[-beds, 1, 0], [0, 0, 1], [beds, 1, 0]])
    assert data.row_shape == (1,)
    iid = load_data(text, num_clients=3)
    assert iid.side is None and "left out" in iid.info["remarks"][0]


def test_texts_can_be_labels_and_numbers_can_be_targets(tmp_path):
    text = load_source(write(tmp_path, changed(label=["no", "yes"] * 6)))
    assert text.y.tolist() == [0, 1] * 6 and text.classes == ("no", "yes")
    data = load_data(write(tmp_path, changed(label=["no", "yes"] * 6)), num_clients=3)
    assert data.info["classes"] == ["no", "yes"] and data.num_classes == 2
    real = write(tmp_path, changed(label=[row / 3 for row in range(ROWS)]))
    assert load_data(real, num_clients=3).task == "regression"
    whole = load_data(write(tmp_path, TABLE), num_clients=3, task="regression")
    assert whole.task == "regression"
    named_y = write(tmp_path, changed(label=None, y=TABLE["label"]))
    assert load_source(named_y).y.tolist() == TABLE["label"]
    unlabelled = write(tmp_path, changed(label=None))
    assert load_data(unlabelled, num_clients=3, task="matrix").task == "matrix"


def test_own_test_rows_are_kept(tmp_path):
    flags = ["true" if row >= 9 else "false" for row in range(ROWS)]
    data = load_data(write(tmp_path, changed(is_test=flags)), partition="natural", keep_test=True)
    assert data.num_test.tolist() == [1, 1, 1] and data.row_shape == (5,)


def test_ids_keep_their_kind(tmp_path):
    numbers = [10 * (row % 3) for row in range(ROWS)]
    assert load_source(write(tmp_path, changed(client=numbers))).client.tolist() == numbers
    padded = ["007", "7", "08"] * 4
    assert load_source(write(tmp_path, changed(client=padded))).client.tolist() == padded
    mixed = ["1", "x", "2"] * 4
    assert load_source(write(tmp_path, changed(client=mixed))).client.tolist() == mixed
    days = [datetime.date(2024, 1, 1 + row % 2) for row in range(ROWS)]
    by_day = load_source(write(tmp_path, changed(client=days), "parquet"))
    assert by_day.client[:2].tolist() == ["2024-01-01", "2024-01-02"]
    reals = load_source(write(tmp_path, changed(client=[1.5, 2.5] * 6), "parquet"))
    assert reals.client[:2].tolist() == ["1.5", "2.5"]


def test_other_columns_can_make_clients(tmp_path):
    data = load_data(write(tmp_path, TABLE), partition="natural:kind")
    assert data.names == ("a", "b", "c")
    with pytest.raises(HandspanError, match=r"no array 'weight'.*age, client, kind"):
        load_data(write(tmp_path, TABLE), partition="natural:weight")


def test_types_of_parquet_are_understood(tmp_path):
    columns = changed(
        age=pa.array(range(ROWS), pa.int8()),
        weight=pa.array([decimal.Decimal(f"{row}.25") for row in range(ROWS)]),
        kind=pa.array(TABLE["kind"]).dictionary_encode(),
        flag=[row % 2 == 0 for row in range(ROWS)],
        half=pa.array(np.arange(ROWS, dtype=np.float16)),
    )
    source = load_source(write(tmp_path, columns, "parquet"))
    assert source.x[3].tolist() == [3, 0, 1, 0, 3.25, 0, 3]
    small = changed(weight=None, age=pa.array(range(ROWS), pa.int16()))
    assert load_source(write(tmp_path, small, "parquet")).x.dtype == np.float32


def test_quoted_commas_and_line_breaks_belong_to_their_texts(tmp_path):
    path = tmp_path / "made.csv"
    rows = [f'"ward, {row % 2}",{row},{row % 2},"a\nb"' for row in range(6)]
    path.write_text("client,x,label,note\n" + "\n".join(rows))
    source = load_source(str(path))
    assert source.client[1] == "ward, 1" and source.x[2].tolist() == [2, 1]


GAP = [*range(7), "", *range(4)]


@pytest.mark.parametrize(
    ("columns", "given", "words"),
    [
        (changed(age=GAP), "", r"column 'age' of .*made\.csv has no value in row 7"),
        (changed(kind=["a"] * 3 + ["NA"] + ["b"] * 8), "", "'kind'.* no value in row 3"),
        (changed(label=GAP), "", "'label'.* no value in row 7"),
        (changed(client=["a", ""] * 6), "", "'client'.* no value in row 1"),
        (changed(weight=[1.5] * 11 + ["inf"]), "", "'weight'.* NaN or infinity in row 11"),
        (changed(age=[1, 2, "old"] * 4), "", "'age'.* mixes numbers.*row 0 .*'1', row 2 'old'"),
        (changed(label=[0, 1, "x"] * 4), "", "'label'.* mixes numbers and texts"),
        (changed(client=["one"] * 12), "", "single client .one. in all rows"),
        (changed(ward=["one"] * 12), ":client=ward", "'ward'.*single client"),
        (TABLE, ":client=wart", "no column 'wart'"),
        (TABLE, ":client=clint", "did you mean 'client'"),
        (TABLE, ":label=lable", "did you mean 'label'"),
        (TABLE, ":side=wieght", "did you mean 'weight'"),
        (TABLE, ":side=label", "'label'.* named twice"),
        (TABLE, ":side=age,age", "'age'.* named twice"),
        (TABLE, ":label=", "names no column behind label="),
        (TABLE, ":label=a:label=b", "label= twice"),
        (changed(client=None), ":side=age", "no client column"),
        (changed(label=None), "", "no column 'label' or 'y'.*--label-column.*columns: client, age"),
        (changed(kind=[f"name {row}" for row in range(12)] * 5), "", ""),
        (changed(is_test=[0, 1, 2] * 4), "", "'is_test'.* one true or false"),
        (changed(label=[-1, 1] * 6), "", "label -1 in row 0 .*made.csv.* is negative"),
        ({"client": [1, 2], "label": [0, 1]}, "", "no columns left for features"),
        (changed(day=["2024-01-01"] * 12), "", "'day'.* holds date32.day., which is neither"),
        ({"0.5": [1, 2], "1": [3, 4]}, "", "name its columns in its first line"),
    ],
)
def test_bad_tables_get_one_clear_sentence(tmp_path, columns, given, words):
    if not words:  # too many texts: as many as there are rows
        columns = {name: list(values)[:12] * 5 for name, values in TABLE.items()}
        columns["kind"], words = [f"name {row}" for row in range(60)], "60 different texts"
    path = write(tmp_path, columns)
    with pytest.raises(HandspanError, match=words):
        load_source(path + given)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: its first line"),
        (b"client,label,x\n", "no rows below its header"),
        (b"client,label,x\n1,0,2\n2,1\n", "2 entries in line 3, but its header names 3"),
        (b"client,label,x,x\n1,0,2,3\n2,1,3,4\n", "two columns 'x'"),
        (b"client;label;x\n1;0;2\n2;1;3\n", "separate its columns by commas"),
        (b"client,label,x\na,0,\xff\xfe\nb,1,\xff\n", "'x' .*is not UTF-8"),
        (b"client,label,x\n\xff,0,1\n\xfe,1,2\n", "cannot be read as a table|not UTF-8"),
        (b"\x00\x01\x02\x03" * 99, "made.csv"),
    ],
)
def test_files_that_are_no_tables_get_one_clear_sentence(tmp_path, content, words):
    (tmp_path / "made.csv").write_bytes(content)
    with pytest.raises(HandspanError, match=words):
        load_source(str(tmp_path / "made.csv"))


def test_a_stray_text_far_below_is_found(tmp_path):
    lines = ["client,label,x"] + [f"{row % 3},{row % 2},{row}" for row in range(200_000)]
    lines[-5] = "0,1,oops"
    (tmp_path / "made.csv").write_text("\n".join(lines))
    with pytest.raises(HandspanError, match=r"'x'.* mixes numbers.* row 199995 'oops'"):
        load_source(str(tmp_path / "made.csv"))


def test_truncated_parquet_files_are_refused(tmp_path):
    path = tmp_path / "made.parquet"
    whole = (tmp_path / write(tmp_path, TABLE, "parquet")).read_bytes()
    for part in range(10):
        path.write_bytes(whole[: len(whole) * part // 10])
        with pytest.raises(HandspanError, match="damaged, cut off or no parquet"):
            load_source(str(path))
    write(tmp_path, {name: [] for name in TABLE}, "parquet")
    with pytest.raises(HandspanError, match="has no rows"):
        load_source(str(path))


def test_odd_columns_of_parquet_are_refused(tmp_path):
    for column, words in [
        (pa.array([[1, 2]] * ROWS), "holds list<.*neither numbers nor texts"),
        (pa.array([None] * ROWS), "no value in row 0"),
        (pa.array([b"x"] * ROWS), "holds binary"),
    ]:
        with pytest.raises(HandspanError, match=words):
            load_source(write(tmp_path, changed(odd=column), "parquet"))
        with pytest.raises(HandspanError, match=r"cannot be client ids|no value"):
            load_source(write(tmp_path, changed(odd=column), "parquet") + ":client=odd")


def test_paths_that_lead_nowhere(tmp_path):
    with pytest.raises(HandspanError, match="there is no file"):
        load_source(str(tmp_path / "none.csv:client=a"))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(HandspanError, match="is a folder"):
        load_source(str(tmp_path / "folder.csv"))
    for name in ("digits", "rows.npz"):
        with pytest.raises(HandspanError, match=r"belong to a \.csv or \.parquet"):
            load_data(name, client_column="ward")


def test_the_text_names_the_source_completely():
    text = with_columns("a:b.csv", client="who: me", side=["x", "y"])
    assert split_columns(text) == ("a:b.csv", {"client": "who: me", "side": "x,y"})
    assert with_columns(text, client="you") == "a:b.csv:client=you:side=x,y"
    options, _ = from_values({"data": "t.csv", "client_column": "ward", "side_columns": "a,b"})
    assert options == DataOptions(data="t.csv:client=ward:side=a,b")
    again, _ = from_values({"data": options.data, "client_column": "room"})
    assert again.data == "t.csv:client=room:side=a,b"
