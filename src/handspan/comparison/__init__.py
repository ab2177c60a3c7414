"""Methods x seeds x trials on equal terms: ``compare``, ``merge`` of its shards, ``read``."""

from handspan.comparison.merging import merge
from handspan.comparison.outcome import Comparison, read
from handspan.comparison.running import Standing, compare

__all__ = ["Comparison", "Standing", "compare", "merge", "read"]
