"""Two small models as pure functions, with hand-written back-propagation.

A model is a dict of arrays. Without side information::

    features = tanh(hidden.weight x + hidden.bias)      # features = x without hidden.weight
    logits   = head.weight features + head.bias

With side information z of the client (Model 1, concatenation, Eq. (3) of PerFedSI)::

    logits   = head.weight [features, encoder.weight z + encoder.bias] + head.bias

With batch normalisation of the hidden layer, over the rows given (the ``_norm`` functions)::

    z        = hidden.weight x + hidden.bias
    features = tanh(norm.weight (z - mean z) / sqrt(var z + 1e-5) + norm.bias)

Shapes: ``hidden.weight`` (h, p), ``hidden.bias`` (h,), ``encoder.weight`` (s, q), ``encoder.bias``
(s,), ``head.weight`` (c, h), (c, p) or (c, h + s), ``head.bias`` (c,); x (rows, p), z (q,), the
same for all rows of a client. The loss is the mean cross-entropy over the rows given, or, in the
``_squared`` functions, half the mean squared error.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Labels = NDArray[np.integer]


def features(params: Params, x: Array) -> Array:
    """Give the input of the head, (rows, h); x itself where there is no hidden layer."""
    if "hidden.weight" not in params:
        return x
    return np.tanh(x @ params["hidden.weight"].T + params["hidden.bias"])


def _with_side(params: Params, x: Array, z: Array) -> Array:
    """Append the encoding of the side information to the features of every row, (rows, h + s)."""
    code = params["encoder.weight"] @ z + params["encoder.bias"]  # W(z) of Eq. (3), linear
    return np.concatenate([features(params, x), np.tile(code, (len(x), 1))], axis=1)


def _cross_entropy(logits: Array, y: Labels) -> float:
    """Average -log softmax(logits)[label] over the rows."""
    total = 0.0
    for row, label in zip(logits, y, strict=True):
        peak = row.max()
        total += peak + np.log(np.exp(row - peak).sum()) - row[label]
    return float(total / len(y))


def _cross_entropy_slope(logits: Array, y: Labels) -> Array:
    """Differentiate the mean cross-entropy by the logits: (softmax - one-hot) / rows."""
    slope = np.zeros_like(logits)
    for j, (row, label) in enumerate(zip(logits, y, strict=True)):
        slope[j] = np.exp(row - row.max())
        slope[j] /= slope[j].sum()
        slope[j, label] -= 1.0
    return slope / len(y)


def _hidden_gradient(params: Params, x: Array, slope: Array) -> Params:
    """Back-propagate a slope by the features, (rows, h), to the hidden layer, if there is one."""
    if "hidden.weight" not in params:
        return {}
    slope = slope * (1.0 - features(params, x) ** 2)  # tanh' = 1 - tanh^2
    return {"hidden.weight": slope.T @ x, "hidden.bias": slope.sum(axis=0)}


def _gradient_from(params: Params, x: Array, slope: Array) -> Params:
    """Back-propagate a slope by the outputs, (rows, c), to every parameter."""
    result = {"head.weight": slope.T @ features(params, x), "head.bias": slope.sum(axis=0)}
    result.update(_hidden_gradient(params, x, slope @ params["head.weight"]))
    return result


def gradient_features(params: Params, x: Array, targets: Array) -> Params:
    """Differentiate the mean square distance of `features` to targets (rows, h).

    The mean is over rows and features; the derivatives are those by the hidden layer.
    """
    return _hidden_gradient(params, x, 2.0 * (features(params, x) - targets) / targets.size)


def predict(params: Params, x: Array) -> Array:
    """Compute the logits (or the outputs of a regression) of every row, (rows, c)."""
    return features(params, x) @ params["head.weight"].T + params["head.bias"]


def loss(params: Params, x: Array, y: Labels) -> float:
    """Compute the mean cross-entropy of the rows x (rows, p) with labels y (rows,)."""
    return _cross_entropy(predict(params, x), y)


def gradient(params: Params, x: Array, y: Labels) -> Params:
    """Differentiate `loss` by every parameter."""
    return _gradient_from(params, x, _cross_entropy_slope(predict(params, x), y))


def predict_side(params: Params, x: Array, z: Array) -> Array:
    """Compute the logits (rows, c) of the rows x (rows, p) of a client with side information z."""
    return _with_side(params, x, z) @ params["head.weight"].T + params["head.bias"]


def loss_side(params: Params, x: Array, z: Array, y: Labels) -> float:
    """Compute the mean cross-entropy of a client's rows, given its side information z (q,)."""
    return _cross_entropy(predict_side(params, x, z), y)


def gradient_side(params: Params, x: Array, z: Array, y: Labels) -> Params:
    """Differentiate `loss_side` by every parameter."""
    slope = _cross_entropy_slope(predict_side(params, x, z), y)
    result = {"head.weight": slope.T @ _with_side(params, x, z), "head.bias": slope.sum(axis=0)}
    inner = slope @ params["head.weight"]  # by the concatenation, (rows, h + s)
    width = inner.shape[1] - len(params["encoder.bias"])
    code_slope = inner[:, width:].sum(axis=0)  # all rows share one z
    result["encoder.weight"] = np.outer(code_slope, z)
    result["encoder.bias"] = code_slope
    result.update(_hidden_gradient(params, x, inner[:, :width]))
    return result


def loss_squared(params: Params, x: Array, y: Array) -> float:
    """Compute 1/(2 rows) sum of squared errors of `predict`; y is (rows,) or (rows, c)."""
    error = predict(params, x) - np.reshape(y, (len(x), -1))
    return float((error**2).sum() / (2 * len(x)))


def gradient_squared(params: Params, x: Array, y: Array) -> Params:
    """Differentiate `loss_squared` by every parameter."""
    error = predict(params, x) - np.reshape(y, (len(x), -1))
    return _gradient_from(params, x, error / len(x))


def gradient_features_squared(params: Params, x: Array) -> Params:
    """Differentiate the sum of all squared features of the rows, by every parameter."""
    result = {name: np.zeros_like(value) for name, value in params.items()}
    result.update(_hidden_gradient(params, x, 2 * features(params, x)))
    return result


def statistics_norm(params: Params, x: Array) -> Params:
    """Compute mean and variance of the hidden layer over the rows, by the names of the running."""
    z = x @ params["hidden.weight"].T + params["hidden.bias"]
    return {"norm.running_mean": z.mean(axis=0), "norm.running_var": z.var(axis=0)}


def predict_norm(params: Params, statistics: Params, x: Array) -> Array:
    """Compute the logits (rows, c) with the hidden layer normalised by the given statistics."""
    z = x @ params["hidden.weight"].T + params["hidden.bias"]
    deviation = np.sqrt(statistics["norm.running_var"] + 1e-5)
    unit = (z - statistics["norm.running_mean"]) / deviation
    features = np.tanh(params["norm.weight"] * unit + params["norm.bias"])
    return features @ params["head.weight"].T + params["head.bias"]


def gradient_norm(params: Params, x: Array, y: Labels) -> Params:
    """Differentiate the mean cross-entropy of the normalised model, through the statistics too."""
    z = x @ params["hidden.weight"].T + params["hidden.bias"]
    deviation = np.sqrt(z.var(axis=0) + 1e-5)
    unit = (z - z.mean(axis=0)) / deviation
    features = np.tanh(params["norm.weight"] * unit + params["norm.bias"])
    slope = _cross_entropy_slope(features @ params["head.weight"].T + params["head.bias"], y)
    inner = slope @ params["head.weight"] * (1.0 - features**2)
    by_unit = inner * params["norm.weight"]
    by_z = by_unit - by_unit.mean(axis=0) - unit * (by_unit * unit).mean(axis=0)
    by_z = by_z / deviation
    return {
        "head.weight": slope.T @ features,
        "head.bias": slope.sum(axis=0),
        "norm.weight": (inner * unit).sum(axis=0),
        "norm.bias": inner.sum(axis=0),
        "hidden.weight": by_z.T @ x,
        "hidden.bias": by_z.sum(axis=0),
    }
