"""The contract of an algorithm, as fifteen checks that anyone can run on a method of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from handspan.core.method import Method
from handspan.numerics.local_work import LocalWork
from handspan.registry import MethodSpec
from handspan.testing import client_checks, message_checks, run_checks
from handspan.testing.case import Case

CHECKS: dict[str, Callable[[Case], None]] = {
    check.__name__: check
    for check in (
        client_checks.types_are_as_declared,
        client_checks.inactive_steps_change_nothing,
        client_checks.padding_is_invisible,
        client_checks.inputs_stay_as_they_are,
        run_checks.the_default_type_does_not_matter,
        run_checks.blocks_run_without_warning,
        run_checks.the_key_decides_everything,
        client_checks.the_order_of_clients_changes_nothing,
        run_checks.one_row_suffices,
        message_checks.messages_survive_the_wire,
        run_checks.a_resumed_run_continues,
        message_checks.the_server_sees_only_sums,
        message_checks.uploads_are_counted_and_private,
        run_checks.an_abandoned_round_leaves_no_trace,
        run_checks.the_flat_twin_is_the_same_method,
    )
}
"""The checks by name, in the order of the contract."""


def check_algorithm(
    method: Method | MethodSpec | str,
    *,
    work: LocalWork | None = None,
    checks: Iterable[str] | None = None,
) -> None:
    """Check that a method is a well-behaved algorithm, on toy problems.

    Whether it is the *right* algorithm is another question: for that, compare it with an oracle.

    Parameters
    ----------
    method
        A ``Method``, or a text that names one: ``"pflmf:rank=2"``, ``"fedrep+ft"``.
    work
        Local work; by default 3 steps on batches of 3 rows.
    checks
        Names of checks; all of ``CHECKS`` by default.

    Raises
    ------
    AssertionError
        With a line for each check that fails.

    Examples
    --------
    >>> check_algorithm("local", checks=["types_are_as_declared"])
    """
    case = Case(method, work=work)
    failures: list[str] = []
    cause: Exception | None = None
    for name in CHECKS if checks is None else checks:
        try:
            CHECKS[name](case)
        except Exception as error:  # a check that cannot run has failed as well
            told = str(error) if isinstance(error, AssertionError) else repr(error)
            failures.append(f"{name}: {told}")
            cause = cause or error
    if failures:
        raise AssertionError("\n".join([f"{case.spec.text} breaks the contract", *failures])) from (
            cause
        )
