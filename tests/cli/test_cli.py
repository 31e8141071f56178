import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from atoll.cli import app
from atoll.cli.options import Options, parse_cohort
from atoll.cli.program import name_flags
from atoll.cli.running import unused_folder
from atoll.compose import create
from atoll.data.task import Training
from atoll.federation.settings import Settings
from atoll.testing import conformance

TINY = ["--rounds", "2", "--clients", "4", "--samples", "600"]
PROGRAM = [sys.executable, "-m", "atoll"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only wait for a second one
    yield
    torch.set_num_threads(before)


def atoll(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def metrics(folder: Path) -> list[dict]:
    """All rounds without their times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "memory")} for line in lines]


# -- run, compare, resume ----------------------------------------------------------------------------------------------


def test_run_shows_a_table_and_leaves_a_folder():
    result = atoll("run", "ditto:lam=0.5", *TINY, "--set", "epochs=2", "--out", "here")
    assert result.exit_code == 0, result.output
    assert "all 4 clients" in result.stdout
    config = json.loads(Path("here/config.json").read_text())
    assert [config["algorithm"]["values"][name] for name in ("lam", "epochs")] == [0.5, 2]
    assert config["task"]["recipe"]["partition"] == "dirichlet:0.3"
    assert Path("here/report.html").exists()


def test_everything_about_training_and_rounds_has_an_option():
    have = {field.name for field in fields(Options)}
    assert {field.name for field in (*fields(Training), *fields(Settings))} <= have


def test_the_step_size_may_fall_and_evaluation_be_left_out():
    result = atoll("run", "fedavg", *TINY, "--lr-decay", "0.5", "--evaluation", "none", "--out", "here")
    assert result.exit_code == 0, result.output
    config = json.loads(Path("here/config.json").read_text())
    assert config["training"]["lr_decay"] == 0.5
    assert config["settings"]["evaluation"] == "none"
    assert not any("evaluation" in line for line in metrics(Path("here")))
    shared = ("run", "fedavg", *TINY, "--lr-decay", "0.5", "--central", "0.2", "--evaluation", "central")
    assert atoll(*shared, "--out", "there").exit_code == 0
    assert [set(line["evaluation"]) for line in metrics(Path("there"))] == [{"central"}, {"central", "deployed"}]
    compared = atoll("compare", "fedavg", *TINY, "--seeds", "1", "--lr-decay", "0.5", "--out", "both")
    assert compared.exit_code == 0, compared.output
    assert json.loads(Path("both/local-seed0/config.json").read_text())["training"]["lr_decay"] == 0.5


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["run", "fedavg", "--lr-decay", "1.5"], "--lr-decay must be a float in (0, 1]. Got 1.5 instead."),
        (
            ["run", "fedavg", "--evaluation", "nobody"],
            "--evaluation must be 'auto', 'all', 'sample:N', 'central' or 'none'. Got 'nobody'.",
        ),
        (["run", "fedavg", "--evaluation", "central"], "needs a task with a central test set"),
        (["compare", "fedavg", "--evaluation", "none"], "A comparison needs the scores of clients"),
    ],
)
def test_a_bad_option_is_refused_with_what_must_hold(command, said):
    result = atoll(*command, *TINY)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_methods_that_upload_once_have_one_round_and_share_their_training():
    """Two servers over the same clients: the second finds them trained."""
    result = atoll("compare", "ensemble:epochs=2", "oneshot-avg:epochs=2", "--clients", "4", "--seeds", "1",
                   "--out", "here")  # fmt: skip
    assert result.exit_code == 0, result.output
    for name in ("ensemble", "oneshot-avg", "fedavg"):
        assert len(metrics(Path(f"here/{name}-epochs=2-seed0"))) == 1
    assert len(list(Path("here/trained").iterdir())) == 4  # clients
    refused = atoll("run", "ensemble", *TINY)
    assert refused.exit_code != 0
    assert "--rounds must be 1" in refused.output


def test_list_can_show_methods_that_upload_once_only():
    shown = atoll("list", "algorithms", "--one-shot").stdout
    assert "ensemble" in shown
    assert "ditto" not in shown


def test_report_of_runs_that_are_not_finished_says_so():
    """A comparison that was cut short: one run lacks its last round, another was never begun."""
    assert atoll("compare", "fedper", *TINY, "--seeds", "2", "--out", "here").exit_code == 0
    lines = Path("here/fedper-seed1/metrics.jsonl").read_text().splitlines(keepends=True)
    shutil.rmtree("here/fedper-seed1/checkpoints")
    Path("here/fedper-seed1/metrics.jsonl").write_text(lines[0])
    shutil.rmtree("here/local-seed1")
    result = atoll("report", "here", "--out", "there")
    assert result.exit_code == 0, result.output
    assert "fedper with seed 1 is incomplete: 1 of 2 rounds." in result.output
    assert "seeds 1" in result.output
    assert "local-seed1 was asked for and is not there." in result.output
    page = Path("there/report.html").read_text()
    assert "fedper with seed 1 is incomplete: 1 of 2 rounds." in page


def test_report_refuses_runs_of_different_tasks():
    assert atoll("run", "local", *TINY, "--out", "one").exit_code == 0
    assert atoll("run", "fedavg", *TINY, "--partition", "iid", "--out", "other").exit_code == 0
    result = atoll("report", "one", "other")
    assert result.exit_code == 2
    assert "partition 'dirichlet:0.3' and 'iid'" in " ".join(result.output.split())


def test_report_selects_a_round():
    assert atoll("compare", "fedper", *TINY, "--seeds", "1", "--out", "here").exit_code == 0
    assert "best on test (an oracle" in " ".join(atoll("report", "here", "--select", "oracle").output.split())
    wrong = atoll("report", "here", "--select", "bets")
    assert wrong.exit_code == 2
    assert "Did you mean: best?" in wrong.output


def test_partition_shows_who_has_what():
    result = atoll("partition", "--partition", "shards:2", "--clients", "5", "--out", "who.svg")
    assert result.exit_code == 0, result.output
    assert "5 clients with" in result.stdout
    assert Path("who.svg").read_text().startswith("<svg xmlns=")
    assert atoll("partition", "--partition", "shards:2", "--clients", "0").exit_code == 2


def test_run_names_its_folder_after_task_and_method():
    assert atoll("run", "local", *TINY).exit_code == 0
    assert [path.name.rsplit("-", 2)[0] for path in Path("runs").iterdir()] == ["digits-local"]
    listed = atoll("list", "runs").stdout
    assert "runs/digits-local-" in listed
    assert "2/2" in listed


def test_compare_adds_references_and_reuses_what_is_finished():
    first = atoll("compare", "fedper", "ditto:lam=0.1", "ditto", *TINY, "--seeds", "2", "--out", "c")
    assert first.exit_code == 0, first.output
    assert "added local and fedavg" in first.stderr
    assert "± is the 95 % t-interval over 2 seeds" in " ".join(first.stdout.split())
    assert len(list(Path("c").glob("*-seed?"))) == 10
    again = atoll("compare", "fedper", "ditto:lam=0.1", "ditto", *TINY, "--seeds", "2", "--out", "c")
    assert "10 of 10 runs were finished already" in again.stderr
    assert again.stdout == first.stdout
    resumed = atoll("resume", "c")
    assert resumed.exit_code == 0
    assert resumed.stdout == first.stdout


def test_compare_chooses_the_same_folder_for_the_same_question():
    for _ in range(2):
        assert atoll("compare", "local", "fedavg", *TINY, "--seeds", "1").exit_code == 0
    assert len(list(Path("runs").iterdir())) == 1
    assert atoll("compare", "local", "fedavg", *TINY, "--seeds", "1", "--fresh").exit_code == 0
    assert len(list(Path("runs").iterdir())) == 2


def test_a_finished_run_is_not_run_again():
    atoll("run", "fedavg", *TINY, "--out", "done")
    before = Path("done/metrics.jsonl").read_text()
    result = atoll("resume", "done")
    assert result.exit_code == 0
    assert "finished already" in result.stderr
    assert Path("done/metrics.jsonl").read_text() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_stopped_is_resumed_to_the_same_numbers(number):
    small = ["--model", "mlp:4", "--batch-size", "200", "--engine", "whole eager", "--eval-every", "10"]
    asked = ["run", "ditto", "--rounds", "20", "--clients", "6", "--cohort", "4", "--drop", "0.2", *small]
    process = subprocess.Popen(
        [*PROGRAM, *asked, "--out", "stopped"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    while not Path("stopped/metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(number)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "atoll resume stopped" in messages
    assert len(metrics(Path("stopped"))) < 20
    assert atoll("resume", "stopped").exit_code == 0
    assert atoll(*asked, "--out", "whole").exit_code == 0
    assert metrics(Path("stopped")) == metrics(Path("whole"))


def test_resume_explains_what_it_cannot_rebuild():
    from atoll import Recipe, federate

    task = Recipe(clients=4).build()
    object.__setattr__(task, "facts", {})
    with pytest.raises(ZeroDivisionError):
        federate(task, create("fedavg"), rounds=2, folder="own", on_round=lambda line: 1 / 0)
    result = atoll("resume", "own")
    assert result.exit_code == 2
    assert "resume=True" in result.stderr


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("rum ditto", "Did you mean 'run'"),
        ("run dito", "Unknown algorithm 'dito'. Did you mean: ditto?"),
        ("run ./nothing.py", "There is no nothing.py"),
        ("run ditto --task digit", "Unknown data set 'digit'. Did you mean: digits?"),
        ("run ditto --lrr 1", "--lr"),
        ("run ditto --set lam=-1", "`lam` of Ditto must be a float in [0, inf). Got -1.0 instead."),
        ("run ditto --set lan=1", "Did you mean: lam?"),
        ("run ditto --set lam", "name=value"),
        ("run ditto --cohort 50", "between 1 and the number of clients, 20. Got 50."),
        ("run ditto --cohort 1.5", "must be in (0, 1]"),
        ("run ditto --cohort many", "number of clients or a share"),
        ("run ditto --engine chunk:0", "threads:N with N at least 1. Got 'chunk:0'"),
        ("run ditto --engine warp", "--engine must be auto, loop, threads"),
        ("run ditto --precision fp8", "fp32, tf32 or bf16"),
        ("run ditto --device tpu", "Got 'tpu'"),
        ("run ditto --rounds 0", "--rounds must be at least 1"),
        ("run ditto --lr -1", "--lr must be"),
        ("run ditto --clients 3 --unseen 0.9", "hint: lower --unseen, or raise --clients."),
        ("run ditto --clients 0", "at least 1 client"),
        ("run ditto --clients 5000", "5000 clients"),
        ("run ditto --partition dirichlet", "followed by its alpha"),
        ("run ditto --memory tape", "Unknown memory 'tape'"),
        ("run ditto --model resnet", "Did you mean: resnet18"),
        ("run ditto --task mnist --data nowhere", "`mnist` was not found"),
        ("run ditto --task mnist", "ATOLL_DATA"),
        ("compare ditto --set foo=1", "Unknown hyperparameter 'foo'"),
        ("resume nowhere", "must hold config.json"),
        ("list things", "Unknown list 'things'"),
        ("new 3x", "begin with a letter"),
        ("check dito", "Did you mean: ditto?"),
    ],
)
def test_bad_input_is_explained_and_leaves_nothing_behind(arguments, said):
    result = atoll(*arguments.split())
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""
    assert not Path("runs").exists()


def test_a_run_folder_that_exists_is_refused():
    atoll("run", "local", *TINY, "--out", "here")
    before = Path("here/metrics.jsonl").read_text()
    result = atoll("run", "local", *TINY, "--out", "here")
    assert result.exit_code == 2
    assert "hint: continue it with `atoll resume here`" in result.stderr
    assert Path("here/metrics.jsonl").read_text() == before


def test_a_diverging_run_fails_and_names_the_client():
    result = atoll("run", "fedavg", *TINY, "--lr", "1e20")
    assert result.exit_code == 1
    assert "Training must stay finite" in result.stderr


# -- list, show, new, check --------------------------------------------------------------------------------------------


def test_help_does_not_wait_for_torch():
    code = "import sys, atoll.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_and_version():
    assert "compare" in atoll().output
    assert atoll("--version").stdout.startswith("atoll ")


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("algorithms", "ditto"),
        ("pairs", "supcon/ensemble is ce-supcon"),
        ("tasks", "cifar10"),
        ("partitions", "dirichlet:ALPHA"),
        ("models", "resnet18-gn"),
    ],
)
def test_list(what, expected):
    assert expected in atoll("list", what).stdout


def test_show_explains_a_method():
    shown = atoll("show", "ditto").stdout
    for part in ("min_v", "lam", "[0, inf)", "pull of the personal model", "delta (model)", "it is local", "@inproc"):
        assert part in shown


def test_new_writes_a_method_that_passes_its_checks():
    assert atoll("new", "my-method").exit_code == 0
    assert "class MyMethod(Algorithm)" in Path("my_method.py").read_text()
    assert 'with_name("my_method.py")' in Path("test_my_method.py").read_text()
    again = atoll("new", "my-method")
    assert again.exit_code == 2
    assert "my_method.py exists" in again.stderr
    checked = atoll("check", "./my_method.py")
    assert checked.exit_code == 0, checked.output
    assert "checks passed" in checked.stdout
    assert atoll("run", "./my_method.py:personal_epochs=1", *TINY, "--out", "mine").exit_code == 0
    config = json.loads(Path("mine/config.json").read_text())
    assert Path(config["algorithm"]["file"]).samefile("my_method.py")
    assert atoll("resume", "mine").exit_code == 0


def test_a_pair_is_shown_with_both_halves_and_what_its_fields_mean():
    shown = atoll("show", "fafi+queue/margins").stdout
    assert "Cross-entropy" not in shown
    for part in ("FAFI's clients", "A queue:", "Margins:", "rho: the share", "s: the logit of a margin of 1"):
        assert part in shown, part
    assert all(key in shown for key in ("zeng2025does", "guha2019one"))
    assert "clients must train prototypes" in atoll("check", "ce/features").output


def test_a_pair_runs_in_a_folder_of_one_level():
    result = atoll("run", "fafi/margins:epochs=1", "--clients", "4")
    assert result.exit_code == 0, result.output
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("digits-fafi-margins-")
    assert json.loads((folder / "config.json").read_text())["algorithm"]["name"] == "fafi/margins"
    assert atoll("resume", str(folder)).exit_code == 0


def test_check_takes_hyperparameters():
    result = atoll("check", "fedavg:epochs=2")
    assert result.exit_code == 0, result.output
    assert "fedavg:epochs=2: all" in result.stdout
    assert "must be an int" in atoll("check", "fedavg:epochs=-1").output


def test_check_fails_loudly(monkeypatch):
    failed = conformance.Result("inputs-are-unchanged", False, "`w` was changed", 0.1)
    monkeypatch.setattr(conformance, "check", lambda method, on_result=None: [failed])
    result = atoll("check", "ditto")
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    assert "1 of 1 checks failed" in result.stdout


def test_check_all_ends_with_a_table(monkeypatch):
    failed = conformance.Result("stop-and-resume", False, "it ended elsewhere", 0.5)
    passed = replace(failed, passed=True, message="")
    both = {name: create(name) for name in ("ditto@ifca", "fedavg")}
    monkeypatch.setattr(conformance, "everything", lambda: both)
    monkeypatch.setattr(
        conformance, "check", lambda method, on_result=None: [passed if method is both["fedavg"] else failed]
    )
    result = atoll("check", "all")
    assert result.exit_code == 1
    assert "it ended elsewhere" in result.stdout
    assert re.search(r"FAIL\s+ditto@ifca\s+0.5\s+stop-and-resume", result.stdout)
    assert re.search(r"pass\s+fedavg\s+0.5", result.stdout)
    assert "1 of 2 methods failed" in result.stdout
    monkeypatch.setattr(conformance, "check", lambda method, on_result=None: [passed])
    assert atoll("check", "all").exit_code == 0


def test_colour_is_left_out_where_it_is_not_wanted():
    run = subprocess.run(
        [*PROGRAM, "list", "partitions"],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\x1b[3" not in run.stdout


# -- small parts -------------------------------------------------------------------------------------------------------


def test_messages_name_flags_of_the_command_and_nothing_else():
    command = typer.main.get_command(app).get_command(None, "run")
    message = "lower `lr`, use `strategy=loop` or `device=cpu`, and another `folder`; `lam` and `seed` of PFLlib stay"
    flags = "lower --lr, use --engine loop or --device cpu, and another --out; `lam` and `seed` of PFLlib stay"
    assert name_flags(message, command) == flags
    assert name_flags("`weight_decay` of Training must be", command) == "--weight-decay must be"
    assert name_flags(message, None) == message


def test_cohorts_are_numbers_or_shares():
    assert [parse_cohort(text) for text in (None, "10", "0.1", "1.0")] == [None, 10, 0.1, 1.0]


def test_unused_folders_are_counted(tmp_path):
    assert unused_folder(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert unused_folder(tmp_path / "a") == tmp_path / "a-3"
