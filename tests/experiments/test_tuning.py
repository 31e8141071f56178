"""Tuning looks at validation samples alone, continues runs and never repeats them, and gives all the same budget."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll import Recipe, Report, Settings, Task, Training, create, federate, tune
from atoll.data.batches import Split
from atoll.experiments import tuning as module
from atoll.experiments.race import hide_test, list_rungs
from atoll.experiments.searching import Entry, overshoots
from atoll.kernel.errors import AtollError, RunError
from atoll.kernel.hyperparameters import Search

SMALL = Recipe("digits", partition="dirichlet:0.3", clients=6, samples=300, model="mlp:4")
QUICK = {"trials": 3, "chosen_by": 1, "seeds": 1, "rounds": 5}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    return tune(SMALL, ["ditto"], trials=5, chosen_by=2, seeds=2, rounds=9, folder=folder), folder


# -- where tuning looks ------------------------------------------------------------------------------------------------


def test_a_share_of_the_way_becomes_a_value():
    assert Search(0.01, 1, log=True).place(0.5) == 0.1
    assert Search(0, 2).place(0.25) == 0.5
    assert [Search(among=(1, 2, 5)).place(share) for share in (0.0, 0.34, 0.99)] == [1, 2, 5]


def test_what_is_given_is_not_tuned():
    task = SMALL.build()
    assert Entry.of("ditto", task).free.keys() == {"lam", "personal_epochs"}
    assert Entry.of("ditto:lam=1.0", task).free.keys() == {"personal_epochs"}  # the default, but given
    fixed = Entry.of("ditto:lr=0.05", task)
    assert fixed.begin_grid() == [0.05]
    assert [*fixed.list_finer(0.05)] == []
    assert all(method.step_size == 0.05 for method, _ in zip(fixed.draw(0.05, 0), range(3), strict=False))
    assert Entry.of("fedper", task).begin_grid() == [0.033, 0.1, 0.3]
    assert Entry.of("ifca", task).free["clusters"].among == (2,)  # six clients: at least three in a cluster


def test_values_are_drawn_once_and_never_overshoot():
    entry = Entry.of("ditto", SMALL.build())
    drawn = [method for method, _ in zip(entry.draw(0.9, 0), range(12), strict=False)]
    assert len({*drawn}) == len(drawn)
    assert all(0.9 * method.lam < 1 for method in drawn)
    assert overshoots(create("ditto:lam=1"), 1.0)
    assert not overshoots(create("ditto:lam=1"), 0.99)
    assert [*entry.draw(0.9, 0)][:3] == drawn[:3]


@pytest.mark.parametrize(
    ("rounds", "rungs"), [(27, [3, 9, 27]), (30, [3, 9, 30]), (9, [2, 4, 9]), (5, [1, 2, 5]), (2, [1, 2]), (1, [1])]
)
def test_rungs_are_a_ninth_a_third_and_all(rounds, rungs):
    assert list_rungs(rounds) == rungs
    every = Settings(rounds=rounds, eval_every=rungs[0])
    assert all(every.evaluates_after(rung) for rung in rungs)


# -- the task of a race ------------------------------------------------------------------------------------------------


def test_the_task_of_a_race_has_no_test_samples():
    task = Recipe("digits", clients=4, central="0.1", unseen=0.25).build()
    hidden = hide_test(task, halve=False)
    test = {*task.splits["test"].order.tolist()}
    assert not test & {row for split in hidden.splits.values() for row in split.order.tolist()}
    assert hidden.central is hidden.unseen is None


def test_methods_that_read_validation_samples_are_judged_by_others():
    task = SMALL.build()
    hidden = hide_test(task, halve=True)
    read, scored = ({*hidden.splits[name].order.tolist()} for name in ("val", "test"))
    assert not read & scored
    assert read | scored == {*task.splits["val"].order.tolist()}
    sizes = [np.diff(hidden.splits[name].offsets) for name in ("val", "test")]
    assert ((sizes[1] - sizes[0]) >= 0).all()
    assert ((sizes[1] - sizes[0]) <= 1).all()


# -- tuning ------------------------------------------------------------------------------------------------------------


def test_every_method_has_the_same_budget_and_references_too(tuned):
    found, _ = tuned
    assert [*found.best] == ["local", "fedavg", "ditto"]
    counts = {text: sum(arm.entry == text for arm in found.race.arms) for text in found.best}
    assert {*counts.values()} == {5}
    assert "Every method had the same budget: 5 configurations each" in found.budget
    assert [*found.comparison.outcomes] == [arm.label for arm in found.best.values()]
    assert found.comparison.seeds == [2, 3]  # none of those that chose


def test_runs_are_continued_not_repeated_and_are_what_they_would_have_been(tuned):
    found, folder = tuned
    arm = found.best["ditto"]
    run = found.race.reports[arm, 1]
    assert [line.round for line in run.history] == [*range(1, 10)]
    whole = federate(found.race.tasks[1], arm.method, settings=run.settings, folder=folder / "whole")  # without a pause
    assert whole.scores().tolist() == run.scores().tolist()
    assert whole.curve("test", "loss") == run.curve("test", "loss")
    dropped = [one for one in found.race.arms if one.reason == "behind"]
    assert dropped
    for one in dropped:
        assert found.race.reports[one, 0].done == one.dropped_at == max(one.rungs)


def test_the_best_of_each_rung_goes_on(tuned):
    found, _ = tuned
    for text, best in found.best.items():
        arms = [arm for arm in found.race.arms if arm.entry == text]
        middle = [arm for arm in arms if 4 in arm.rungs]
        assert max(middle, key=lambda arm: arm.rungs[4]).rungs[4] == best.rungs[4]
        assert [arm for arm in arms if 9 in arm.rungs] == [best]


def test_the_race_is_blind_to_test_samples():
    """catches: a choice that rests on test samples, however it gets at them."""
    task = SMALL.build()
    rows = task.splits["test"].order
    y = task.y.clone()
    y[rows] = (y[rows] + 1) % 10
    other = replace(task, y=y)
    first, second = (tune(one, ["fedavg-ft"], **QUICK) for one in (task, other))
    assert [arm.rungs for arm in first.race.arms] == [arm.rungs for arm in second.race.arms]
    assert first.methods == second.methods
    scores = [one.comparison.results[0]["mean"] for one in (first, second)]
    assert scores[0] != scores[1]  # they were read at the end


def test_it_is_written_and_a_second_call_finds_it(tuned, monkeypatch):
    found, folder = tuned
    monkeypatch.setattr(module, "compare", lambda *_, **__: None)  # runs of the race alone
    monkeypatch.setattr("atoll.experiments.cells.federate", lambda *_, **__: pytest.fail("it was run again"))
    again = tune(SMALL, ["ditto"], trials=5, chosen_by=2, seeds=2, rounds=9, folder=folder)
    assert again.methods == found.methods
    paths = found.save(folder)
    read = json.loads(paths["tuning"].read_text())
    assert read["best"]["ditto"] == found.best["ditto"].label
    assert len(read["arms"]) == 15
    assert read["tested_with"] == [2, 3]


def test_what_is_interrupted_is_continued(tmp_path, monkeypatch):
    """Stops in the middle of the race as Ctrl-C does; the same call ends where it would have ended."""
    import signal

    from atoll.experiments import cells

    calls = []

    def interrupted(*given, **more):
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return federate(*given, **more)

    monkeypatch.setattr(cells, "federate", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped in the race; continue with `atoll resume"):
        tune(SMALL, ["fedper"], **QUICK, folder=tmp_path / "one")
    monkeypatch.setattr(cells, "federate", federate)
    found = tune(SMALL, ["fedper"], **QUICK, folder=tmp_path / "one")
    whole = tune(SMALL, ["fedper"], **QUICK, folder=tmp_path / "two")
    assert [arm.rungs for arm in found.race.arms] == [arm.rungs for arm in whole.race.arms]
    assert found.comparison.results[2]["mean"] == whole.comparison.results[2]["mean"]


def test_a_configuration_that_diverges_is_last_and_said(tmp_path):
    """Local has no server whose state could be seen to diverge: its clients' losses show it."""
    rows = torch.linspace(-1, 1, 60)
    data = {f"c{k}": (torch.stack([rows, rows**2], 1), 100 * (k + 1) * rows) for k in range(4)}
    wild = Task.own(data, kind="regression", model="mlp:4", training=Training(lr=0.2))
    found = tune(wild, ["local"], **{**QUICK, "trials": 5}, folder=tmp_path)
    diverged = [arm for arm in found.race.arms if arm.reason == "diverged"]
    assert {arm.entry for arm in diverged} == {"local", "fedavg"}
    assert all(arm.rungs[arm.dropped_at] == -math.inf for arm in diverged)
    assert all(arm not in found.best.values() for arm in diverged)
    assert all(math.isfinite(arm.rungs[5]) for arm in found.best.values())
    assert min(arm.lr for arm in found.race.arms if arm.entry == "fedavg") < 0.01  # none of the first three trains


@pytest.mark.slow
def test_an_error_is_tuned_downwards():
    rows = torch.linspace(-1, 1, 40)
    data = {f"c{k}": (torch.stack([rows, rows**2], 1), rows * (k + 1)) for k in range(4)}
    task = Task.own(data, kind="regression")
    found = tune(task, ["fedper"], **QUICK)
    for text, best in found.best.items():
        others = [arm.rungs[2] for arm in found.race.arms if arm.entry == text and 2 in arm.rungs]
        assert best.rungs[2] == min(others)


def test_another_metric_decides():
    found = tune(SMALL, ["fedavg"], **QUICK, metric="f1")
    assert next(iter(found.race.reports.values())).metric.name == "macro F1"


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_without_validation_samples_there_is_nothing_to_choose_by():
    with pytest.raises(RunError) as error:
        tune(Recipe("digits", clients=3, split="75/0/25"), ["ditto"], **QUICK)
    assert str(error.value) == (
        "Values are chosen by validation samples. digits has none.\n"
        "hint: give them a share of each client's samples, as `split=60/15/25`."
    )


def test_without_test_samples_nothing_is_claimed():
    found = tune(Recipe("digits", clients=3, samples=120, model="mlp:4", split="70/30/0"), ["local"], **QUICK)
    assert found.comparison is None
    assert "There are no test samples, so nothing is claimed: scores are those of validation samples." in found.notes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trials": 2}, "`trials` must be at least 3. Got 2."),
        ({"chosen_by": 0}, "`chosen_by` must be at least 1. Got 0."),
        ({"evaluation": "none"}, "Choosing needs the scores of clients"),
    ],
)
def test_budgets_that_are_too_small_name_the_least(given, message):
    with pytest.raises(RunError, match=message):
        tune(SMALL, ["ditto"], **{**QUICK, **given})


def test_bad_names_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(AtollError, match="Did you mean: ditto"):
        tune(SMALL, ["dito"], **QUICK, folder=tmp_path / "one")
    with pytest.raises(RunError, match="ditto is there twice"):
        tune(SMALL, ["ditto", "ditto"], **QUICK)
    assert not (tmp_path / "one").exists()


def test_a_folder_answers_one_question(tmp_path, tuned):
    _, folder = tuned
    with pytest.raises(RunError, match="has another options"):
        tune(SMALL, ["ditto"], trials=4, chosen_by=2, seeds=2, rounds=9, folder=folder)
    other = Recipe("digits", partition="dirichlet:0.3", clients=6, samples=299, model="mlp:4")
    with pytest.raises(RunError, match="A choice is continued with the same data only"):
        tune(other, ["ditto"], trials=5, chosen_by=2, seeds=2, rounds=9, folder=folder)
    federate(SMALL.build(), "local", rounds=1, folder=tmp_path / "run")
    with pytest.raises(RunError, match="must have a folder of its own"):
        tune(SMALL, ["ditto"], **QUICK, folder=tmp_path / "run")


@pytest.mark.slow
def test_few_validation_samples_tune_step_sizes_only():
    tiny = Recipe("digits", clients=3, samples=90, model="mlp:4")
    found = tune(tiny, ["ditto"], **{**QUICK, "trials": 5})
    assert {create(arm.label).inner for arm in found.race.arms if arm.entry == "ditto"} == {create("ditto")}
    assert any(note.endswith("so only step sizes are tuned.") for note in found.notes)


def test_a_race_reads_what_its_folders_hold(tuned):
    found, folder = tuned
    arm = found.best["fedavg"]
    place = next((folder / "race").glob("fedavg*seed0"))
    assert Report.read(place).label.startswith("fedavg:lr=")
    assert arm.label in {Report.read(one).label for one in (folder / "race").glob("fedavg*seed0")}
    assert isinstance(found.race.tasks[0].splits["test"], Split)


def test_it_shows_where_tuning_looks():
    assert str(Search(0.01, 2, log=True)) == "0.01 to 2 in factors"
    assert str(Search(among=("all", "head"))) == "all, head"
    assert str(Search(0, 2)) == "0 to 2"


def test_what_is_found_has_a_short_name(tuned):
    assert repr(tuned[0]).startswith("<Tuning: local:lr=")
    assert len(repr(tuned[0])) < 200
