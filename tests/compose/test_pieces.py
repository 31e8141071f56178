"""A piece changes how a method trains without editing it."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from atoll import Algorithm, LocalEngine, Update, federate
from atoll.algorithms import list_methods, name_of
from atoll.algorithms.fedavg import FedAvg
from atoll.compose import create
from atoll.compose.pieces import Prox
from atoll.federation.labels import label
from atoll.federation.report import Report
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import HyperparameterError, UnknownName
from atoll.kernel.params import Params
from atoll.kernel.wrapper import values_of
from atoll.testing.conformance import check, personal_models, play
from atoll.testing.conformance.methods import shorten
from atoll.testing.conformance.tasks import build_task
from atoll.testing.conformance.trees import find_difference


@pytest.fixture
def engine() -> LocalEngine:
    return LocalEngine(dtype=torch.float64)


def test_fedavg_with_prox_is_fedprox(make_task, engine) -> None:
    task = make_task(dtype=torch.float64)
    composed = federate(task, create("fedavg+prox:mu=0.7"), rounds=3, engine=engine, evaluation="none")
    written = federate(task, create("fedprox:mu=0.7"), rounds=3, engine=engine, evaluation="none")
    for name, leaf in written.server.items():
        assert torch.equal(composed.server[name], leaf)


def test_sharpness_of_a_part_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """catches: a part that is normalised with the rest, or that is trained alone."""
    texts = ("fedavg", "fedavg+sam:rho=0.3,part=none", "fedavg+sam:rho=0.3,part=head", "fedavg+sam:rho=0.3")
    plain, none, head, all_ = (personal_models(play(build_task(), create(text), 2)) for text in texts)
    assert find_difference(plain, none) is None
    assert "nothing to perturb" in caplog.text
    assert find_difference(plain, head) is not None
    assert find_difference(all_, head) is not None
    odd = [personal_models(play(build_task("odd"), create(f"fedavg{piece}"), 2)) for piece in ("", "+sam:part=norm")]
    assert find_difference(*odd) is not None


@pytest.mark.parametrize(
    ("composed", "written"),
    [
        ("fedavg+sam:rho=0.3", "fedsam:rho=0.3"),
        ("fedavg+sam:rho=0.3,part=first:2", "fedavg+sam:rho=0.3"),
        ("fedavg+asam:rho=0.3", "fedsam:rho=0.3,adaptive=true"),
        ("fedavg+fsa:top_c=1,rho_larger=0.7", "fedfsa:top_c=1,rho_larger=0.7,alpha=1,head_epochs=0"),
        ("fedavg+fsa:top_c=0,rho=0.3", "fedavg+sam:rho=0.3"),
        ("feddyn+sam:rho=0.1", "fedspeed:rho=0.1"),
        ("fedavg+tune:tune=all,tune_epochs=5", "fedavg-ft:tune_epochs=5"),
        ("fedfsa+tune:head_epochs=0,tune_epochs=3", "fedfsa:head_epochs=3"),
        ("fedper+prox+sam", "fedper+sam+prox"),
        ("fedavg+sam+prox:rho=0", "fedprox:mu=0.1"),
    ],
)
def test_methods_that_others_are_made_of(composed: str, written: str) -> None:
    """catches: a second piece that is lost, because only the outermost one is asked."""
    one, other = (personal_models(play(build_task(), create(text), 3)) for text in (composed, written))
    assert find_difference(one, other) is None
    assert find_difference(one, personal_models(play(build_task(), create(composed.partition("+")[0]), 3))) is not None


def test_a_piece_that_changes_what_is_deployed_leaves_training_alone() -> None:
    """catches: FedPer, which begins its training at what it deploys, and so began it at what was tuned."""
    for method in ("fedper", "local", "fedrep:final_epochs=0", "mtl-reg"):
        name, _, values = method.partition(":")
        plain, tuned = (play(build_task(), create(text), 3) for text in (method, f"{name}+tune:{values}"))
        assert find_difference(plain.server, tuned.server) is None
        assert find_difference(*(one.population.memory.save(round=3)["kept"] for one in (plain, tuned))) is None
        assert find_difference(personal_models(plain), personal_models(tuned)) is not None


def test_a_new_client_tunes_once(make_cohort) -> None:
    """catches: a model that is tuned where it is deployed, and tuned again because its client is new."""
    written, pieced = (
        create(text) for text in ("fedavg-ft:tune=head,tune_epochs=2", "fedavg+tune:tune=head,tune_epochs=2")
    )
    server, cohort = build_task().network.initial, make_cohort(build_task())
    assert find_difference(written.welcome(server, cohort), pieced.welcome(server, cohort)) is None
    unlabelled = cohort.without("labels")
    assert pieced.welcome(server, unlabelled) is server


def test_layers_that_were_sensitive_get_the_larger_radius_the_next_time() -> None:
    same, flexible = (
        [
            personal_models(play(build_task(), create(f"ditto+fsa:top_c=1,rho_larger={larger}"), rounds))
            for rounds in (1, 2)
        ]
        for larger in (0.1, 0.9)
    )
    assert find_difference(same[0], flexible[0]) is None  # nothing is known in the first round
    assert find_difference(same[1], flexible[1]) is not None


def test_what_a_piece_keeps_lies_beside_what_the_method_keeps() -> None:
    alone, both = (play(build_task(), create(text), 2) for text in ("ditto", "ditto+fsa:rho=0.0,rho_larger=0.0"))
    mine, theirs = (report.population.memory.save(round=2) for report in (alone, both))
    assert find_difference(mine["kept"], theirs["kept"]) is None
    assert set(theirs["beside"]) == {"fsa"}
    assert set(theirs["beside"]["fsa"]["kept"]) == {"body.0.weight", "head.weight"}
    assert not mine["beside"]


def test_each_piece_keeps_under_its_own_name() -> None:
    """catches: two pieces that both keep something under the name of the last one."""
    inside, outside = (play(build_task(), create(f"fedavg+{both}"), 3) for both in ("fsa+gate", "gate+fsa"))
    kept = [report.population.memory.save(round=3)["beside"] for report in (inside, outside)]
    assert [sorted(one) for one in kept] == [["fsa", "gate"]] * 2
    assert find_difference(*kept) is None


@pytest.mark.parametrize(
    "piece", ["prox:mu=0.0", "sam:rho=0.0", "fsa:rho=0.0,rho_larger=0.0", "tune:tune_epochs=0", "gate:margin=never"]
)
def test_neutral_values_leave_the_method_as_it_was(make_task, engine, piece: str) -> None:
    task = make_task(dtype=torch.float64)
    for method in ("ditto", "fedper", "local"):
        alone, with_piece = (
            federate(task, create(text), rounds=2, engine=engine, evaluation="none")
            for text in (method, f"{method}+{piece}")
        )
        everybody = torch.arange(task.clients).numpy()
        default = alone.algorithm.personalize(alone.server, _cohort(alone, engine, everybody))
        other = with_piece.algorithm.personalize(with_piece.server, _cohort(with_piece, engine, everybody))
        assert all(torch.equal(default[name], other[name]) for name in default)


def _cohort(report, engine, clients):
    from atoll.kernel.cohort import Cohort
    from atoll.runtime.engines.plan import Plan
    from atoll.runtime.engines.scan import Scanner

    return Cohort(report.population.facts, clients, 99, Scanner(report.population, Plan(), engine.programs))


def test_a_strong_pull_keeps_clients_where_they_began(make_task, engine) -> None:
    """With lr * mu = 1 every step goes back to the start, so that only the last one counts."""
    task = make_task(dtype=torch.float64, lr=0.01)
    moved = {
        mu: federate(task, create(f"fedavg+prox:mu={mu}"), rounds=1, engine=engine, evaluation="none").server
        for mu in (0.0, 100.0)
    }
    initial = task.network.initial
    assert (moved[100.0] - initial).norm() < (moved[0.0] - initial).norm()


def test_it_is_a_method_like_any_other() -> None:
    method = create("fedper+prox:mu=0.5,epochs=2")
    assert name_of(method) == "fedper+prox"
    assert label(method) == "fedper+prox:epochs=2,mu=0.5"
    assert [*values_of(method)] == ["private", "epochs", "weighting", "mu"]
    assert method == create("fedper+prox:mu=0.5,epochs=2") != create("fedper+prox:mu=0.5")
    assert (method.epochs, method.mu) == (2, 0.5)
    assert "Personalization Layers" in method.cites
    assert "Heterogeneous Networks" in method.cites
    assert method.limits == {"fedper": {"mu": 0.0}}


@pytest.mark.parametrize("name", ["fedper+prox", "fedavg+sam", "fedavg+fsa", "scaffold+tune", "fedper+gate"])
def test_it_passes_the_battery(name: str) -> None:
    results = list(check(create(name)))
    assert [result.name for result in results if not result.passed] == []


def test_runs_remember_it(make_task, tmp_path: Path, engine) -> None:
    task = make_task(shares=(0.6, 0.2, 0.2), dtype=torch.float64)
    federate(task, create("fedper+prox:mu=0.5"), rounds=1, engine=engine, folder=tmp_path / "run")
    assert Report.read(tmp_path / "run").label == "fedper+prox:mu=0.5"


def test_a_users_own_method_takes_pieces(tmp_path: Path, make_task, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom atoll import Algorithm, Update\n"
        "from atoll.toolbox.client import sgd\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(Algorithm):\n    def local(self, w, cohort):\n"
        '        return Update(send={"delta": sgd(cohort, start=w, epochs=1) - w}, weight=cohort.samples)\n'
    )
    method = create("./mine.py+prox:mu=0.5")
    assert label(method) == "mine.py+prox:mu=0.5"
    federate(make_task(shares=(0.6, 0.2, 0.2)), method, rounds=1, folder=tmp_path / "run")
    assert Report.read(tmp_path / "run").algorithm.mu == 0.5


@pytest.mark.parametrize("name", list_methods())
def test_a_piece_works_in_every_round_or_is_refused_before_the_first(name: str) -> None:
    """catches: fedgen+fsa, which trains by another gradient from the second round on; fafi+gate, an ensemble."""
    for piece in ("fsa", "tune", "gate"):
        try:
            method = shorten(create(f"{name}+{piece}"))
        except HyperparameterError:
            continue
        rounds, cohort = (1, None) if method.one_shot else (2, 2)
        task = build_task(items_by=method.items_by)
        assert len(personal_models(play(task, method, rounds, cohort=cohort))) == task.clients


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pfedme+prox", "must train by `sgd`. That in pfedme.prox trains in another way"),
        ("fafi+sam+tune", "must train by `sgd`. That in fafi.sam trains"),
        ("afl+fsa", "must train by `sgd`"),
        ("fedgen-local+sam:use=classifier", "or with these values not at all"),
        ("fedproto+tune", "must be a model. That in fedproto.tune deploys more"),
        ("ensemble+tune+prox", "must be a model. That in ensemble.tune deploys more"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(name: str, why: str) -> None:
    with pytest.raises(HyperparameterError, match=why):
        create(name)


def test_refusals_go_by_hyperparameters() -> None:
    for name in ("pfedme-survey+prox", "fedproto+tune:answer=head", "ensemble+tune:tune_epochs=0"):
        assert create(name)


@pytest.mark.parametrize("base", [Algorithm, FedAvg])
def test_a_method_that_says_nothing_of_how_it_trains_is_found_out(base: type[Algorithm]) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Idle(base):
        def local(self, w: Params, cohort: Cohort) -> Update:
            return Update(send={"delta": cohort.stacked(w) - w}, weight=cohort.samples)

    with pytest.raises(HyperparameterError, match="says that it does, and did not"):
        play(build_task(), Prox(inner=Idle()), 1)


def test_pieces_act_on_the_gradient_that_a_method_takes() -> None:
    """Of MAML with alpha = 0 the gradient is that of the loss; so is FedGen's before there is a generator."""
    for piece in ("prox:mu=0.7", "sam:rho=0.3", "asam:rho=0.3", "fsa:top_c=1"):
        one, other = (
            personal_models(play(build_task(), create(text), 3))
            for text in (f"perfedavg+{piece},alpha=0,order=fo,weighting=samples", f"fedavg+{piece}")
        )
        assert find_difference(one, other) is None
        names = (f"fedgen+{piece},server_steps=2", "fedgen:server_steps=2")
        with_generator = [personal_models(play(build_task(), create(text), 2)) for text in names]
        assert find_difference(*with_generator) is not None


def test_a_pull_that_overshoots_is_said_aloud(make_task, caplog) -> None:
    for name, said in (("fedavg+prox:mu=100", ["lr * mu"]), ("ditto+prox:mu=100,lam=100", ["lr * lam", "lr * mu"])):
        caplog.clear()
        federate(make_task(lr=0.1), create(name), rounds=1, evaluation="none", engine=LocalEngine(device="cpu"))
        assert [f"{one} must be at most 2" in caplog.text for one in said] == [True] * len(said)
    caplog.clear()
    federate(make_task(lr=0.1), create("fedavg+prox:mu=1"), rounds=1, evaluation="none")
    assert "at most 2" not in caplog.text


def test_bad_pieces_are_refused(make_task) -> None:
    with pytest.raises(UnknownName, match="Unknown piece 'proxx'. Did you mean: prox"):
        create("fedper+proxx")
    with pytest.raises(HyperparameterError, match="both have mu"):
        create("fedprox+prox")
    with pytest.raises(HyperparameterError, match="mu.*must be a float"):
        create("fedper+prox:mu=-1")
    assert math.isclose(create("fedper+prox:mu=1e+1").mu, 10)
    with pytest.raises(HyperparameterError, match="both have rho"):
        create("fedsam+sam")
    with pytest.raises(HyperparameterError, match=r"`top_c` of FedPer.fsa must be at most .* layers, 2. Got 3"):
        federate(make_task(), create("fedper+fsa:top_c=3"), rounds=1, evaluation="none")
    with pytest.raises(HyperparameterError, match="`margin`.*, or 'never', or 'always'. Got 'sometimes'"):
        create("fedper+gate:margin=sometimes")
