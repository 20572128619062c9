"""No test of the frontend begins with the caller of another."""

import pytest

from pagoda_frontend.budget.caller import caller, current_hold


@pytest.fixture(autouse=True)
def no_caller() -> None:
    """Forget the caller and what the request holds: they live in context variables, which tests share."""
    current_hold.set(None)
    caller.set("")
