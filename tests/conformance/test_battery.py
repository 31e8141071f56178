"""Every method in the package passes every check."""

import pytest

from atoll.algorithm import Algorithm
from atoll.algorithms import found
from atoll.conformance import Check, checks


@pytest.mark.parametrize("method", [pytest.param(method, id=name) for name, method in found().items()])
@pytest.mark.parametrize("check", [pytest.param(check, id=check.name) for check in checks()])
def test_conforms(method: type[Algorithm], check: Check) -> None:
    check.run(method)
