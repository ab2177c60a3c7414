"""The bugs of ``benchmarks.mutate`` still have their place in the source."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.mutate import places
from benchmarks.mutations import MUTATIONS
from handspan.registry import methods


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.method}: {m.what}")
def test_a_bug_can_be_planted_in_exactly_one_place(mutation):
    assert places(mutation) == 1
    assert mutation.old != mutation.new


def test_every_method_has_at_least_two_bugs():
    count = Counter(mutation.method for mutation in MUTATIONS)
    few = [name for name, method in methods().items() if count[name] < 2 and _is_ours(method)]
    assert not few


def _is_ours(method):
    return method.build.__module__.startswith("handspan.methods.")
