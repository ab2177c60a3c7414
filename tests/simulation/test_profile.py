"""Where the time goes: nothing twice, nothing lost, and no cost while nobody asks."""

import itertools

import pytest

from handspan.data import load_data
from handspan.fitting import fit
from handspan.simulation import profile
from handspan.simulation.profile import PARTS, Profile


def test_a_part_inside_another_is_not_counted_twice():
    ticks = itertools.count()
    watch = Profile(lambda: float(next(ticks)))
    with watch.measure():
        with profile.part("steps"):
            with profile.part("gather"):
                pass
        list(profile.during("plan", iter([1, 2])))
    assert watch.seconds["steps"] == 2  # before and after what is inside
    assert watch.seconds["gather"] == 1
    assert watch.seconds["plan"] == 3  # two items and the end
    rows = watch.table(2)
    assert [name for name, _, _ in rows] == [*PARTS, "other"]
    assert sum(share for _, _, share in rows) == pytest.approx(1)
    assert sum(ms for _, ms, _ in rows) == pytest.approx(1e3 * watch.total / 2)


def test_without_a_profile_a_part_is_nothing_at_all():
    assert profile.part("steps") is profile.part("plan")


def test_a_mistake_inside_ends_the_part():
    watch = Profile()
    with pytest.raises(ValueError, match="inside"), watch.measure(), profile.part("steps"):
        raise ValueError("inside")
    assert watch._inside == []
    assert profile.part("steps") is profile.part("plan"), "the profile must be put away"


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_all_parts_of_a_run_are_seen(engine, tmp_path):
    data = load_data("digits", num_clients=4, seed=0)
    watch = Profile()
    with watch.measure():
        fit("fedrep", data, rounds=2, cohort=2, steps=2, engine=engine, out=tmp_path / "run")
    assert all(seconds > 0 for seconds in watch.seconds.values()), watch.seconds
    assert sum(watch.seconds.values()) <= watch.total
