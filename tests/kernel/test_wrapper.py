"""What wraps a method is a method: all that it does not change is the method's."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest

from atoll import Algorithm
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.feddf import FedDF
from atoll.algorithms.fedora import Fedora
from atoll.kernel.algorithm import NonNegative
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.hyperparameters import hyperparameters
from atoll.kernel.wrapper import Wrapper, core_of, title_of, values_of, with_values


@dataclass(frozen=True, kw_only=True)
class Plain(Wrapper):
    """Changes nothing."""

    inner: Algorithm


@dataclass(frozen=True, kw_only=True)
class Doubled(Wrapper):
    """Pulls twice, and has a hyperparameter of its own before those of the method."""

    strength: NonNegative = 2.0
    inner: Algorithm

    def pulls(self, lr: float) -> dict[str, float]:
        return {name: self.strength * value for name, value in self.inner.pulls(lr).items()}


NAMES = [name for name in vars(Algorithm) if not name.startswith("_") and name != "defines"]


@pytest.mark.parametrize("method", [Ditto(lam=3.0), FedDF(), Fedora()], ids=title_of)
@pytest.mark.parametrize("name", NAMES)
def test_what_a_wrapper_does_not_define_is_the_methods(method: Algorithm, name: str) -> None:
    """catches: a fact or a hook of the base that stands in the way of the method's own."""
    assert getattr(Plain(inner=Plain(inner=method)), name) == getattr(method, name)


def test_what_it_defines_is_its_own() -> None:
    method = Doubled(inner=Ditto(lam=3.0))
    assert method.pulls(0.5) == {"lr * lam": 3.0}
    assert Plain(inner=method).pulls(0.5) == method.pulls(0.5)


def test_it_says_which_hooks_there_are() -> None:
    for hook in ("personalize", "prepare", "pulls", "equip"):
        assert Plain(inner=Ditto()).defines(hook) == Ditto().defines(hook) == (hook in ("personalize", "pulls"))
    assert Doubled(inner=FedAvg()).defines("pulls")
    assert not Plain(inner=FedAvg()).defines("pulls")


def test_hyperparameters_stand_in_the_order_of_fields() -> None:
    method = Plain(inner=Doubled(inner=Ditto(lam=3.0), strength=4))
    assert [*values_of(method)] == ["strength", *values_of(Ditto())]
    assert [one.name for one in hyperparameters(method)] == [*values_of(method)]
    assert (values_of(method)["strength"], values_of(method)["lam"]) == (4, 3.0)
    assert (method.strength, method.lam) == (4, 3.0)
    with pytest.raises(AttributeError, match="'Plain' object has no attribute 'lamb'"):
        _ = method.lamb


def test_other_values_reach_the_method_inside() -> None:
    method = Plain(inner=Doubled(inner=Ditto(epochs=2)))
    changed = with_values(method, lam=7.0, strength=1.0)
    assert changed == Plain(inner=Doubled(inner=Ditto(epochs=2, lam=7.0), strength=1.0)) != method
    assert with_values(method) == method
    for name, value in {"lam": -1.0, "strength": -1.0}.items():
        with pytest.raises(HyperparameterError, match=f"`{name}` of Ditto must be a float"):
            with_values(method, **{name: value})


def test_its_name_is_that_of_the_innermost_method() -> None:
    method = Plain(inner=Doubled(inner=Ditto()))
    assert core_of(method) == Ditto()
    assert title_of(method) == "Ditto"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, replace])
def test_it_is_a_value(again: Any) -> None:
    method = Doubled(inner=Plain(inner=Ditto(lam=3.0)), strength=4.0)
    assert again(method) == method
    assert hash(again(method)) == hash(method)
    assert len({method, replace(method, inner=Ditto(lam=3.0)), replace(method, strength=5.0)}) == 3
