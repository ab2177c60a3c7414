"""Tools that prove a method: the contract, toy problems, and independent references."""

from handspan.testing.case import Case
from handspan.testing.contract import CHECKS, check_algorithm

__all__ = ["CHECKS", "Case", "check_algorithm"]
