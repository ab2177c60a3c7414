"""Methods of two parts become FedAvg, Local and each other at special settings."""

from functools import partial

import pytest

from handspan.methods import fedalt, fedbn, fedper, fedrep, fedsim, lgfedavg
from handspan.numerics.local_work import LocalWork
from handspan.numerics.optim import Sgd
from handspan.testing.case import compare
from handspan.testing.references import Reference
from handspan.testing.toys import ToyTask

# On full batches: a stage of another number or name sees other batches.
FULL = LocalWork(steps=4, batch_size=None, learning_rate=0.2, sgd=Sgd(momentum=0.5))
WORK = LocalWork(steps=4, batch_size=3, learning_rate=0.2, sgd=Sgd(momentum=0.5))
EVERYTHING = frozenset(ToyTask().names)
NOTHING: frozenset[str] = frozenset()
METHODS = {
    "fedrep:personal_steps=4:shared_steps=4": fedrep,
    "fedper:start=common:weights=uniform": fedper,
    "lgfedavg:weights=uniform": lgfedavg,
    "fedalt:personal_steps=4:shared_steps=4:last_steps=0": fedalt,
    "fedsim:last_steps=0": fedsim,
}


def split(text, module, personal, work=FULL):
    names = EVERYTHING - personal if module is lgfedavg else personal

    def build(spec, setting):
        return module.assemble(setting, spec.config, names)

    return Reference(text, work, build=build)


@pytest.mark.parametrize(("text", "module"), METHODS.items())
def test_with_nothing_personal_it_is_fedavg(text, module):
    got, wanted = split(text, module, NOTHING), Reference("fedavg:weights=uniform", FULL)
    compare(dict(got.server.shared), dict(wanted.server.params), 0.0, "nothing personal")
    compare({"outputs": got.served}, {"outputs": wanted.served}, 1e-12, "served")


@pytest.mark.parametrize(("text", "module"), METHODS.items())
def test_with_everything_personal_it_is_local(text, module):
    got, wanted = split(text, module, EVERYTHING), Reference("local", FULL)
    compare(dict(got.clients.personal), dict(wanted.clients.params), 0.0, "everything personal")
    compare({"outputs": got.served}, {"outputs": wanted.served}, 1e-12, "served")
    assert not got.server.shared


def test_fedper_with_nothing_personal_weighs_by_rows_as_fedavg_does():
    got = split("fedper:start=common", fedper, NOTHING, WORK)
    compare(dict(got.server.shared), dict(Reference("fedavg", WORK).server.params), 0.0, "weights")


same = partial(compare, tolerance=0.0, message="bit for bit")


def test_lgfedavg_is_fedper_with_the_complementary_split():
    one = Reference("lgfedavg:shared=head", WORK)
    other = Reference("fedper:personal=hidden.*:start=common", WORK)
    same(dict(one.server.shared), dict(other.server.shared))
    same(dict(one.clients.personal), dict(other.clients.personal))


def test_fedsim_with_one_step_size_is_fedper():
    one = Reference("fedsim:last_steps=0:weights=examples", WORK)
    other = Reference("fedper:start=common", WORK)
    same(dict(one.server.shared), dict(other.server.shared))
    same(dict(one.clients.personal), dict(other.clients.personal))


def test_fedalt_with_a_personal_head_and_no_last_pass_is_fedrep():
    one, other = Reference("fedalt:last_steps=0", WORK), Reference("fedrep", WORK)
    same(dict(one.server.shared), dict(other.server.shared))
    same({"outputs": one.served}, {"outputs": other.served})


def test_fedbn_with_no_norms_is_fedavg_and_with_nothing_else_local():
    def build(layers):
        return lambda spec, setting: fedbn.assemble(setting, spec.config, frozenset(layers))

    task = ToyTask(has_norm=True)
    nothing = Reference("fedbn", WORK, build=build(()))
    avg = Reference("fedavg:weights=uniform", WORK, task=task)
    same(dict(nothing.server.shared), dict(avg.server.params))
    same(dict(nothing.server.buffers), dict(avg.server.buffers))
    everything = Reference("fedbn", FULL, build=build(("hidden", "norm", "head")))
    local = Reference("local", FULL, task=task)
    same(dict(everything.clients.personal), dict(local.clients.params))
    same(dict(everything.clients.buffers), dict(local.clients.buffers))


def test_running_statistics_belong_to_the_part_of_their_layer():
    task = ToyTask(has_norm=True)
    for text, kept in (("fedper:personal=norm.weight+head", True), ("fedper", False)):
        run = Reference(text, task=task)
        assert bool(run.clients.buffers) == kept
        assert bool(run.server.buffers) != kept
