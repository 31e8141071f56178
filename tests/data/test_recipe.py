import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from atoll import Recipe, Settings, Training, federate
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.cli import app
from atoll.data.recipe import shares_of
from atoll.federation.config import describe
from atoll.kernel.errors import DataError, ModelError, PartitionError, RunError, TaskError, UnknownName


def write_mnist(folder: Path, train: int = 60, test: int = 20, first: int = 0) -> Path:
    """Files as MNIST's, with images of 16 x 16 that are all of one brightness; returns the data folder."""
    (folder / "mnist").mkdir(parents=True, exist_ok=True)
    for kind, count, start in (("train", train, first), ("t10k", test, first + train)):
        levels = np.arange(start, start + count, dtype=np.uint8)
        images = np.broadcast_to(levels[:, None, None], (count, 16, 16))
        for name, array in (("images-idx3", images), ("labels-idx1", levels % 10)):
            header = b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / "mnist" / f"{kind}-{name}-ubyte").write_bytes(header + array.tobytes())
    return folder


def config_of(task):
    """What a run of this task writes down."""
    return json.loads(json.dumps(describe(task, FedAvg(), Settings()).as_json()))


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_samples_of_nobody_are_dealt_and_those_of_somebody_are_not():
    dealt = Recipe("digits").build()
    assert dealt.facts["recipe"]["partition"] == "dirichlet:0.3"
    assert (dealt.clients, dealt.names) == (20, None)
    natural = Recipe("gaussian").build()
    assert natural.facts["recipe"]["partition"] == "natural"
    assert natural.names == tuple(f"client {k}" for k in range(20))
    assert natural.groups.tolist() == [k % 4 for k in range(20)]


def test_a_partition_that_is_asked_for_is_taken():
    task = Recipe("gaussian", partition="iid+concept:2", clients=6).build()
    assert (task.clients, task.names) == (6, None)
    assert task.groups.tolist() == [0, 1] * 3
    assert Recipe("gaussian", partition="natural:10", clients=5).build().clients == 5
    assert Recipe("gaussian", partition="iid").build().clients == 20


def test_some_of_the_samples_can_be_taken(tmp_path):
    recipe = Recipe("mnist", data=str(write_mnist(tmp_path)), samples=20, central="official", public=0.25, clients=3,
                    partition="iid", model="linear", split="100/0/0")  # fmt: skip
    task = recipe.build()
    assert (len(task.y), len(task.public[1]), len(task.central[1])) == (15, 5, 20)
    every = Recipe("mnist", data=str(tmp_path), central="official", partition="iid", clients=3, model="linear").build()
    brightness = {float(image[0, 0, 0]) for image in torch.cat([task.x, task.public[0]])}
    assert len(brightness) == 20
    assert brightness < {float(image[0, 0, 0]) for image in every.x}
    assert recipe.build().fingerprint == task.fingerprint != recipe.with_seed(1).build().fingerprint
    assert Recipe.of_config(config_of(task)) == recipe
    with pytest.raises(DataError, match="`samples` must be at least 1 and at most all 60 of mnist. Got 61."):
        Recipe("mnist", data=str(tmp_path), samples=61, central="official").build()


def test_the_split_is_in_per_cent():
    task = Recipe("gaussian", split="50/20/30").build()
    sizes = {name: split.sizes(np.arange(20)).tolist() for name, split in task.splits.items()}
    assert sizes == {"train": [30] * 20, "val": [12] * 20, "test": [18] * 20}
    assert shares_of("60/15/25") == pytest.approx((0.6, 0.15, 0.25), abs=1e-15)
    assert shares_of("100/0/0") == (1, 0, 0)


def test_seeds_deal_unless_the_partition_has_its_own():
    recipe = Recipe("digits", clients=4)
    assert recipe.build().fingerprint != recipe.with_seed(1).build().fingerprint
    fixed = Recipe("digits", clients=4, partition_seed=0)
    assert recipe.build().fingerprint == fixed.with_seed(1).build().fingerprint


# -- the server's test set ---------------------------------------------------------------------------------------------


def test_the_official_test_set_is_dealt_or_kept_as_the_servers(tmp_path):
    recipe = {"dataset": "mnist", "partition": "iid", "clients": 2, "model": "mlp", "data": str(write_mnist(tmp_path))}
    merged = Recipe(**recipe).build()
    assert (len(merged.y), merged.central) == (80, None)
    official = Recipe(**recipe, central="official").build()
    assert len(official.y) == 60
    assert official.central[1].tolist() == [k % 10 for k in range(60, 80)]
    share = Recipe(**recipe, central="0.25", public=0.1).build()
    assert (len(share.y), len(share.central[1]), len(share.public[1])) == (52, 20, 8)
    levels = [pair[0][:, 0, 0, 0].tolist() for pair in (share.central, share.public, (share.x, share.y))]
    assert len(set().union(*levels)) == 80  # nobody's sample twice, none lost


def test_an_official_test_set_must_be_there():
    with pytest.raises(TaskError) as error:
        Recipe("digits", central="official").build()
    assert str(error.value) == (
        "`central` must not be official: digits has no official test set.\nhint: set `central` to a share, as 0.1."
    )


def test_another_data_folder_gives_other_data(tmp_path, monkeypatch):
    recipe = Recipe("mnist", partition="iid", clients=2, model="mlp")
    found = []
    for first in (0, 100):
        monkeypatch.setenv("ATOLL_DATA", str(write_mnist(tmp_path / str(first), first=first)))
        found.append(recipe.build().fingerprint)
    assert found[0] != found[1]


def test_files_that_have_changed_are_read_again(tmp_path):
    recipe = Recipe("mnist", data=str(write_mnist(tmp_path)), partition="iid", clients=2, model="mlp")
    before = recipe.build().fingerprint
    assert recipe.build().fingerprint == before
    write_mnist(tmp_path, first=100)
    assert recipe.build().fingerprint != before


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"dataset": "digit"}, UnknownName, "Did you mean: digits?"),
        ({"partition": "dirichlet"}, PartitionError, "`dirichlet` must be followed by its alpha"),
        ({"partition": "natural"}, TaskError, "digits has no owners"),
        ({"clients": 0}, PartitionError, "at least 1 client"),
        ({"model": "cmn"}, UnknownName, "Did you mean: cnn?"),
        ({"model": "mlp:32/cmn"}, UnknownName, "Did you mean: cnn?"),
        ({"model": "mlp:32/"}, UnknownName, "Unknown model ''"),
        ({"model": "mlp:0"}, ModelError, "take. Got 'mlp:0'"),
        ({"model": "linear:8"}, ModelError, "take. Got 'linear:8'"),
        ({"model": "mlp/linear/mlp:8", "clients": 2}, TaskError, "at most one per client, 2. Got 3."),
        ({"split": "60/40"}, TaskError, "A split must be three numbers that sum to 100, train/val/test. Got '60/40'"),
        ({"split": "a/b/c"}, TaskError, "A split must be three numbers"),
        ({"split": "60/30/20"}, TaskError, "The three parts of a split must sum to 100, and train must be above 0."),
        ({"split": "0/50/50"}, TaskError, "train must be above 0. Got '0/50/50'"),
        ({"split": "nan/50/50"}, TaskError, "must sum to 100"),
        ({"central": "offical"}, TaskError, "must be none, official or a share of the samples. Got 'offical'"),
        ({"central": "1.5"}, TaskError, "must be at least 0 and leave something"),
        ({"central": "nan"}, TaskError, "must be at least 0 and leave something"),
        ({"public": -0.5}, TaskError, "must be at least 0 and leave something"),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_be_followed_says_why(more, error, said):
    with pytest.raises(error) as raised:
        Recipe(**more).build()
    assert said in str(raised.value)


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("digits", clients=3, split="75/0/25", public=0.1, training=Training(lr=0.5, clip=2.0, lr_decay=0.9)),
        Recipe("gaussian"),
        Recipe("gaussian", partition="natural+concept:2", clients=4, seed=3, partition_seed=5, central="0.1"),
        Recipe("linear"),
        Recipe("gaussian", model="mlp:8/linear"),
    ],
    ids=lambda recipe: f"{recipe.dataset} {recipe.partition}",
)
def test_a_task_is_built_again_from_what_its_run_wrote(recipe):
    task = recipe.build()
    again = Recipe.of_config(config_of(task)).build()
    assert config_of(again) == config_of(task)
    assert again.fingerprint == task.fingerprint
    assert all((again.network.initial[name] == leaf).all() for name, leaf in task.network.initial.items())


def test_a_task_made_in_python_cannot_be_built_again(make_task):
    with pytest.raises(RunError) as error:
        Recipe.of_config(config_of(make_task()))
    assert str(error.value) == (
        "Only a task that was built from a recipe can be built again. 'own' was not.\n"
        "hint: build the task in Python and continue with federate(task, ..., folder=..., resume=True)."
    )


@pytest.mark.parametrize("dataset", ["gaussian", "linear"])
def test_a_run_of_natural_clients_is_resumed_by_its_folder(tmp_path, dataset):
    recipe = Recipe(dataset, clients=4)

    def stopped(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federate(recipe.build(), Ditto(), rounds=3, folder=tmp_path / "run", on_round=stopped)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    result = CliRunner().invoke(app, ["resume", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    whole = federate(recipe.build(), Ditto(), rounds=3).history
    assert [line["evaluation"] for line in lines] == [line["evaluation"] for line in whole]
