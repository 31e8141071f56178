"""Trackers are read back with their own packages and compared with what the folder of a run holds."""

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner, Result

from atoll.algorithms.ditto import Ditto
from atoll.cli import app
from atoll.data.task import Task
from atoll.experiments.tracking import figures_of, flatten_names, trackers_in, tracking
from atoll.federation.config import RunConfig
from atoll.federation.loop import federate
from atoll.kernel.errors import RunError
from atoll.protect.ledger import Ledger
from atoll.records.runs import Run

# MLflow maps its tables with an option that SQLAlchemy 2.1 announces the end of.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

Curves = dict[str, list[tuple[int, float]]]
ROUNDS = 4
BOTH = {"tensorboard": True, "mlflow": True}


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(sizes=(12, 12, 16), shares=(0.5, 0.25, 0.25))


def train(task: Task, folder: Path, *, trackers: dict[str, bool], faults=None, **more) -> None:
    """A run with trackers."""
    with tracking(folder, **trackers) as tracked:
        tracked.begin(folder)
        settings = {"rounds": ROUNDS, "eval_every": 2}
        federate(task, Ditto(), folder=folder, on_round=tracked.after, faults=faults, **settings, **more)
        (folder / "report.html").write_text("<h1>report</h1>")


def written(folder: Path) -> Curves:
    """What the folder of a run says that trackers must say."""
    run, curves = Run.open(folder), defaultdict(list)
    for line in run.metrics():
        for name, value in figures_of(line).items():
            curves[name].append((line["round"], value))
    for way in ("up", "down"):
        sizes = accumulate(line["bytes"][way] for line in run.metrics())
        curves[f"bytes/{way}"] = [(done, float(size)) for done, size in enumerate(sizes, 1)]
        assert curves[f"bytes/{way}"][-1][1] == Ledger(run.ledger()).bytes(way)
    return dict(curves)


def tensorboard(folder: Path) -> tuple[Curves, dict[str, float]]:
    """The curves and the final figures of a run in its event files."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    curves = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    final = {tag.removeprefix("final/"): curves.pop(tag)[0][1] for tag in [*curves] if tag.startswith("final/")}
    assert "config/text_summary" in events.Tags()["tensors"]
    return curves, final


def client(home: Path):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow.db'}")


def mlflow_runs(home: Path) -> dict:
    """All MLflow runs of a store by name; fails if there are two of a name."""
    store = client(home)
    runs = store.search_runs([one.experiment_id for one in store.search_experiments()])
    assert len({run.info.run_name for run in runs}) == len(runs)
    return {run.info.run_name: run for run in runs}


def mlflow_curves(home: Path, name: str) -> Curves:
    store, run = client(home), mlflow_runs(home)[name]
    histories = {metric: store.get_metric_history(run.info.run_id, metric) for metric in run.data.metrics}
    return {metric: [(one.step, one.value) for one in points] for metric, points in histories.items()}


def rounded(curves: Curves) -> dict:
    """TensorBoard keeps single precision."""
    return {name: [(step, pytest.approx(value, rel=1e-6)) for step, value in curve] for name, curve in curves.items()}


def test_trackers_say_what_the_folder_says(task, tmp_path):
    home = tmp_path / "ditto"
    train(task, home, trackers=BOTH, faults=lambda round, who: (who == 1) & (round == 2))
    expected = written(home)
    assert expected["lost"] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 0.0)]
    assert [step for step, _ in expected["personal/test/bottom10"]] == [2, 4]

    curves, final = tensorboard(home)
    assert curves == rounded(expected)
    assert final == {name: pytest.approx(curve[-1][1], rel=1e-6) for name, curve in expected.items()}

    assert mlflow_curves(home, "ditto") == expected
    run = mlflow_runs(home)["ditto"]
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        name: str(value) for name, value in flatten_names(RunConfig.of_run(Run.open(home))).items()
    }
    assert run.data.params["algorithm/values/lam"] == "1.0"
    assert [one.path for one in client(home).list_artifacts(run.info.run_id)] == ["report.html"]


def test_nothing_leaves_the_folder(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(task, tmp_path / "ditto", trackers=BOTH)
    assert [path.name for path in tmp_path.iterdir()] == ["ditto"]
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


@pytest.mark.parametrize("at_first", [True, False], ids=["tracked from the start", "tracked later"])
def test_a_resumed_run_is_tracked_once_and_whole(task, tmp_path, at_first):
    home = tmp_path / "ditto"
    stop = threading.Event()

    def stop_after_the_third(round, who):
        if round == 2:
            stop.set()
        return who < 0

    with pytest.raises(KeyboardInterrupt):
        train(task, home, trackers=BOTH if at_first else {}, faults=stop_after_the_third, stop=stop)
    assert len(Run.open(home).metrics()) == 3
    assert trackers_in(home) == dict.fromkeys(BOTH, at_first)
    if at_first:
        assert mlflow_runs(home)["ditto"].info.status == "KILLED"
    train(task, home, trackers=BOTH, resume=True)
    assert [step for step, _ in written(home)["seconds/round"]] == [1, 2, 3, 4]
    assert tensorboard(home)[0] == rounded(written(home))
    assert mlflow_curves(home, "ditto") == written(home)
    assert mlflow_runs(home)["ditto"].info.status == "FINISHED"


def test_a_tracker_that_fails_is_left_out(task, tmp_path, caplog):
    home = tmp_path / "ditto"

    def lose_the_run(round, who):
        if round == 2:
            client(home).delete_run(mlflow_runs(home)["ditto"].info.run_id)
        return who < 0

    train(task, home, trackers=BOTH, faults=lose_the_run)
    assert "MLflow failed and is left out" in caplog.text
    assert tensorboard(home)[0] == rounded(written(home))
    assert len(Run.open(home).metrics()) == ROUNDS


def test_a_run_that_was_refused_is_not_touched(task, tmp_path):
    home = tmp_path / "ditto"
    train(task, home, trackers={"mlflow": True})
    before = mlflow_runs(home)["ditto"]
    with pytest.raises(RunError, match="already holds one"):
        train(task, home, trackers=BOTH)
    assert mlflow_runs(home)["ditto"].info.end_time == before.info.end_time
    assert not trackers_in(home)["tensorboard"]


def test_a_server_that_does_not_answer_is_noticed_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RunError, match=r"must answer at \$MLFLOW_TRACKING_URI"), tracking(tmp_path, mlflow=True):
        pytest.fail("training began")


# -- the command line --------------------------------------------------------------------------------------------------


def atoll(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("flag", "module"), [("--tensorboard", "tensorboard"), ("--mlflow", "mlflow"), ("--mlflow", "sqlalchemy")]
)
def test_a_missing_package_is_named_before_training(flag, module, tmp_path, monkeypatch):
    for name in [*sys.modules]:
        if name == "torch.utils.tensorboard" or name.startswith("torch.utils.tensorboard."):
            monkeypatch.delitem(sys.modules, name)  # it would be found without its package
    monkeypatch.setitem(sys.modules, module, None)
    result = atoll("run", "local", "--rounds", "1", "--clients", "3", flag, "--out", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert "pip install 'atoll[tracking]'" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_comparison_is_one_group_and_is_tracked_once(tmp_path):
    home = tmp_path / "group"
    asked = ["compare", "local", "fedavg", "--rounds", "2", "--clients", "3", "--seeds", "1", "--out", str(home)]
    plain = atoll(*asked)
    assert plain.exit_code == 0, plain.output
    for _ in range(2):  # all runs are reused; the second time there is nothing to tell
        again = atoll(*asked, "--tensorboard", "--mlflow")
        assert again.exit_code == 0, again.output
        assert again.stdout == plain.stdout
    resumed = atoll("resume", str(home))
    assert resumed.exit_code == 0, resumed.output

    runs = mlflow_runs(home)
    assert runs.keys() == {"group", "local-seed0", "fedavg-seed0"}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    parent = runs.pop("group").info.run_id
    assert [one.path for one in client(home).list_artifacts(parent)] == ["report.html"]
    for name, run in runs.items():
        assert run.data.tags["mlflow.parentRunId"] == parent
        assert mlflow_curves(home, name) == written(home / name)
        assert tensorboard(home / name)[0] == rounded(written(home / name))
