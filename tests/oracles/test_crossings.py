"""Methods crossed with everything else: each crossing ends as it must, or is refused before a client works."""

import pytest
from oracles.crossings import Crossing, draw_crossing, judge, run

from atoll.compose import create
from atoll.federation.guards import hint_at_divergence
from atoll.kernel.errors import AtollError

DRAWS, SEED = 150, 7
PART = 15  # crossings of one test


def cross(method: str, kind: str = "classes", rounds: int = 2, **words: object) -> Crossing:
    return Crossing(method, kind, True, rounds, words)


def list_differences(seed: int, numbers: range) -> list[str]:
    found = [(number, draw_crossing(seed, number)) for number in numbers]
    ended = [(number, crossing, judge(crossing, number)) for number, crossing in found]
    return [f"{number} {crossing}: {one.detail}" for number, crossing, one in ended if one.status == "differed"]


@pytest.mark.parametrize("first", range(0, DRAWS, PART))
def test_crossings_end_as_they_must_or_are_refused(first: int) -> None:
    assert not list_differences(SEED, range(first, first + PART))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1500, 50))
def test_many_crossings_end_as_they_must_or_are_refused(first: int) -> None:
    assert not list_differences(SEED + 1, range(first, first + 50))


def test_a_draw_does_not_depend_on_others() -> None:
    assert [str(draw_crossing(3, number)) for number in (9, 4)] == [str(draw_crossing(3, n)) for n in (9, 4)]
    assert len({str(draw_crossing(SEED, number)) for number in range(DRAWS)}) > 0.95 * DRAWS


# -- what once failed in the middle ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "crossing",
    [
        cross("mofedsam", "numbers", secure="masks"),  # fields of one number per client
        cross("mtfl-adam", "norm", secure="masks"),
        cross("regmean", rounds=1, secure="sums"),  # a field without leaves
        cross("fedavg", "norm", secure="sums", compress="randk:0.5"),  # counters, which secure sums leave out
        cross("fedavg", "mixed", attack="alie"),  # replies of two forms
        cross("fedgen-local", attack="sign-flip:0.2"),  # counts below 0
        cross("ccvr", dp="client:noise=0.1,clip=5"),
        cross("ccvr", aggregate="median", attack="sign-flip:0.2"),
        cross("fedlpa", rounds=1, dp="local:noise=1"),
        cross("fedpft", rounds=1, dp="local:noise=1"),
        cross("pfedme", "norm", aggregate="fltrust"),  # replies that are enlarged, statistics and all
        cross("lg-fedavg@cfl:cluster_rounds=1", rounds=3, compress="topk:0.3"),  # first models, then bodies
    ],
    ids=str,
)
def test_it_runs(crossing: Crossing) -> None:
    assert judge(crossing).status in ("ran", "rounded")


@pytest.mark.parametrize(
    ("crossing", "message"),
    [
        (cross("maml", aggregate="fltrust"), "clients must be sent one model and send its change. MAML sends"),
        (cross("afl", rounds=1, aggregate="fltrust"), "AFL sends something else"),
        (cross("fedmf", "items", attack="gaussian"), "Clients of FedMF send rows of their own choice"),
        (cross("fedavg", "tokens", attack="backdoor:size=1"), "samples must have one class each"),
        (cross("fafi", rounds=1, cohort=4, select_clients="oort"), "learns from earlier rounds, and FAFI has one"),
        (cross("oneshot-proto", "numbers", rounds=1), r"OneShotProto is ce/means\. means needs samples of one class"),
        (cross("oneshot-avg", "tokens", rounds=1), r"OneShotAvg is ce/average\. ce needs samples of one class"),
        (cross("fedavg+dpsgd", "norm"), "For the piece dpsgd, a network must answer each sample by itself"),
        (cross("perfedavg+dpsgd"), "Those of PerFedAvg.dpsgd follow another one"),
        (cross("fedavg+dpsgd+sam"), "Those of FedAvg.dpsgd.sam follow another one"),
        (cross("fedetf+dpsgd", rounds=1), "For the piece dpsgd"),
        (cross("fedmask+dpsgd"), "hint: take a method that sends numbers"),
        (cross("fedpac+dpsgd"), "hint: protect every message instead: dp='local:epsilon=50'"),
        (cross("ccvr+dpsgd"), "hint: protect it at the level of clients instead: dp='client:epsilon=4'"),
        (cross("fedmask", dp="client:noise=1"), "or take a method that sends numbers"),
        (cross("fedlpa", "items", rounds=1), "needs a network with linear layers or convolutions. That of .* has none"),
        (cross("regmean", "items", rounds=1), "RegMean is ce/regmean. regmean needs a network with linear layers. "),
        (cross("fedcr", secure="sums"), "the server of FedCR reads it"),
        (cross("fedfomo", dp="local:noise=1"), "No mechanism covers what FedFomo sends as others"),
        (cross("fedmask", dp="local:noise=1"), "hint: take a method that sends numbers"),
        (cross("fedrap", "items", dp="local:noise=1"), "sends as rows.\nhint: take a method that sends numbers"),
        (cross("sub-fedavg", dp="client:noise=1"), "No mechanism covers what SubFedAvg sends as mask"),
    ],
    ids=str,
)
def test_it_is_refused_before_the_first_round(crossing: Crossing, message: str) -> None:
    assert judge(crossing).status == "refused"
    with pytest.raises(AtollError, match=message):
        run(crossing)


@pytest.mark.parametrize(
    ("method", "step"), [("mtfl-adam", "lower `adam_lr`;"), ("fedavg", "lower `lr` or set `clip`;")]
)
def test_a_diverging_method_is_told_which_step_to_lower(method: str, step: str) -> None:
    assert hint_at_divergence(cross(method).task(), create(method)).startswith(step)
