"""Own data on the command line: the words of `Task.own`, and runs that find their files again."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from atoll.algorithms.ditto import Ditto
from atoll.cli import app
from atoll.data.own import Own
from atoll.data.recipe import Recipe
from atoll.data.task import Task
from atoll.federation.config import RunConfig
from atoll.federation.loop import federate
from atoll.federation.report import Report
from atoll.kernel.randomness import generator
from atoll.records.runs import Run

OWN = ["--own", "hospitals", "--target", "readmitted", "--rounds", "2"]


@pytest.fixture(autouse=True)
def _hospitals(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    draw = generator(0, "hospitals")
    Path("hospitals").mkdir()
    for number in range(3):
        rows = [
            f"p{number}{row // 3},{draw.normal(50, 10):.2f},{draw.choice(['F', 'M'])},{draw.integers(3)},"
            f"2026-01-{1 + row:02},{draw.choice(['yes', 'no'])}"
            for row in range(24)
        ]
        Path(f"hospitals/h{number}.csv").write_text("\n".join(["patient,age,sex,ward,seen,readmitted", *rows]))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def atoll(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


FEATURES = ["--features", "age,sex,ward"]


def test_a_comparison_of_own_data_is_run_reused_resumed_reported_and_explained():
    asked = ("compare", "ditto", *OWN, *FEATURES, "--group", "patient", "--seeds", "1", "--out", "here")
    first = atoll(*asked)
    assert first.exit_code == 0, first.output
    assert "groups of patient kept whole" in " ".join(first.stdout.split())
    assert "3 of 3 runs were finished already" in atoll(*asked).stderr
    shutil.rmtree("here/ditto-seed0")
    assert "2 of 3 runs were finished already" in atoll("resume", "here").stderr
    assert atoll("report", "here").exit_code == 0
    explained = " ".join(atoll("explain", "here", "--client", "h1").stdout.split())
    assert re.search(r"the most frequent (no|yes) \(", explained)
    page = Path("here/report.html").read_text()
    assert "class_names" in page
    shutil.move("hospitals", "elsewhere")
    assert atoll("report", "here").exit_code == 0  # a report needs no data
    shutil.rmtree("here/ditto-seed0")
    gone = atoll("resume", "here")
    assert gone.exit_code == 2
    assert "must be where they were. There is no" in gone.stderr


def test_a_run_is_resumed_from_its_folder_alone_and_refused_once_the_files_change():
    def stop(_):
        raise KeyboardInterrupt

    task = Task.own("hospitals", target="readmitted", features=["age", "sex", "ward"])
    whole = federate(task, Ditto(), rounds=2, eval_every=1)
    with pytest.raises(KeyboardInterrupt):
        federate(task, Ditto(), rounds=2, eval_every=1, folder="half", on_round=stop)
    kept = Path("hospitals/h1.csv").read_text()
    Path("hospitals/h1.csv").write_text(kept.replace("yes", "no", 1))
    refused = atoll("resume", "half")
    assert refused.exit_code == 2
    assert "must be what they were" in refused.stderr
    Path("hospitals/h1.csv").write_text(kept)
    done = atoll("resume", "half")
    assert done.exit_code == 0, done.output
    assert Report.read("half").finished
    assert Report.read("half").scores().tolist() == whole.scores().tolist()


def test_a_run_keeps_columns_scales_and_class_names():
    assert atoll("run", "fedavg", *OWN, *FEATURES, "--categorical", "ward", "--out", "here").exit_code == 0
    scaling = Report.read("here").scaling
    assert scaling.schema.columns == ("age", "sex=F", "sex=M", "ward=0", "ward=1", "ward=2")
    assert scaling.of_client(0).classes == ("no", "yes")
    task = RunConfig.of_run(Run.open("here")).recipe.build()
    assert task.preprocessing(2) == scaling.of_client(2)
    row = {"age": 61.5, "sex": "M", "ward": "2"}
    assert torch.equal(scaling.of_client(1).encode(row), task.preprocessing(1).encode(row))


def test_python_and_the_command_line_say_the_same_words():
    words = {"target": "readmitted", "features": ["age", "sex"], "order": "seen", "gap": 1}
    task = Task.own("hospitals", **words)
    assert (
        atoll(
            "run", "fedavg", *OWN, "--features", "age,sex", "--order", "seen", "--gap", "1", "--out", "here"
        ).exit_code
        == 0
    )
    config = RunConfig.of_run(Run.open("here"))
    assert config.recipe.build().fingerprint == task.fingerprint
    assert config.task.recipe == json.loads(json.dumps(task.facts["recipe"]))
    recipe = Recipe.of_own(Own.of("hospitals", **words))
    assert recipe.with_seed(0).build().fingerprint == task.fingerprint


def test_the_split_may_be_a_column():
    for path in Path("hospitals").iterdir():
        header, *rows = path.read_text().splitlines()
        sides = ["train", "val", "test"]
        path.write_text("\n".join([f"{header},fold", *(f"{row},{sides[place % 3]}" for place, row in enumerate(rows))]))
    done = atoll("run", "fedavg", *OWN, *FEATURES, "--split", "fold", "--out", "here")
    assert done.exit_code == 0, done.output
    sizes = RunConfig.of_run(Run.open("here")).recipe.build().splits["test"].offsets
    assert sizes.tolist() == [0, 8, 16, 24]
    torn = atoll("run", "fedavg", *OWN, *FEATURES, "--split", "fold", "--group", "patient", "--out", "there")
    assert torn.exit_code == 2
    assert "one side of the split. patient 'p00' of client " in torn.stderr
    assert "is in train, val and test. 23 other groups are torn, too." in torn.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--own", "hospitals", "--target", "readmited"), "Unknown column 'readmited'. Did you mean: readmitted?"),
        (("--target", "readmitted"), "--target must come with --own"),
        (("--own", "nowhere"), "There is no"),
        ((*OWN, "--partition", "iid"), "so --partition must be auto or natural. Got 'iid'."),
        ((*OWN, "--order", "seen", "--group", "patient"), "Samples must be split by one rule."),
        ((*OWN, *FEATURES, "--gap", "2"), "--gap must be at least 0, and samples must have an --order."),
        ((*OWN, *FEATURES, "--group", "patient", "--central", "0.2"), "so --central and --public must be 0"),
        ((*OWN, "--group", "patients"), "Unknown column 'patients'. Did you mean: patient?"),
        (OWN, "hint: pass --order seen to train on the past, leave it out with --features ..., or have"),
        ((*OWN, "--standardise", "clients"), "Unknown --standardise 'clients'"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(words, message):
    result = atoll("run", "fedavg", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_partition_shows_own_clients():
    shown = atoll("partition", "--own", "hospitals", "--target", "readmitted", *FEATURES)
    assert shown.exit_code == 0, shown.output
    assert "h2" in shown.stdout


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fedper+prox", ("--unseen", "0.34", "--engine", "loop")),
        (
            "ditto@ifca:cluster_rounds=1,clusters=2",
            ("--late", "0.3", "--order", "seen", "--gap", "1", "--standardise", "global"),
        ),
        ("fafi/margins", ("--group", "patient", "--model", "mlp:8")),
    ],
)
def test_own_data_go_with_pieces_clusters_pairs_new_clients_and_late_replies(method, words):
    rounds = () if "/" in method else ("--rounds", "3")
    source = ("--own", "hospitals", "--target", "readmitted", *FEATURES)
    done = atoll("run", method, *source, *rounds, *words, "--out", "here")
    assert done.exit_code == 0, done.output
    report = Report.read("here")
    task = report.config.recipe.build()
    assert task.fingerprint == report.config.task.data
    for client in range(task.clients):
        assert task.preprocessing(client) == report.scaling.of_client(client)


RATINGS = ["--own", "sales.csv", "--kind", "ratings", "--client", "customer", "--target", "article"]


def test_own_ratings_are_run_and_resumed():
    rows = [f"c{user},a{(user + step) % 7},2026-03-{step + 1:02}" for user in range(5) for step in range(5)]
    Path("sales.csv").write_text("\n".join(["customer,article,bought", *rows, "c9,a1,2026-03-01"]))
    asked = ("run", "fedmf", *RATINGS, "--order", "bought", "--rounds", "2", "--out", "here")
    first = atoll(*asked)
    assert first.exit_code == 0, first.output
    assert "sales: 1 of 6 users have fewer than 3 ratings" in " ".join(first.stderr.split())
    config = json.loads(Path("here/config.json").read_text())
    assert config["task"]["recipe"]["own"]["kind"] == "ratings"
    assert Recipe.of_config(config).build().recommends


def test_ratings_without_a_time_say_which_flag():
    Path("sales.csv").write_text("customer,article\nc1,a1\n")
    failed = atoll("run", "fedmf", *RATINGS)
    assert failed.exit_code != 0
    said = " ".join(failed.stderr.split())
    assert "Ratings must have a column 'time' for --order. Leave-one-out needs an order" in said
    assert "hint: say which column it is: --order" in said
