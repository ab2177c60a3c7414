"""What cannot become a federation is refused with one sentence that names the place."""

import numpy as np
import pytest
import torch
from scipy import sparse

from handspan.core.errors import HandspanError
from handspan.data import from_arrays, from_clients

X4 = np.arange(8, dtype=np.float64).reshape(4, 2) / 2
G4 = [0, 0, 1, 1]
NAN = X4.copy()
NAN[2, 1] = np.nan


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(x=NAN, groups=G4), "NaN or infinity in row 2"),
        (dict(x=sparse.csr_array(NAN), groups=G4), "NaN or infinity in row 2"),
        (dict(x=X4, y=[0.0, 1.0, np.inf, 1.0], groups=G4), "y has NaN or infinity in row 2"),
        (dict(x=X4, y=[0, 1, -1, 0], groups=G4), "label -1 in row 2.*negative"),
        (dict(x=X4, y=[0, 1, 5, 0], groups=G4, num_classes=3), "label 5 in row 2.*out of range"),
        (dict(x=X4, y=[0, 1, 10**9, 0], groups=G4), "out of range"),
        (dict(x=X4, y=[0, 0.5, 1, 0], groups=G4, task="classification"), "0.5 in row 1.*whole"),
        (dict(x=X4, y=[0, 1], groups=G4), "4 rows but y has 2"),
        (dict(x=X4, y=["a", "b", "a", "b"], groups=G4), "y must hold numbers"),
        (dict(x=X4, y=np.zeros((4, 3), int), groups=G4), "one class number per row"),
        (dict(x=X4, groups=[0, 1]), "one id per row"),
        (dict(x=X4, groups=[0, 0, 0, "b"]), "client 'b' has only one row"),
        (dict(x=X4, groups=[0, 0, 1, 2]), "client 1 has only one row .and 1 more"),
        (dict(x=X4, groups=[{}, {}, {}, {}]), "hashable"),
        (dict(x=X4, groups=[0.0, 0.0, np.nan, 1.0]), "client ids has NaN"),
        (dict(x=[], groups=[]), "empty"),
        (dict(x=[["a"], ["b"]], groups=[0, 0]), "must hold numbers"),
        (dict(x=[[1.0], [1.0, 2.0]], groups=[0, 0]), "one shape"),
        (dict(x=X4, groups=G4, task="clasification"), "did you mean 'classification'"),
        (dict(x=X4, groups=G4, task="classification"), "no labels"),
        (dict(x=X4, groups=G4, kind="imag"), "did you mean 'image'"),
        (dict(x=X4, groups=G4, test_fraction=1.0), "between 0 and 1"),
        (dict(x=X4, groups=G4, validation_fraction=-0.1), "validation_fraction"),
        (dict(x=X4, groups=G4, dtype="int8"), "float32 or float64"),
        (dict(x=X4, groups=G4, dtype=torch.int32), "float32 or float64"),
        (dict(x=X4, groups=G4, standardize="yes"), "standardize"),
        (dict(x=sparse.csr_array(X4), groups=G4, standardize=True), "cannot be standardised"),
        (dict(x=X4, groups=G4, names=["a"]), "1 names for 2 clients"),
        (dict(x=X4, groups=G4, is_test=[0, 1, 0, 1]), "is_test"),
        (dict(x=X4, groups=G4, side=[[1.0], [np.nan]]), "side has NaN"),
    ],
)
def test_bad_arrays_get_one_clear_sentence(arguments, words):
    with pytest.raises(HandspanError, match=words):
        from_arrays(arguments.pop("x"), arguments.pop("y", None), **arguments)


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ([], "no clients"),
        ([X4], "client 0 is no pair"),
        ([(X4, [0, 1, 0, 1]), (X4, None)], "some have none"),
        ([(X4, [0, 1, 0])], "client 0 has 4 rows x but 3 labels"),
        ([(X4, None), (X4[:, :1], None)], "client 1 have shape"),
        ([(X4, None), (sparse.csr_array(X4), None)], "all sparse or all dense"),
        ([(X4, None), (NAN, None)], "row 2 of client 1"),
        ([(X4, [0, 1, 0, 1]), (X4, [0, -3, 0, 1])], "label -3 in row 1 of client 1"),
        ([(X4, None), (X4[:1], None)], "client 1 has only one row"),
        ([(X4, None), (X4[:0], None)], "x of client 1 is empty"),
    ],
)
def test_bad_clients_are_named(clients, words):
    with pytest.raises(HandspanError, match=words):
        from_clients(clients)
