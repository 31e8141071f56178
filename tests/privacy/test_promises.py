"""What is promised holds, or is refused before a client works.

1. sample-level privacy covers all that is made of samples (`test_swaps.py` plays every method);
2. local privacy promises nothing about fields that are named as public, and says so;
3. exact means and deviations of all clients do not leave under a promise;
4. a site that hides its sizes does not tell how many gradients it took;
5. the account adds up all runs of a comparison, over methods and seeds, and nothing is tuned under a promise;
6. single losses do not leave where messages are hidden or private;
7. the sentence about samples states the exchange that is proved.
"""

import re

import numpy as np
import pytest
import torch

from atoll import Batch, LocalEngine, Task, compare, federate, tune
from atoll.deploy.showing import _describe_answer
from atoll.kernel.algorithm import Arrival
from atoll.kernel.errors import PrivacyError
from atoll.kernel.network import Variant
from atoll.protect.account import gaussian_epsilon, total_epsilon
from atoll.protect.shares import PrivacyInShares, shares_epsilon
from atoll.report.protection import write_protection
from atoll.toolbox.client.private import Private

ENGINE = LocalEngine(device="cpu", strategy="whole eager", dtype=torch.float64)
QUIET = {"evaluation": "none", "progress": False, "engine": ENGINE}


def sent(task, method, **more) -> list[Arrival]:
    """What the server reads in one round."""
    found: list[Arrival] = []
    federate(task, method, rounds=1, on_reply=lambda _, arrival: found.append(arrival), **QUIET, **more)
    return found


# -- 2: public fields -------------------------------------------------------------------------------------------------
def test_a_promise_about_nothing_is_refused(make_task):
    with pytest.raises(PrivacyError, match="delta is all that FedAvg sends, and is named as public"):
        federate(make_task(), "fedavg", rounds=1, dp="local:epsilon=1,delta=1e-3,public=delta", **QUIET)


def test_the_sentence_names_what_is_public_and_promises_nothing_about_it(make_task):
    task = make_task(sizes=(8, 8), dtype=torch.float64)
    words = "local:noise=1,delta=1e-3,public=delta"
    (plain,), (public,) = sent(task, "scaffold"), sent(task, "scaffold", dp=words)
    assert (plain.fields["delta"] - public.fields["delta"]).norm().max() == 0  # as it is
    assert (plain.fields["change"] - public.fields["change"]).norm().min() > 0.1
    report = federate(task, "scaffold", rounds=1, dp=words, **QUIET)
    (sentence,) = report.privacy
    assert sentence.startswith("Local differential privacy of all fields but delta: epsilon ")
    assert "Nothing is promised about delta, named as public: it leaves as it is." in sentence
    (whole,) = federate(task, "scaffold", rounds=1, dp="local:noise=1,delta=1e-3", **QUIET).privacy
    assert "public" not in whole
    assert "all fields but" not in whole


# -- 3: scaling -------------------------------------------------------------------------------------------------------
def own_task(standardise: str) -> Task:
    draw = np.random.default_rng(0)
    frames = {
        f"ward {number}": (draw.normal(size=(12, 4)) * 50 + 300, draw.integers(2, size=12)) for number in range(4)
    }
    return Task.own(frames, standardise=standardise, model="linear")


@pytest.mark.parametrize(
    ("scaled", "method", "more", "refused"),
    [
        ("global", "fedavg", {"dp": "client:noise=1,delta=1e-2"}, "tells their exact means and deviations"),
        ("global", "fedavg", {"dp": "local:noise=1,delta=1e-2"}, "tells their exact means and deviations"),
        ("global", "fedavg+dpsgd", {}, "tells their exact means and deviations"),
        ("client", "fedavg+dpsgd", {}, "makes all of them depend on each other"),
        ("client", "fedavg", {"dp": "client:noise=1,delta=1e-2"}, None),
        ("none", "fedavg+dpsgd", {}, None),
        ("global", "fedavg", {}, None),
    ],
)
def test_exact_means_and_deviations_do_not_leave_under_a_promise(scaled, method, more, refused):
    task = own_task(scaled)
    if refused is None:
        federate(task, method, rounds=1, evaluation="none", progress=False, **more)
        return
    with pytest.raises(PrivacyError, match=refused):
        federate(task, method, rounds=1, evaluation="none", progress=False, **more)


# -- 4: at sites; a whole federation is in tests/deploy/test_protection.py --------------------------------------------
@pytest.mark.parametrize(("stages", "told"), [(["Clip"], True), (["Clip", "EqualWeights"], False), (["Encode"], False)])
def test_a_site_says_beforehand_whether_it_tells_what_it_computed(stages, told):
    sentence = _describe_answer({"stages": [{"stage": name} for name in stages]})
    assert ("how many gradients" in sentence) == told
    assert ("how many samples" in sentence) == told


# -- 6: losses --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chosen", ["power-of-choice:5", "oort", "ucb"])
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {"secure": "masks"}),
        ("fedavg", {"secure": "sums"}),
        ("fedavg", {"dp": "local:noise=1,delta=1e-2"}),
        ("fedavg+dpsgd", {}),
    ],
)
def test_single_losses_do_not_leave_where_messages_are_protected(make_task, chosen, method, more):
    task = make_task(sizes=(6,) * 8)
    with pytest.raises(PrivacyError, match="send these beside their messages") as error:
        federate(task, method, rounds=2, cohort=5, select_clients=chosen, **QUIET, **more)
    assert error.value.hint == "use select_clients='uniform' or 'turns'."
    federate(task, method, rounds=1, cohort=5, select_clients="turns", **QUIET, **more)


# -- 5: several runs on the same data ---------------------------------------------------------------------------------
def together(comparison) -> str:
    """What the report says of all runs together."""
    (found,) = [one for one in write_protection(comparison) if one.startswith("All ")]
    return found


@pytest.mark.parametrize(
    ("words", "each"), [("client:noise=4,delta=1e-3", 2 / 4**2), ("local:noise=4,delta=1e-3", 4 * 2 / 4**2)]
)
def test_the_account_adds_up_methods_and_seeds(make_task, words, each):
    """Two rounds a run: two methods and three seeds are six releases, and `local` sends nothing."""
    task = make_task(sizes=(8,) * 5, shares=(0.5, 0.25, 0.25))
    found = compare(task, ["local", "fedavg", "ditto"], rounds=2, seeds=3, dp=words, progress=False)
    epsilon = gaussian_epsilon((6 * each) ** 0.5, 1e-3)
    assert together(found).startswith("All 6 runs that promise something are releases of the same data")
    assert f"together epsilon {epsilon:.2f} at delta 0.001 about each client" in together(found)
    assert "Choosing one of them counts as seeing all" in together(found)


def test_the_account_adds_up_passes_over_samples(make_task):
    task = make_task(sizes=(8,) * 5, shares=(0.5, 0.25, 0.25))
    methods = ["fedavg+dpsgd:noise=4", "ditto+dpsgd:noise=8"]
    found = compare(task, methods, rounds=2, seeds=2, progress=False)
    epsilon = gaussian_epsilon((2 * 2 / 4**2 + 2 * 4 / 8**2) ** 0.5, 1e-5)
    assert f"together epsilon {epsilon:.2f} at delta 1e-05 about each sample" in together(found)


def test_sampled_rounds_of_several_runs_cost_as_much_as_those_of_a_long_one():
    one, three = total_epsilon([(1.0, 0.1, 30)], 1e-5), total_epsilon([(1.0, 0.1, 10)] * 3, 1e-5)
    assert one == pytest.approx(three, rel=1e-9)
    assert total_epsilon([(1.0, 0.1, 10), (2.0, 0.1, 10)], 1e-5) < total_epsilon([(1.0, 0.1, 20)], 1e-5)
    assert shares_epsilon(2.0, 6, 1e-3) == PrivacyInShares(noise=2.0, delta=1e-3).spent_together([(2.0, 1.0, 3)] * 2)


@pytest.mark.parametrize(("method", "more"), [("fedavg", {"dp": "client:noise=1,delta=1e-2"}), ("fedavg+dpsgd", {})])
def test_nothing_is_tuned_under_a_promise(make_task, method, more):
    task = make_task(sizes=(8,) * 5, shares=(0.5, 0.25, 0.25))
    with pytest.raises(PrivacyError, match="a promise of privacy counts one run"):
        tune(task, [method], rounds=2, progress=False, **more)


# -- 7: samples -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("noise", [1, 2])
def test_blanking_and_exchanging_a_sample_are_what_the_sentence_says(make_task, noise):
    """One step on all samples: how far the private sum moves is mu times the noise's deviation, at most."""
    task = make_task(sizes=(8,), batch_size=8, dtype=torch.float64)
    (sentence,) = federate(task, f"fedavg+dpsgd:noise={noise}", rounds=1, **QUIET).privacy
    blanked, other = (float(one) for one in re.findall(r"epsilon (\S+) at.* and (\S+) for exchanging", sentence)[0])
    assert blanked == pytest.approx(gaussian_epsilon(1 / noise, 1e-5), abs=0.01)
    assert other == pytest.approx(gaussian_epsilon(2 / noise, 1e-5), abs=0.01)
    x, y = task.x, task.y
    w, clip = task.network.initial, 1e-3
    rule = Private(clip, 0.0)

    def total(rows, labels, mask=None):
        batch = Batch(rows, labels, mask, None, task.network, Variant(train=True))
        return rule.gradient(w, batch, frozenset(w), size=1)[0]

    whole, mask = total(x, y), torch.ones(len(x)).double()
    mask[0] = 0
    far = x.clone()
    far[0] = -100 * x[0]
    assert (whole - total(x, y, mask)).norm() <= clip * (1 + 1e-9)
    gap = (whole - total(far, y)).norm()
    assert clip < gap <= 2 * clip * (1 + 1e-9)  # more than blanking it
