"""Defects of public code, planted in the methods here: the test that docs/concepts/defects.md names must fail.

Each was read in the source of a public repository, not executed. A planted method takes the place of the sound one in
a fresh copy of the module of the test.
"""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from atoll.algorithms.apfl import APFL
from atoll.algorithms.cfl import CFL
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedamp import FedAMP
from atoll.algorithms.feddyn import FedDyn
from atoll.algorithms.fedgen import FedGen
from atoll.algorithms.mocha import Mocha
from atoll.algorithms.perfedavg import PerFedAvg
from atoll.algorithms.pfedme import PFedMe
from atoll.data.task import Training
from atoll.kernel.algorithm import Algorithm, Replies, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, spread
from atoll.testing.conformance import checks
from atoll.toolbox.client import Penalty, linear, proximal, sgd

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "concepts" / "defects.md").read_text()


class PenaltyWithoutGradient(FedAMP):
    """The penalty is computed from `.data`."""

    def local(self, nothing: None, cohort: Cohort) -> Update:
        return FedAMP.local(replace(self, lam=0.0), nothing, cohort)


class RelationshipWithoutGradient(Mocha):
    """The relationship is computed from a `state_dict`."""

    def local(self, nothing: None, cohort: Cohort) -> Update:
        return Mocha.local(replace(self, lam=0.0), nothing, cohort)


class ThetaIsTheModel(PFedMe):
    """Theta is another name of the parameters, which w_k overwrites."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        return replace(update, keep=w + update.send["delta"])


class NeverPersonal(PFedMe):
    """The personal models are never updated."""

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        return cohort.stacked(cohort.initial)


class OwnAnchor(PFedMe):
    """Theta is pulled to itself, that is, not at all."""

    def _step(self, rule: Training, carry: Any, batch: Batch, lr: Tensor) -> Any:
        end = PFedMe._step(replace(self, lam=0.0), rule, carry, batch, lr)
        w, theta = carry.w, end.theta
        return replace(end, w=w.moved(w.trained - theta.trained, -self.eta * self.lam))


class NoGradientForV(APFL):
    """The loss of the mixture is that of a copy."""

    def _step(self, rule: Training, carry: Any, batch: Batch, lr: Tensor) -> Any:
        return replace(super()._step(rule, carry, batch, lr), v=carry.v)


class MixesOutputs(APFL):
    """Outputs are mixed. Where they are the loss, v feels its own gradient, not that of the mixture."""

    def _step(self, rule: Training, carry: Any, batch: Batch, lr: Tensor) -> Any:
        moved = carry.v.moved(batch.gradient(carry.v)[0], -lr * carry.alpha)
        return replace(super()._step(rule, carry, batch, lr), v=moved)


class NormWithoutSquare(FedDyn):
    """The pull is (alpha / 2) ||theta - w||."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        q = cohort.recall(default=w.zeros())
        pull = Penalty(_norm, {"alpha": self.alpha, "center": w.trained})
        delta = sgd(cohort, start=w, epochs=self.epochs, penalty=linear(-q) + pull) - w
        return Update(send={"delta": delta}, keep=q - delta.trained * self.alpha)


def _norm(g: Params, w: Params, given: dict[str, Any]) -> Params:
    apart = w.only(g) - given["center"]
    return g.moved(apart / (apart.norm() + 1e-15), 0.5 * given["alpha"])


class ServerAsTeacher(FedGen):
    """The generator learns from the averaged head."""

    def aggregate(self, server: Any, replies: Replies) -> Any:
        after, counts = super().aggregate(server, replies), replies.stack("labels").value
        heads = spread(after.w.part("head"), len(counts))
        return replace(after, generator=self.teach(server.generator, heads, counts, replies.workbench))


class PositionsForClients(CFL):
    """Positions within a cluster are taken for numbers of clients."""

    def split(self, server: Any, replies: Replies) -> Any:
        after, cluster = super().split(server, replies), server.cluster
        for new, split in enumerate(after.splits, start=1):
            if new >= server.models.clients:
                members = (cluster == split.of).nonzero()[:, 0]
                cluster = cluster.index_fill(0, (after.cluster[members] == new).nonzero()[:, 0], new)
        return replace(after, cluster=cluster)


class AdaptsOnTest(PerFedAvg):
    """The step before evaluation is on test data."""

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        def step(v: Params, batch: Batch, lr: Tensor) -> Params:
            return v.moved(batch.gradient(v)[0], -lr)

        return cohort.scan(step, w, given=cohort.lr, split="test")


class TrainsTwice(PerFedAvg):
    """Training is called twice in a round."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        once = super().local(w, cohort).send["delta"]
        twice = super().local(w + once, cohort)  # type: ignore[arg-type]
        return replace(twice, send={"delta": once + twice.send["delta"]})


class FedProxAndTuning(Ditto):
    """The shared model is held to w, and the personal one tuned from it."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        w_k = sgd(cohort, start=w, epochs=self.epochs, penalty=proximal(self.lam, center=w))
        v = sgd(cohort, start=w_k, epochs=self.personal_epochs)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting), keep=v)


@dataclass(frozen=True)
class Planted:
    number: int  # of the defect, on the page
    method: type[Algorithm]
    test: str  # that fails for it
    arguments: dict[str, Any] = field(default_factory=dict)


UNREAD = next(check for check in checks() if check.name == "test-data-are-never-read")
PLANTED = [
    Planted(
        1,
        PenaltyWithoutGradient,
        "tests/theory/test_interpolation.py::test_two_opposite_clients_meet_where_pull_and_loss_balance",
        {"lam": 1.0, "sigma": 3.0},
    ),
    Planted(
        2,
        RelationshipWithoutGradient,
        "tests/theory/test_multitask.py::test_mocha_converges_to_a_stationary_point_of_its_objective",
        {"lam": 0.5},
    ),
    *(  # not with eta * lam = 1, where w_k is theta
        Planted(
            number,
            method,
            "tests/theory/test_moreau.py::test_pfedme_converges_to_the_fixed_point_of_fedprox",
            {"eta": 1.5},
        )
        for number, method in ((3, ThetaIsTheModel), (4, NeverPersonal), (5, OwnAnchor))
    ),
    Planted(
        6,
        NoGradientForV,
        "tests/theory/test_interpolation.py::test_apfl_reaches_the_own_optimum_with_any_share",
        {"alpha": 0.9},
    ),
    Planted(
        7,
        MixesOutputs,
        "tests/theory/test_interpolation.py::test_apfl_is_gradient_descent_on_the_mixture",
        {"adaptive": False},
    ),
    Planted(8, NormWithoutSquare, "tests/theory/test_moreau.py::test_feddyn_in_its_other_form"),
    Planted(
        9,
        ServerAsTeacher,
        "tests/theory/test_distillation.py::test_the_generator_is_taught_by_the_heads_of_the_clients",
    ),
    Planted(10, PositionsForClients, "tests/algorithms/test_cfl.py::test_splits_of_splits_move_the_right_clients"),
    Planted(
        11, AdaptsOnTest, "tests/conformance/test_battery.py::test_conforms", {"method": AdaptsOnTest, "check": UNREAD}
    ),
    Planted(
        12,
        TrainsTwice,
        "tests/theory/test_meta.py::test_perfedavg_round_follows_the_meta_gradient",
        {"order": "fo"},
    ),
    Planted(
        16,
        FedProxAndTuning,
        "tests/theory/test_quadratics.py::test_the_shared_model_of_ditto_is_that_of_fedavg",
        {"lam": 2.0},
    ),
]
each = pytest.mark.parametrize("planted", PLANTED, ids=lambda one: f"{one.number}-{one.method.__name__}")


def module_of(test: str) -> ModuleType:
    """A copy of a test's module, so that the one that pytest runs stays as it is."""
    spec = importlib.util.spec_from_file_location("planted", ROOT / test.partition("::")[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each
def test_the_named_test_fails(planted: Planted) -> None:
    module, sound = module_of(planted.test), planted.method.__bases__[0]
    vars(module)[sound.__name__] = planted.method
    test: Callable[..., None] = getattr(module, planted.test.partition("::")[2])
    with pytest.raises(AssertionError) as raised:
        test(**planted.arguments)
    assert "Every client must be able to train" not in str(raised.value)  # it did its wrong work to the end


@each
def test_the_page_names_it(planted: Planted) -> None:
    row = re.search(rf"^\| {planted.number} \|.*$", PAGE, flags=re.MULTILINE)
    assert row is not None
    assert f"`{planted.test}" in row[0]
    assert row[0].endswith("| yes |")
