"""Bugs to plant: plausible slips in the source, each of which some test must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A change of the source: ``old`` occurs exactly once in the file.

    Attributes
    ----------
    method
        The method it concerns, ``shared`` (by many), ``runs`` (what is kept on disk), or ``side``
        (side information in models and data).
    what
        The slip, in words.
    file
        Below ``src/handspan``.
    old, new
        Source text before and after.
    """

    method: str
    what: str
    file: str
    old: str
    new: str


def _of(method: str, file: str, *slips: tuple[str, str, str]) -> tuple[Mutation, ...]:
    return tuple(Mutation(method, what, file, old, new) for what, old, new in slips)


_RATE = "learning_rate=work.rate(round, setting.rounds, setting.scalar)"
_HALF = "learning_rate=0.5 * work.rate(round, setting.rounds, setting.scalar)"
_WEIGHT = "weight=WEIGHTS[config.weights],"

MUTATIONS: tuple[Mutation, ...] = (
    *_of(
        "local",
        "methods/local.py",
        ("wrong scale of the step", _RATE, _HALF),
        (
            "new model not kept",
            "return LocalClient(params=k.params, buffers=k.buffers), Empty()",
            "return LocalClient(params=k.velocity or k.params, buffers=k.buffers), Empty()",
        ),
        ("a common start is lost", "task.init(key)", "task.init(key + 1)"),
    ),
    *_of(
        "fedavg",
        "methods/fedavg.py",
        ("missing weight", _WEIGHT, 'weight=WEIGHTS["uniform"],'),
        ("swapped sign", "mean.params[k] - p for", "p - mean.params[k] for"),
        ("missing root", "(second[k].sqrt() + config.tau)", "(second[k] + config.tau)"),
        ("swapped sign of yogi", "torch.sign(second[k] - s)", "torch.sign(s - second[k])"),
        ("wrong start of the moment", "config.tau**2)", "config.tau)"),
        (
            "old momentum forgotten",
            "first[k] * config.server_momentum + d",
            "d * config.server_momentum + d",
        ),
    ),
    *_of(
        "fedavg_groups",
        "methods/fedavg_groups.py",
        ("missing weight", _WEIGHT, 'weight=WEIGHTS["uniform"],'),
        ("wrong group", "GroupsUpload(choice=k.group,", "GroupsUpload(choice=k.group.roll(1),"),
        ("wrong scale of the step", _RATE, _HALF),
    ),
    *_of(
        "fedrep",
        "methods/fedrep.py",
        ("missing weight", "weights=config.weights", 'weights="examples"'),
        (
            "blocks in the wrong order",
            "[(PERSONAL, personal), (SHARED, shared)]",
            "[(SHARED, shared), (PERSONAL, personal)]",
        ),
        (
            "epochs of the other block",
            "personal_epochs=config.personal_epochs",
            "personal_epochs=config.shared_epochs",
        ),
        (
            "wrong step size of the head",
            "personal_rate=config.head_learning_rate",
            "personal_rate=None",
        ),
    ),
    *_of(
        "fedrep",
        "numerics/partial.py",
        ("one step size for both", "getattr(b, rates[part])", 'getattr(b, rates["shared"])'),
    ),
    *_of(
        "fedper",
        "methods/fedper.py",
        ("missing weight", "weights=config.weights", 'weights="examples"'),
        ("one part at a time", "[(BOTH, work.whole())]", "[(BOTH[:1], work.whole())]"),
        ("a common start for all", "start=config.start", 'start="common"'),
    ),
    *_of(
        "lgfedavg",
        "methods/lgfedavg.py",
        ("encoder and head swapped", "frozenset(setting.model.names) - shared", "shared"),
        ("missing weight", "weights=config.weights", 'weights="examples"'),
    ),
    *_of(
        "fedalt",
        "methods/fedalt.py",
        (
            "the shared part first",
            "[(PERSONAL, first), (SHARED, second)]",
            "[(SHARED, first), (PERSONAL, second)]",
        ),
        ("no last pass", "last_pass=work.told(first, config.last_steps)", "last_pass=None"),
        (
            "wrong step size of v",
            "personal_rate=config.personal_learning_rate",
            "personal_rate=None",
        ),
    ),
    *_of(
        "fedsim",
        "methods/fedsim.py",
        (
            "one part after the other",
            "[(BOTH, work.whole())]",
            "[(BOTH[:1], work.whole()), (BOTH[1:], work.whole())]",
        ),
        (
            "wrong step size of v",
            "personal_rate=config.personal_learning_rate",
            "personal_rate=None",
        ),
        (
            "the last pass of another length",
            "last_pass=work.told(work.whole(), config.last_steps)",
            "last_pass=work.told(work.whole(), None)",
        ),
    ),
    *_of(
        "fedsim",
        "numerics/partial.py",
        (
            "the stale pair",
            "lambda free: task.loss({**fixed, **free}",
            "lambda free: task.loss({**b.shared, **fixed, **free, **b.shared}",
        ),
    ),
    *_of(
        "apfl",
        "methods/apfl.py",
        ("missing factor alpha", "{name: k.mix * g for name, g", "{name: g for name, g"),
        ("shares swapped", "mix * value + (1 - mix) * shared", "(1 - mix) * value + mix * shared"),
        ("swapped sign of alpha", "(mix - k.moves * b.learning", "(mix + k.moves * b.learning"),
        ("missing clip", "torch.stack(parts).sum()).clamp(0, 1)", "torch.stack(parts).sum())"),
        ("alpha moves at every step", 'config.mix_every == "step"', "config.adaptive"),
        (
            "new w for the old one",
            "mixed_step(b, k, batch), shared",
            "mixed_step(b, dataclasses.replace(k, shared=shared), batch), shared",
        ),
        (
            "the shared model steps twice",
            "shared=shared, moves=moves)",
            "shared=shared_step(b, shared, batch), moves=moves)",
        ),
        ("missing weight", "weights=config.weights,", 'weights="examples",'),
        (
            "a new client starts at random",
            "ApflClient(params=b.params,",
            "ApflClient(params=client.params,",
        ),
    ),
    *_of(
        "cfl",
        "methods/cfl.py",
        (
            "positions for ids",
            "index_fill(0, members[leaves], new)",
            "index_fill(0, leaves.nonzero().flatten(), new)",
        ),
        (
            "greatest coordinate for the norm",
            "rounded(norm.max()) >=",
            "rounded(delta['head.bias'].max()) >=",
        ),
        ("no test of gamma_max", "> config.deviation  #", "> 0 * config.deviation  #"),
        (
            "gradients for cosines",
            "rounded(products * inverse * inverse.unsqueeze(1))",
            "rounded(products)",
        ),
        (
            "clusters in motion split",
            "< rounded(config.mean_bound * unit)",
            "< rounded(unit / config.mean_bound)",
        ),
        (
            "a mean without weights",
            "products, share = gram(delta), weights / weights.sum()",
            "products, share = gram(delta), torch.ones_like(weights) / len(weights)",
        ),
        (
            "clients are not told",
            "when=lambda server, round: bool(server.has_news)",
            "when=lambda server, round: False",
        ),
        (
            "a new client goes the other way",
            "nearness(b.left) > nearness(b.stayed)",
            "nearness(b.left) < nearness(b.stayed)",
        ),
        ("the tree is not followed", "(b.parent[slot] == cluster) &", ""),
        ("missing weight", _WEIGHT, 'weight=WEIGHTS["uniform"],'),
    ),
    *_of(
        "cfl",
        "numerics/clusters.py",
        ("complete linkage", 'method="single"', 'method="complete"'),
    ),
    *_of(
        "fedala",
        "methods/fedala.py",
        ("swapped sign", "(w - eta * slope[name]", "(w + eta * slope[name]"),
        ("missing clip", "k.local[name])).clamp(0, 1)", "k.local[name]))"),
        ("missing chain rule", "slope[name] * (b.params[name] - k.local[name])", "slope[name]"),
        (
            "shares swapped",
            "old + (b.params[name] - old) *",
            "b.params[name] + (old - b.params[name]) *",
        ),
        (
            "old weights mixed",
            "dataclasses.replace(k.training, params=params)",
            "dataclasses.replace(k.training, params=b.params)",
        ),
        (
            "the same rows in every round",
            'keys.fold(data.key, "ala", b.round)',
            'keys.fold(data.key, "ala", 0)',
        ),
        ("an untrained client has a model", "torch.where(is_trained, v, b.params[k])", "v"),
        (
            "a new client keeps the mixture",
            "dataclasses.replace(train_new, finish=keep)",
            "dataclasses.replace(train_new, finish=mix)",
        ),
        ("missing weight", "weights=config.weights)", 'weights="uniform")'),
    ),
    *_of(
        "fedas",
        "methods/fedas.py",
        ("away from the old features", "value - rate * slope[name]", "value + rate * slope[name]"),
        (
            "an untrained client is aligned",
            "torch.where(client.is_trained > 0, own, new)",
            "own + 0 * new",
        ),
        (
            "the trace of a batch mean",
            "total = k.trace + (of_row * batch.weight).sum()",
            "total = k.trace + (of_row.sqrt() * batch.weight).sum() ** 2",
        ),
        ("the sum of the traces", "(k.trace / k.rows).clamp", "k.trace.clamp"),
        ("weights left out", "(t / total.trace).to(like)", "(t / reduction.weight).to(like)"),
        (
            "the shared body is served",
            "body: Any = client.body",
            "body: Any = map_tensors(torch.zeros_like, client.body)",
        ),
        (
            "upload not weighted",
            "lambda t: alpha * t, client.body",
            "lambda t: t, client.body",
        ),
        ("nothing to align with", "features(k.old)", "features(body)"),
    ),
    *_of(
        "fedbabu",
        "methods/fedbabu.py",
        ("the head moves too", "split.step(*SHARED)", 'split.step("personal", "shared")'),
        ("missing weight", "weights=config.weights,", 'weights="uniform",'),
        ("the head alone is tuned", "setting.model, config.tune_names,", 'setting.model, "head",'),
        (
            "a step size of its own forgotten",
            "learning_rate=config.tune_learning_rate",
            "learning_rate=None",
        ),
    ),
    *_of(
        "fedbn",
        "methods/fedbn.py",
        (
            "statistics shared",
            "personal=personal, layers=layers",
            "personal=personal, layers=frozenset()",
        ),
        (
            "scales shared",
            "personal=personal, layers=layers",
            "personal=frozenset(), layers=layers",
        ),
        ("norms by name", 'name.endswith("running_mean")', '"bn" in name'),
        ("missing weight", "weights=config.weights", 'weights="uniform"'),
    ),
    *_of(
        "fedbn",
        "numerics/partial.py",
        (
            "old statistics kept",
            "(after if part in moving else before).buffers",
            "(before if part in moving else after).buffers",
        ),
    ),
    *_of(
        "ditto",
        "methods/ditto.py",
        (
            "pulled to its own start",
            "Stage(step=pulled_step, **personal)",
            "Stage(step=sgd_step(task, work.sgd), **personal)",
        ),
        (
            "restarted at the shared model",
            "personal=Training(params=client.params,",
            "personal=Training(params=b.params,",
        ),
        (
            "the personal model sent",
            "return _kept(k.personal), _kept(k.shared)",
            "return _kept(k.personal), _kept(k.personal)",
        ),
        ("double pull", "config.prox_weight)", "2 * config.prox_weight)"),
        ("missing weight", "weights=config.weights", 'weights="examples"'),
    ),
    *_of(
        "pfedme",
        "methods/pfedme.py",
        (
            "pulled to the broadcast model",
            "pulled(gradient, theta, k.params,",
            "pulled(gradient, theta, b.params,",
        ),
        (
            "w for theta",
            "params = {name: w + mixing * (theta[name] - w)",
            "params = {name: w + mixing * (k.theta[name] - w)",
        ),
        (
            "restarted at w",
            "theta, buffers, velocity = k.theta,",
            "theta, buffers, velocity = k.params,",
        ),
        ("beta forgotten", "share, mean = config.server_mixing,", "share, mean = 1.0,"),
        ("served without pull", "sgd_step(task, sgd, config.prox_weight)", "sgd_step(task, sgd)"),
    ),
    *_of(
        "perfedavg",
        "methods/perfedavg.py",
        (
            "from the adapted point",
            "work.sgd.step(k.params, direction,",
            "work.sgd.step(moved(k.params, inner, -alpha), direction,",
        ),
        (
            "swapped sign",
            "direction = moved(q, product, -alpha)",
            "direction = moved(q, product, alpha)",
        ),
        ("half the difference", "/ (2 * config.delta) for", "/ config.delta for"),
        ("one batch for all", "turn % count == place", "turn % count == 0"),
        (
            "the outer step for the personal one",
            "params = moved(k.params, slope, -alpha)",
            "params = moved(k.params, slope, -work.learning_rate)",
        ),
    ),
    *_of(
        "fedmtl",
        "methods/fedmtl.py",
        ("missing factor 2", "+ 2 * weight * (own", "+ weight * (own"),
        ("the own model among the others", "rows.scatter(1, place, 0.0)", "rows"),
        ("all ones for the identity", "eye - 1 / count if", "torch.ones_like(eye) - 1 / count if"),
        (
            "models of other clients kept",
            "index_copy(0, stacked.ids.to",
            "index_copy(0, stacked.ids.flip(0).to",
        ),
        ("missing root", "values.clamp(min=0).sqrt()", "values.clamp(min=0)"),
        ("missing inverse", "(vectors / ((1 - floor)", "(vectors * ((1 - floor)"),
        (
            "a new client is held near 0",
            "{name: -mean for name, mean",
            "{name: 0 * mean for name, mean",
        ),
        ("missing shrinkage", "+ 2 * shrinkage * k.params[name]", ""),
    ),
    *_of(
        "ifca",
        "methods/ifca.py",
        ("swapped sign", "torch.argmin(rounded)", "torch.argmax(rounded)"),
        ("missing weight", _WEIGHT, 'weight=WEIGHTS["uniform"],'),
        (
            "padding counted in the choice",
            "(row_losses * batch.weight).sum() / batch.weight.sum()",
            "row_losses.mean()",
        ),
        (
            "the first model for the chosen one",
            "choice=choice, params=chosen.params,",
            "choice=choice, params=k.params,",
        ),
        (
            "ties go to the last",
            "torch.round(k.losses.to(torch.float64) * 1e9)",
            "torch.round(k.losses.to(torch.float64) * 1e9) - 1e-3 * torch.arange(config.k)",
        ),
        ("messages without counts", "IfcaSumUpload(choice=upload.choice, models=models)", "models"),
    ),
    *_of(
        "l2gd",
        "methods/l2gd.py",
        ("1 - p where p belongs", "strength * (1 - p) / p)", "strength * p / (1 - p))"),
        ("away from the mean", "(1 - b.pull) * x + b.pull * m", "(1 + b.pull) * x - b.pull * m"),
        ("overshooting the mean", "(1 - p) / p).clamp(max=1)", "(1 - p) / p)"),
        ("the coin turned over", "bool(round.draws[0] < p)", "bool(round.draws[0] >= p)"),
        (
            "a mean of the cohort only",
            'begin=begin, computes="all", uploads="all", **parts)',
            "begin=begin, **parts)",
        ),
        (
            "an old mean pulled to",
            "return L2gdClient(own=own, mean=mean), Empty()",
            "return L2gdClient(own=own, mean=client.mean), Empty()",
        ),
        (
            "models sent at every pull",
            "is_pull(round) and server.contact == _TRAINED",
            "is_pull(round) and server.contact != _AVERAGED",
        ),
        (
            "a new client is not held",
            "sgd_step(task, work.sgd, strength)",
            "sgd_step(task, work.sgd)",
        ),
    ),
    *_of(
        "pflmf",
        "methods/pflmf.py",
        (
            "new v for the old one",
            'self.config.v_for_basis == "old"',
            'self.config.v_for_basis == "new"',
        ),
        ("wrong scale of theta", "else k.fixed @ k.fixed", "else (k.fixed @ k.fixed).sqrt()"),
        ("wrong divisor", "rate / self.setting.num_clients", "rate / self.setting.cohort"),
        ("missing weight", "basis, change, weight)", "basis, change, torch.ones_like(weight))"),
        ("missing preconditioner", "b.preconditioner @ gradient if", "gradient if"),
        ("missing offset", "torch.ones_like(coordinates[:1])", "torch.zeros_like(coordinates[:1])"),
        ("swapped sign", "(total - r.weight * old", "(total + r.weight * old"),
        ("expected size for the realised one", '== "expected":', '== "cohort":'),
        ("missing damping", "+ config.damping * eye", "+ 0 * eye"),
    ),
    *_of(
        "fedmgs",
        "methods/fedmgs.py",
        ("old sums kept", "share * (new.T @ new - old.T @ old)", "share * (new.T @ new)"),
        ("new for the difference", "change = (new - old) * weight", "change = new * weight"),
        ("a client counts twice", "cohort.weights * b.share.cpu().double()", "cohort.weights"),
        ("one-hot rows without means", "xh / count.clamp(min=1), basis", "xh, basis"),
    ),
    *_of(
        "fedmgs",
        "numerics/factorization/problem.py",
        ("wrong penalty", "b.penalty * (ones - eye)", "b.penalty * ones"),
        (
            "wrong constant",
            "_SAFE * largest(hessian)",
            "_SAFE * largest(2 * products / b.num_rows)",
        ),
        ("wrong scale", "2 * projected / b.num_rows", "projected / b.num_rows"),
        (
            "swapped sign",
            "eye - step * quadratic, step * linear",
            "eye - step * quadratic, -step * linear",
        ),
        (
            "missing projection",
            "self.project_rows(torch.addmm(shift, rows, move))",
            "torch.addmm(shift, rows, move)",
        ),
        (
            "penalty grows when it should not",
            "grows = change < self.config.penalty_tolerance",
            "grows = change > self.config.penalty_tolerance",
        ),
    ),
    *_of(
        "fedmgs",
        "numerics/factorization/sets.py",
        ("missing box", "vectors.clamp(low, high)", "vectors"),
    ),
    *_of(
        "fedmavg",
        "methods/fedmavg.py",
        ("one step too few", "// (round.index + 1) + 1", "// (round.index + 1)"),
        ("rounds counted from 0", "// (round.index + 1) + 1", "// (round.index + 2) + 1"),
        (
            "own rows forgotten",
            "powers(k.hh, 2 * b.step / data.num,",
            "powers(k.hh, 2 * b.step / b.num_rows,",
        ),
        ("W forgotten", "b.basis @ power + k.xh @ total", "k.xh @ total"),
        (
            "weights by draws",
            "weight=uniform if method.may_repeat",
            "weight=by_examples if method.may_repeat",
        ),
        (
            "missing entries are 0",
            "times(residual(x, rows, b.basis), b.basis)",
            "(rows @ b.basis.T - x) @ b.basis",
        ),
    ),
    *_of(
        "fedmavg",
        "numerics/factorization/averaging.py",
        ("wrong d", "_PAPER * largest(2 * hh", "_PAPER * largest(hh"),
        ("no bound", "torch.maximum(server.constant, own)", "server.constant"),
        ("W leaves its box", "self.project(mean, server.low, server.high)", "mean"),
    ),
    *_of(
        "fedcomplete",
        "methods/fedcomplete.py",
        ("ridge forgotten", "+ self.config.ridge * count * items", ""),
        ("ridge not for each entry", "ridge * count.unsqueeze(2) * eye", "ridge * eye"),
        (
            "bias of the row scales",
            "column * number * q).T @ q",
            "column * number * rows).T @ rows",
        ),
        ("step not scaled", "torch.linalg.solve(scale, slope.T).T", "slope"),
    ),
    *_of(
        "fedpalm",
        "methods/fedpalm.py",
        ("W stays where it was", "here = dataclasses.replace(b, basis=basis)", "here = b"),
        (
            "own bound forgotten",
            'self.config.constants == "safe"',
            'self.config.constants == "none"',
        ),
        (
            "no projection",
            "self.project(basis - inverse(d) * slope, b.low, b.high)",
            "basis - inverse(d) * slope",
        ),
    ),
    *_of(
        "perfedsi",
        "methods/perfedsi.py",
        (
            "weights by examples",
            "weights=config.weights,\n            infers",
            'weights="examples",\n            infers',
        ),
        ("no steps", "**work.whole()),),", "steps=1),),"),
        ("noise is forgotten", "value + deviation * draw", "value + 0 * draw"),
        ("one noise for all", "keys.fold(batch.key, name)", "keys.fold(keys.key(0), name)"),
        ("noise on what stays", "config.noise_on)) - own", "config.noise_on)) | own"),
    ),
    *_of(
        "side",
        "models/side_info.py",
        (
            "no neutral start",
            "nn.init.zeros_(self.linear.weight)",
            "nn.init.ones_(self.linear.weight)",
        ),
        (
            "new weights start at one",
            "old.new_zeros(len(old), width",
            "old.new_ones(len(old), width",
        ),
        ("a mask is added", "x * self.spread(x)[0]", "x + self.spread(x)[0]"),
        ("the gate is never shut", "self.neutral + self.side_gate *", "self.neutral + 1.0 *"),
        (
            "groups in turn",
            "torch.arange(width) * num_side // width",
            "torch.arange(width) % num_side",
        ),
        (
            "a bias tells z",
            "partial(nn.Linear, num_side, width, bias=False)",
            "partial(nn.Linear, num_side, width)",
        ),
    ),
    *_of(
        "side",
        "data/side.py",
        ("held-out clients teach", "values[column.name][trains]", "values[column.name]"),
        (
            "a gap is a number",
            '- part["mean"]) / part["spread"])',
            '- part["mean"]) / part["spread"]) - is_gap',
        ),
        (
            "means of other rows",
            "start : start + max(count, 1)",
            "start : start + max(count, 1) + 1",
        ),
        (
            "the silent tell something",
            "torch.where(has_rows, (means - centre) * scale, 0.0)",
            "(means - centre) * scale",
        ),
        ("rows that were taken away tell z", 'recipe.get("kind") != "mean"', "recipe"),
        (
            "held-out ids are those of others",
            "torch.zeros(each.num_clients, n)",
            "torch.eye(each.num_clients, n)",
        ),
        (
            "the last row has the last word",
            "known[::-1]]] = column.values[known[::-1]]",
            "known]] = column.values[known] + 1",
        ),
    ),
    *_of(
        "srph",
        "methods/srph.py",
        ("weights by examples", "weights=config.weights", 'weights="examples"'),
        ("heads alone move", "[(BOTH, ", '[(("personal",), '),
    ),
    *_of(
        "prsh",
        "methods/prsh.py",
        ("weights by examples", "weights=config.weights", 'weights="examples"'),
        ("the head stays too", "if name not in task.head]", "if name != task.head[0]]"),
        ("three convolutions", "(conv|norm)[12]", "(conv|norm)[123]"),
    ),
    *_of(
        "shared",
        "numerics/side_race.py",
        ("swapped winners", "SIDE if gain > error else PLAIN", "PLAIN if gain > error else SIDE"),
        ("swapped losses", "found.gain(0, 1)", "found.gain(1, 0)"),
        ("the plain model reads z", "torch.zeros_like(buffers[GATE])", "buffers[GATE].clone()"),
        (
            "validation rows are trained on",
            'lambda server: "side", "train"',
            'lambda server: "side", "all"',
        ),
    ),
    *_of(
        "fedprox",
        "methods/fedprox.py",
        ("half the pull", "config.prox_weight)", "0.5 * config.prox_weight)"),
        ("missing weight", "weights=config.weights", 'weights="examples"'),
    ),
    *_of(
        "fedprox",
        "numerics/averaging.py",
        (
            "pulled to itself",
            "working.params, broadcast.params, prox_weight",
            "working.params, working.params, prox_weight",
        ),
    ),
    *_of(
        "scaffold",
        "methods/scaffold.py",
        ("swapped sign", "g - k.control[n] + b.control[n]", "g + k.control[n] - b.control[n]"),
        ("the server forgets who was not there", "1 / setting.num_clients", "1 / setting.cohort"),
        (
            "new control for the difference",
            "control_delta={n: c - k.control[n] for",
            "control_delta={n: c for",
        ),
        (
            "the pass at y",
            "task.loss(x, b.buffers, batch), b.params",
            "task.loss(x, b.buffers, batch), k.params",
        ),
        ("old control kept", "ScaffoldClient(control=new)", "ScaffoldClient(control=k.control)"),
    ),
    *_of(
        "pfedfda",
        "methods/pfedfda.py",
        ("missing weight", _WEIGHT, 'weight=WEIGHTS["uniform"],'),
        ("no class is impossible: forgotten", "clamp(min=1) + _FLOOR", "clamp(min=1) + 1e-300"),
        (
            "features of the old theta",
            "self.task.features({**k.shared, **k.head}",
            "self.task.features({**b.shared, **k.head}",
        ),
    ),
    *_of(
        "pfedfda",
        "numerics/gaussian_head.py",
        ("rows of its own fold", "enough.only(1 - is_out), known", "enough, known"),
        (
            "an absent class has mean 0",
            "known.means.double()\n    )",
            "torch.zeros_like(known.means)\n    )",
        ),
        ("missing half", "weight).sum(1) / 2", "weight).sum(1)"),
        ("too many degrees of freedom", "(rows.weight.sum() - 1)", "rows.weight.sum()"),
        (
            "shares swapped",
            "beta[1] * local.covariance + (1 - beta[1])",
            "beta[0] * local.covariance + (1 - beta[0])",
        ),
        (
            "rare classes in the folds",
            "(rows.classes.sum(0) >= folds)",
            "(rows.classes.sum(0) >= 0)",
        ),
    ),
    *_of(
        "fedem",
        "methods/fedem.py",
        ("missing weight", _WEIGHT, 'weight=WEIGHTS["uniform"],'),
        ("the new shares for the old ones", "batch), k.old) *", "batch), k.mixture) *"),
        (
            "the new models for the old ones",
            "self.losses(b.models, batch), k.old",
            "self.losses(k.models, batch), k.old",
        ),
        ("divided by the responsibilities", "loss * shares[j].sum() / batch.weight.sum()", "loss"),
        ("padding counted", "(q * batch.weight).sum(1) / batch.weight.sum()", "q.mean(1)"),
        ("logits are mixed", "outputs.log_softmax(-1)", "outputs"),
        (
            "swapped sign",
            "mixture.log().unsqueeze(1) - losses",
            "mixture.log().unsqueeze(1) + losses",
        ),
    ),
    *_of(
        "fedbasis",
        "methods/fedbasis.py",
        ("missing weight", _WEIGHT, 'weight=WEIGHTS["uniform"],'),
        (
            "shares are not sharpened",
            "self.alpha(k.psi, self.config.temperature)",
            "self.alpha(k.psi)",
        ),
        ("wrong scale of theta", "scale = k.alpha @ k.alpha", "scale = k.alpha.sum()"),
        ("wrong power of the shares", "alpha * alpha if self", "alpha if self"),
        (
            "the last shares are lost",
            'is_stored = self.config.start == "stored"',
            "is_stored = False",
        ),
        (
            "bases start anywhere",
            "start + spread * (other[name] - start)",
            "start + spread * other[name]",
        ),
    ),
    *_of(
        "flute",
        "methods/flute.py",
        ("missing weight", _WEIGHT, 'weight=WEIGHTS["uniform"],'),
        (
            "features cut off",
            "task.features(params, old",
            "task.features({n: p.detach() for n, p in params.items()}, old",
        ),
        (
            "momentum goes on",
            "training=dataclasses.replace(k.training, velocity=velocity)",
            "training=k.training",
        ),
        ("missing divisor", "/ b.cohort_size * gradient", "* gradient"),
        ("absent classes count", "(data.label_counts > 0)", "(data.label_counts >= 0)"),
        (
            "a mean for the sum",
            ".flatten(1).sum(1) @ batch.weight",
            ".flatten(1).mean(1) @ batch.weight",
        ),
    ),
    *_of(
        "fedrep_linear",
        "methods/fedrep_linear.py",
        ("missing weight", _WEIGHT, 'weight=WEIGHTS["examples"],'),
        (
            "old head for the new one",
            'used = k.head if kind == "shared" else head',
            "used = k.head",
        ),
        ("swapped sign", "k.basis - b.learning_rate * slope", "k.basis + b.learning_rate * slope"),
        ("wrong constant of theorem 1", "1 / (4 * largest", "1 / (2 * largest"),
        ("the least for the largest", "torch.maximum(largest", "torch.minimum(largest"),
        ("kept heads do not turn", "turn = r @ turn", "turn = turn"),
        ("turned the other way", "turn = r @ turn", "turn = r.T @ turn"),
        (
            "the head of the last basis",
            "FedrepLinearServed(head=k.head)",
            "FedrepLinearServed(head=0 * k.head)",
        ),
    ),
    *_of(
        "fedrep_linear",
        "numerics/subspace_start.py",
        ("first powers", "(x * y.square().sum(1, keepdim=True))", "(x * y.sum(1, keepdim=True))"),
        (
            "missing projection",
            "b.basis @ (b.basis.T @ k.client.unfactorised)",
            "k.client.unfactorised",
        ),
        ("too large a step", "x.T @ y / num) / largest", "x.T @ y / num) / largest.sqrt()"),
    ),
    *_of(
        "fedrep_linear",
        "numerics/subspaces.py",
        (
            "signs stay",
            "torch.where(r.diagonal() < 0, -1.0, 1.0)",
            "torch.where(r.diagonal() < 0, 1.0, 1.0)",
        ),
        ("the least eigenvectors", "vectors[:, -count:]", "vectors[:, :count]"),
    ),
    *_of(
        "flute_linear",
        "methods/flute_linear.py",
        (
            "the new head for the old one",
            "(x.T @ residual @ k.head.T)",
            "(x.T @ residual @ k.old.T)",
        ),
        ("swapped sign", "head = client.head + 2 *", "head = client.head - 2 *"),
        ("missing factor", "step = 2 * self.config", "step = self.config"),
        (
            "first heads are not counted",
            "method.products(k, 0 * k.old)",
            "method.products(k, k.old)",
        ),
        ("a sum for the mean", "(r.total.basis_delta / r.weight)", "r.total.basis_delta"),
        ("sum and mean swapped", 'self.config.balance == "mean"', 'self.config.balance == "sum"'),
    ),
    *_of(
        "lrs_linear",
        "methods/lrs_linear.py",
        (
            "the printed equation 7",
            "rest = rows.y - rows.x @ sparse\n",
            "rest = rows.y - sparse.sum()\n",
        ),
        (
            "row by row for column by column",
            "solved = (old + change).reshape(shape[1], shape[0]).T",
            "solved = (old + change).reshape(shape)",
        ),
        ("rows swapped with coordinates", '"n,np,nq,nab->paqb"', '"n,np,nq,nab->apbq"'),
        ("gamma stays", "gamma = 2 * config.c1 * gamma + 2 *", "gamma = gamma + 0 *"),
        (
            "the old sparse part is lost",
            "self.sparse(b, rows, k.sparse, b.basis @ k.coordinates)\n        rest",
            "self.sparse(b, rows, 0 * k.sparse, b.basis @ k.coordinates)\n        rest",
        ),
        (
            "everything is solved anew",
            "old = server.basis.T.reshape(-1).double()",
            "old = 0 * server.basis.T.reshape(-1).double()",
        ),
    ),
    *_of(
        "lrs_linear",
        "numerics/thresholding.py",
        ("the smallest entries stay", "(size >= least)", "(size <= least)"),
    ),
    *_of(
        "lrs",
        "methods/lrs.py",
        ("missing weight", _WEIGHT, 'weight=WEIGHTS["examples"],'),
        (
            "the old coordinates for the new ones",
            "anchor=self.theta(b, k.coordinates, k.sparse)",
            "anchor=self.theta(b, 0 * k.coordinates, k.sparse)",
        ),
        ("missing preconditioner", '{"w": b.preconditioner @ gradient}', '{"w": gradient}'),
        ("missing damping", "mean.moments + self.config.damping * eye", "mean.moments"),
        ("missing ridge", "gram(server.basis) + config.gram_ridge * eye", "gram(server.basis)"),
        (
            "each parameter has its own k",
            "self.count = round(config.sparsity * size)",
            "self.count = round(config.sparsity * len(self.names))",
        ),
        (
            "wrong step size",
            "old - b.sparse_rate * gradient[name]",
            "old - b.learning_rate * gradient[name]",
        ),
    ),
    *_of(
        "finetune",
        "numerics/fine_tuning.py",
        (
            "all names move",
            "parts(served.model.params, chosen)",
            "parts(served.model.params, task.names)",
        ),
        (
            "the run's step size for its own",
            "work.learning_rate if learning_rate is None else learning_rate",
            "work.learning_rate",
        ),
        (
            "the old model is served",
            "model = Model(params={**k.moving, **k.fixed}, buffers=k.buffers)",
            "model = Model(params={**k.velocity, **k.fixed}, buffers=k.buffers)",
        ),
        (
            "validation rows are trained on",
            "batch_size=work.batch_size, rows=setting.final_rows)",
            'batch_size=work.batch_size, rows="all")',
        ),
        ("the last step is kept", "phase.end(b, k.best, data)", "phase.end(b, k.tuning, data)"),
        (
            "the worst step is kept",
            "is_better = (loss < k.least)",
            "is_better = (loss > k.least)",
        ),
    ),
    *_of(
        "gate",
        "numerics/gate.py",
        (
            "the measured model is served",
            "self._local(Empty(), k.clients.kept), b.shared",
            "self._local(Empty(), k.clients.tried), b.shared",
        ),
        (
            "the model of all rows is measured",
            "self._outputs(b, k.clients, k.clients.tried, batch.x",
            "self._outputs(b, k.clients, k.clients.kept, batch.x",
        ),
        ("ties go to rivals", "loss[0] - loss[1:] > rounded", "loss[0] - loss[1:] >= rounded"),
        ("evidence forgotten", "rounded(self._least + 0 * k.weight)", "rounded(0 * k.weight)"),
        ("raw certainty is measured", "loss = k.losses.amin(1)", "loss = k.losses[:, 0]"),
        ("rows weighed away", "0.5 * k.weight * mean.log()", "0.5 * mean.log()"),
        (
            "validation rows train the measured model",
            'on_field(stage, "tried", lambda b: b.local),',
            'on_field(dataclasses.replace(stage, rows="all"), "tried", lambda b: b.local),',
        ),
    ),
    *_of(
        "prior",
        "numerics/label_prior.py",
        ("reference forgotten", "(frequency.log() - reference.log())", "frequency.log()"),
        ("no shrinkage", "(counts + pseudo * reference)", "(counts + 1e-9 * reference)"),
        ("temperature inverted", "return temperature * (freq", "return (1 / temperature) * (freq"),
        (
            "balanced training is plain",
            "return params if self._shift is None else shifted(",
            "return params if self._shift is not None else shifted(",
        ),
        ("no class is impossible", "known = server.counts + 1", "known = server.counts + 0"),
    ),
    *_of(
        "shared",
        "numerics/averaging.py",
        ("wrong scale of the step", _RATE, _HALF),
        ("a common start is lost", "task.init(key)", "task.init(key + 1)"),
    ),
    *_of(
        "shared",
        "numerics/optim.py",
        ("momentum damped", "velocity[k] * self.momentum + g", "(velocity[k] + g) * self.momentum"),
        ("swapped sign", "learning_rate, value=-1.0", "learning_rate, value=1.0"),
        ("nesterov forgotten", "if self.nesterov:", "if False:"),
        ("decay pushes away", "alpha=self.weight_decay", "alpha=-self.weight_decay"),
    ),
    *_of(
        "shared",
        "numerics/low_rank.py",
        ("missing weight", "weights.to(coordinates.device).unsqueeze(1)", "1"),
        (
            "transposed map",
            "(matrix.to(rows) @ rows.flatten(1))",
            "(matrix.T.to(rows) @ rows.flatten(1))",
        ),
    ),
    *_of(
        "shared",
        "numerics/clusters.py",
        ("an empty cluster is erased", "new.to(old), old)", "new.to(old), 0 * old)"),
        ("missing weight", "* weights.to(choice.device).unsqueeze(1)", ""),
    ),
    *_of(
        "shared",
        "simulation/reduction.py",
        (
            "missing weight",
            "(weight @ flat)",
            "(torch.ones_like(weight) @ flat)",
        ),
        ("missing weight of large uploads", "alpha=weight)", "alpha=1.0)"),
        ("unsent uploads counted", "if not bool(sent.all()):", "if False:"),
    ),
    *_of(
        "shared",
        "simulation/kernels.py",
        ("a momentum is forgotten", "if beta != 1:", "if False:"),
        (
            "a step of full size",
            '{"alpha": node.kwargs.get("alpha", 1)}',
            '{"alpha": 1}',
        ),
    ),
    *_of(
        "shared",
        "simulation/plans.py",
        ("padding counts", "real = (place < size.unsqueeze(2)) &", "real = (place < width) &"),
        (
            "every pass alike",
            'keys.fold(k.unsqueeze(1), "pass", torch.arange(passes, device=k.device))',
            'keys.fold(k.unsqueeze(1), "pass", 0 * torch.arange(passes, device=k.device))',
        ),
    ),
    *_of(
        "shared",
        "simulation/federation.py",
        ("drawn twice, counted once", "weights * round.multiplicity[place]", "weights"),
        (
            "lost uploads are counted",
            "place = ~self._lost(round, ids)",
            "place = self._lost(round, ids) | True",
        ),
    ),
    *_of(
        "shared",
        "simulation/jobs.py",
        (
            "a chunk ends too early",
            "torch.searchsorted(count, marks) + 1)",
            "torch.searchsorted(count, marks))",
        ),
        (
            "records of the first block for all",
            "slice(at, at + len(block.ids))",
            "slice(len(block.ids))",
        ),
    ),
    *_of(
        "shared",
        "simulation/steps.py",
        ("missing step mask", "is_partial = active < needed", "is_partial = False"),
    ),
    *_of(
        "shared",
        "simulation/convolutions.py",
        ("patches in another order", "patches[:, :, i, j],", "patches[:, :, -i - 1, -j - 1],"),
        ("another layout", "permute(2, 0, 1, 3).contiguous()", "permute(2, 0, 1, 3)"),
    ),
    *_of(
        "shared",
        "simulation/captured.py",
        ("finished clients go on", "            self._save(active)\n", "            pass\n"),
        ("values settle one by one", "value.clone() if", "value if"),
        ("rows of the first step", "self.now[: len(turn), -turn.shape[1] :].copy_(turn)", "pass"),
        (
            "memory of a former block",
            "torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))",
            "pass",
        ),
    ),
    *_of(
        "shared",
        "simulation/tracing.py",
        ("two leaves taken for one", "leaf.detach() for leaf in leaves", "leaf for leaf in leaves"),
    ),
    *_of(
        "shared",
        "simulation/store.py",
        (
            "nothing is discarded",
            "self._staged = self._staged[: self._committed]",
            "self._committed = len(self._staged)",
        ),
        (
            "what is discarded keeps its version",
            "for ids, _ in self._staged[self._committed :]:",
            "for ids, _ in self._staged[:0]:",
        ),
    ),
    *_of(
        "runs",
        "disk.py",
        ("damage is not noticed", "if checksum != _checksum(named, about):", "if False:"),
        ("written in place", 'path.with_name(path.name + ".partial")', "path"),
        ("in any order", "_ABOUT: f", 'str(id(named)): "", _ABOUT: f'),
        ("two at once", "fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)", "fcntl.LOCK_SH"),
    ),
    *_of(
        "runs",
        "runs.py",
        (
            "another format is read",
            "if version is not None and version != FORMAT:",
            "if version is None:",
        ),
        ("the journal is forgotten", "            store.apply(named)\n", ""),
        ("costs begin again", 'costs=Costs(**progress["costs"])', "costs=Costs()"),
        ("a round too much", 'round=progress["round"]', 'round=progress["round"] - 1'),
        (
            "a failed beginning stays",
            "            (self.path / name).unlink(missing_ok=True)\n",
            "",
        ),
    ),
    *_of(
        "runs",
        "simulation/store.py",
        (
            "nothing is known to wait",
            "for _, named in self._staged)",
            "for _, named in self._staged[:0])",
        ),
        (
            "files run ahead of the server",
            "        if not self.is_on_disk:\n            self._write_staged()\n",
            "        self._write_staged()\n",
        ),
    ),
    *_of(
        "span",
        "numerics/spanning/clients.py",
        ("missing preconditioner", '{"v": b.inverse @ gradient}', '{"v": gradient}'),
        ("the cuts are forgotten", "client.seen <= cut", "client.seen < cut"),
        ("the own v instead of the shrunk one", "fixed=fixed, start=", "start="),
    ),
    *_of(
        "span",
        "numerics/spanning/server.py",
        (
            "missing inverse of the moments",
            "torch.linalg.inv(moments + self.made.damping * eye)",
            "eye",
        ),
    ),
)
