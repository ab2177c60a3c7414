"""handspan: personal models from a shared span.

Personalised federated learning: many clients keep their rows at home and still each get a model
that fits them. ``handspan.fit("fedrep", data, model=net)`` trains one method,
``handspan.compare`` sets several side by side, ``handspan.load`` opens a finished run and
``handspan.plot`` draws it.
"""

__version__ = "0.1.0"

__all__ = ["FederatedData", "Result", "__version__", "compare", "fit", "load", "methods", "plot"]


def __getattr__(name: str) -> object:
    """Import the public names on first use, so that ``import handspan`` stays quick."""
    if name == "FederatedData":
        from handspan.core.data import FederatedData

        return FederatedData
    if name in {"Result", "fit", "load"}:
        from handspan import fitting

        return getattr(fitting, name)
    if name == "compare":
        from handspan.comparison import compare

        return compare
    if name == "plot":
        from handspan.plotting import plot

        return plot
    if name == "methods":
        from handspan.registry import methods

        return methods
    raise AttributeError(f"module 'handspan' has no attribute {name!r}")
