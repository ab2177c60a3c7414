"""FedAvg on handspan and on other simulators, side by side: ``python -m benchmarks.peers``.

Each contestant lives in a process of its own, in its own environment, and waits for its turn. The
sides of the others import nothing of handspan, which is not installed where they run.
"""
