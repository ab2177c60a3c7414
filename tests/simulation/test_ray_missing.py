"""Without Ray the ray engine says what to do."""

import sys


def test_the_ray_engine_without_ray_names_the_extra(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, complaint = call("run", "fedavg", "--rounds", 1, "--engine", "ray")
    assert code == 2
    assert complaint == "handspan: the ray engine needs Ray: pip install 'handspan[ray]'\n"
