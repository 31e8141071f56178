"""Every method in the package passes every check."""

import pytest

from atoll.algorithms import list_methods
from atoll.kernel.algorithm import Algorithm
from atoll.testing.conformance import Check, checks


# One method after another: its checks look at the same runs, which are played once where they follow each other.
@pytest.mark.parametrize(
    ("method", "check"),
    [
        pytest.param(method, check, id=f"{check.name}-{name}")
        for name, method in list_methods().items()
        for check in checks()
    ],
)
def test_conforms(method: type[Algorithm], check: Check) -> None:
    check.run(method)
