import gzip
import hashlib
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.data import datasets
from atoll.kernel.errors import DataError, UnknownName
from atoll.kernel.objective import absolute_error, squared_error

real = pytest.mark.skipif(
    not os.environ.get("ATOLL_DATA"), reason="reads real data sets: set ATOLL_DATA to their folder"
)


def grey(x):
    """The stored bytes of normalised images."""
    return ((x * 0.5 + 0.5) * 255).round().to(torch.uint8).numpy()


def md5(array):
    return hashlib.md5(array.tobytes()).hexdigest()


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def write_idx_set(folder: Path, pack: bool, train=6, test=4):
    folder.mkdir(parents=True)
    for part, n in (("train", train), ("t10k", test)):
        images = np.arange(n * 28 * 28).reshape(n, 28, 28) % 256
        for kind, array in (("images-idx3", images), ("labels-idx1", np.arange(n) % 10)):
            path = folder / f"{part}-{kind}-ubyte{'.gz' if pack else ''}"
            path.write_bytes(gzip.compress(idx(array)) if pack else idx(array))


def cifar_images(seed, n=4):
    return np.random.default_rng(seed).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)


CIFAR_FILES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch, request):
    if "real" not in request.node.name:
        monkeypatch.delenv("ATOLL_DATA", raising=False)


def test_digits_need_no_files():
    digits = datasets.load("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert (digits.x.dtype, digits.y.dtype) == (torch.float32, torch.int64)
    assert (digits.x.min(), digits.x.max()) == (-1, 1)
    assert digits.y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert digits.x[0, 0, 0].tolist() == [-1, -1, -0.375, 0.625, 0.125, -0.875, -1, -1]  # 0 0 5 13 9 1 0 0
    assert digits.central is None
    assert repr(digits) == "Dataset('digits', 1797 samples of (1, 8, 8))"


def test_digits_are_read_once_but_not_shared():
    mine = datasets.load("digits")
    mine.x.zero_()
    mine.y.zero_()
    other = datasets.load("digits")
    assert (other.x.max(), other.y.max()) == (1, 9)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
def test_idx_files_packed_or_not_in_either_layout(tmp_path, name, folder, pack):
    write_idx_set(tmp_path / folder, pack)
    merged = datasets.load(name, tmp_path)
    assert merged.x.shape == (10, 1, 28, 28)
    assert merged.y.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert grey(merged.x).ravel()[:300].tolist() == [k % 256 for k in range(300)]
    assert merged.source.endswith(f"from {folder}")


def test_official_test_set_is_central_unless_merged(tmp_path):
    write_idx_set(tmp_path / "mnist", pack=False)
    merged, apart = (datasets.load("mnist", tmp_path, merge=merge) for merge in (True, False))
    assert merged.central is None
    assert apart.central is not None
    assert torch.equal(merged.x, torch.cat([apart.x, apart.central[0]]))
    assert torch.equal(merged.y, torch.cat([apart.y, apart.central[1]]))
    assert repr(apart) == "Dataset('mnist', 6 + 4 central samples of (1, 28, 28))"


def test_cifar_as_webp_strips_and_as_binary_rows_agree(tmp_path):
    strips, rows = tmp_path / "strips" / "cifar10", tmp_path / "rows" / "cifar-10-batches-bin"
    strips.mkdir(parents=True)
    rows.mkdir(parents=True)
    for k, name in enumerate(CIFAR_FILES):
        images, labels = cifar_images(k), np.arange(4, dtype=np.uint8)
        encoded = []
        for half in (images[:2], images[2:]):
            strip = io.BytesIO()
            Image.fromarray(half.reshape(-1, 32, 3)).save(strip, "webp", lossless=True, exact=True)
            encoded.append(strip.getvalue())
        np.savez(
            strips / f"{name}.npz",
            webp=np.frombuffer(b"".join(encoded), np.uint8),
            offsets=np.cumsum([0, *map(len, encoded)]),
            labels=labels,
        )
        planes = images.transpose(0, 3, 1, 2).reshape(4, -1)
        np.concatenate([labels[:, None], planes], axis=1).tofile(rows / f"{name}.bin")
    a, b = (datasets.load("cifar10", folder.parent, merge=False) for folder in (strips, rows))
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.y, b.y)
    assert a.x.shape == (20, 3, 32, 32)
    assert a.central[0].shape == (4, 3, 32, 32)
    assert np.array_equal(grey(a.x[4:8]), cifar_images(1).transpose(0, 3, 1, 2))


def test_cifar100_takes_the_fine_labels_and_prefers_the_original_pixels(tmp_path):
    packed, rows = tmp_path / "cifar100", tmp_path / "cifar-100-binary"
    packed.mkdir()
    rows.mkdir()
    fine, coarse = np.array([3, 99, 0, 50], np.uint8), np.array([1, 19, 0, 7], np.uint8)
    smooth = np.broadcast_to(np.array([40, 120, 200], np.uint8), (4, 32, 32, 3))
    strip = io.BytesIO()
    Image.fromarray(smooth.reshape(-1, 32, 3)).save(strip, "jpeg", quality=85, subsampling=0)
    for part in ("train", "test"):
        stored = np.frombuffer(strip.getvalue(), np.uint8)
        np.savez(packed / f"{part}.npz", jpeg=stored, offsets=[0, len(stored)], fine=fine, coarse=coarse)
    lossy = datasets.load("cifar100", tmp_path, merge=False)
    assert "JPEG-compressed" in lossy.source
    assert lossy.classes == 100
    assert lossy.y.tolist() == fine.tolist()
    assert np.abs(grey(lossy.x).astype(int) - smooth.transpose(0, 3, 1, 2)).max() <= 3
    for part in ("train", "test"):
        planes = smooth.transpose(0, 3, 1, 2).reshape(4, -1)
        np.concatenate([coarse[:, None], fine[:, None], planes], axis=1).tofile(rows / f"{part}.bin")
    exact = datasets.load("cifar100", tmp_path)
    assert exact.source.endswith("from cifar-100-binary")
    assert exact.y.tolist() == 2 * fine.tolist()
    assert np.array_equal(grey(exact.x[:4]), smooth.transpose(0, 3, 1, 2))


def test_fashion_is_short_for_fashion_mnist(tmp_path):
    write_idx_set(tmp_path / "fashion-mnist", pack=False)
    assert datasets.load("fashion", tmp_path).name == "fashion-mnist"


# -- natural owners ----------------------------------------------------------------------------------------------------


def write_leaf(folder: Path, writers: dict[str, list[int]], file="all_data_0.json", indent=None):
    folder.mkdir(parents=True, exist_ok=True)
    samples = {name: {"x": [[label / 255] * 784 for label in labels], "y": labels} for name, labels in writers.items()}
    counts = [len(labels) for labels in writers.values()]
    content = {"users": [*writers], "num_samples": counts, "user_data": samples}
    (folder / file).write_text(json.dumps(content, indent=indent))


@pytest.mark.parametrize("folder", ["femnist", "femnist/data/all_data"])
@pytest.mark.parametrize("indent", [None, 2])
def test_femnist_in_the_files_of_leaf(tmp_path, folder, indent):
    write_leaf(tmp_path / folder, {"f0001_41": [5, 61], "f0002_07": [0]}, indent=indent)
    write_leaf(tmp_path / folder, {"f0003_10": [7, 8, 9]}, "all_data_1.json", indent)
    write_leaf(tmp_path / folder, {}, "all_data_2.json", indent)
    femnist = datasets.load("femnist", tmp_path)
    assert femnist.x.shape == (6, 1, 28, 28)
    assert femnist.y.tolist() == [5, 61, 0, 7, 8, 9]
    assert grey(femnist.x[:, 0, 3, 4]).tolist() == [5, 61, 0, 7, 8, 9]
    assert femnist.owner.tolist() == [0, 0, 1, 2, 2, 2]
    assert femnist.owners == ("f0001_41", "f0002_07", "f0003_10")
    assert femnist.classes == 62


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-40], lambda text: text.replace("user_data", "data"), lambda _: ""]
)
def test_damaged_leaf_files_are_named(tmp_path, damage):
    write_leaf(tmp_path / "femnist", {"a": [1, 2], "b": [3]})
    path = tmp_path / "femnist" / "all_data_0.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(DataError, match="all_data_0.json could not be read"):
        datasets.load("femnist", tmp_path)


def write_hapt(root: Path):
    """Two persons, three recordings, as npz and as UCI's text: the same signals."""
    rng = np.random.default_rng(0)
    lengths, subjects = [400, 300, 330], [2, 2, 5]
    # recording, person, activity, first and last sample, from 1
    segments = np.array(
        [[1, 2, 5, 11, 202], [1, 2, 7, 203, 390], [2, 2, 1, 1, 300], [3, 5, 6, 2, 128], [3, 5, 3, 140, 267]]
    )
    signal = rng.integers(-700, 700, size=(6, sum(lengths))).astype(np.int16)
    scale = np.array([1 / 720] * 3 + [0.0003] * 3)
    offsets = np.cumsum([0, *lengths])
    windows = [
        (offsets[recording - 1] + start, activity - 1, person)
        for recording, person, activity, first, last in segments
        for start in range(first - 1, last - 127, 64)
    ]
    start, label, subject = np.array(windows).T
    (root / "npz" / "hapt").mkdir(parents=True)
    np.savez(
        root / "npz" / "hapt" / "hapt.npz",
        signal=signal, scale=scale, win_start=start, win_label=label, win_subject=subject,
    )  # fmt: skip
    text = root / "text" / "hapt" / "RawData"
    text.mkdir(parents=True)
    np.savetxt(text / "labels.txt", segments, fmt="%d")
    values = signal * scale[:, None]
    for recording, person in enumerate(subjects, start=1):
        own = values[:, offsets[recording - 1] : offsets[recording]]
        for sensor, rows in (("acc", own[:3]), ("gyro", own[3:])):
            np.savetxt(text / f"{sensor}_exp{recording:02}_user{person:02}.txt", rows.T, fmt="%.17g")
    return values, offsets


def test_hapt_cuts_windows_of_the_basic_activities_and_both_layouts_agree(tmp_path):
    values, offsets = write_hapt(tmp_path)
    packed, text = (datasets.load("hapt", tmp_path / kind) for kind in ("npz", "text"))
    assert packed.y.tolist() == [4, 4, 0, 0, 0, 2]  # the transition (7) and the segment of 127 samples are left out
    assert packed.owner.tolist() == [0, 0, 0, 0, 0, 1]
    assert packed.owners == ("person 2", "person 5")
    assert (packed.gap, packed.classes, packed.x.shape) == (1, 6, (6, 6, 128))
    second = values[:, 10 + 64 : 10 + 64 + 128]
    assert torch.equal(packed.x[1], torch.from_numpy(second.astype(np.float32)))
    assert torch.equal(packed.x[2], torch.from_numpy(values[:, offsets[1] : offsets[1] + 128].astype(np.float32)))
    assert torch.equal(packed.x, text.x)
    assert torch.equal(packed.y, text.y)
    assert packed.owner.tolist() == text.owner.tolist()


def test_a_missing_recording_is_named(tmp_path):
    write_hapt(tmp_path)
    (tmp_path / "text/hapt/RawData/gyro_exp02_user02.txt").unlink()
    with pytest.raises(DataError, match="gyro_exp02_user02.txt could not be read"):
        datasets.load("hapt", tmp_path / "text")


PLAY = """<?xml version="1.0"?>
<PLAY><TITLE>The Tragedy of Tests</TITLE>
<ACT><SCENE><STAGEDIR>Enter FIRST</STAGEDIR>
<SPEECH><SPEAKER>FIRST</SPEAKER><LINE>{}</LINE><STAGEDIR>To SECOND</STAGEDIR>
<LINE><STAGEDIR>Aside</STAGEDIR>  abc &amp; {}</LINE><LINE><STAGEDIR>Dies</STAGEDIR></LINE></SPEECH>
<SPEECH><SPEAKER>FIRST</SPEAKER><SPEAKER>SECOND</SPEAKER><LINE>z</LINE></SPEECH>
<SPEECH><SPEAKER>SECOND</SPEAKER><LINE>{}</LINE></SPEECH>
</SCENE></ACT></PLAY>""".format("a" * 100, "b" * 60, "c" * 160)
FIRST = "a" * 100 + "\nabc & " + "b" * 60 + "\n\nz\n"
SECOND = "c" * 160 + "\n"


def decoded(numbers, characters):
    return "".join(characters[number] for number in numbers)


def test_shakespeare_cuts_what_a_role_says_into_windows(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "tests.xml").write_text(PLAY)
    plays = datasets.load("shakespeare", tmp_path)
    characters = sorted(set(FIRST + SECOND))
    assert plays.classes == len(characters)
    assert plays.owners == ("FIRST (The Tragedy of Tests)", "SECOND (The Tragedy of Tests)")
    assert plays.owner.tolist() == [0, 0, 1, 1]
    assert (plays.gap, plays.model) == (0, "char-transformer")
    assert [decoded(row, characters) for row in plays.x[:2]] == [FIRST[:80], FIRST[80:160]]
    assert [decoded(row, characters) for row in plays.y[:2]] == [FIRST[1:81], FIRST[81:161]]
    assert decoded(plays.y[3], characters) == SECOND[81:161]


def test_shakespeare_by_role_leaves_out_roles_with_one_window(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    texts = [FIRST, "d" * 160, SECOND]  # 160 characters have a next one for one window of 80 only
    np.savez(
        tmp_path / "shakespeare" / "shakespeare_by_role.npz",
        text=np.frombuffer("".join(texts).encode(), np.uint8), offsets=np.cumsum([0, *map(len, texts)]),
        role=["FIRST", "SHORT", "SECOND"], play=[0, 0, 0], play_titles=["The Tragedy of Tests"],
    )  # fmt: skip
    by_role = datasets.load("shakespeare", tmp_path)
    assert by_role.owners == ("FIRST (The Tragedy of Tests)", "SECOND (The Tragedy of Tests)")
    assert by_role.x.shape == (4, 80)
    assert by_role.classes == len(set("".join(texts)))


def test_a_damaged_play_is_named(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "tests.xml").write_text(PLAY[:-8])
    with pytest.raises(DataError, match="tests.xml could not be read"):
        datasets.load("shakespeare", tmp_path)


def ratings():
    """User 7 with 21 ratings written backwards in time, user 3 with 20, user 9 with 19."""
    rows = [(7, 1000 + k, k % 11, 5000 - k) for k in range(21)]
    rows += [(9, 500, 1, k) for k in range(19)]
    rows += [(3, 2000 - k, 10, k) for k in range(20)]
    return np.array(rows)


@pytest.mark.parametrize("kind", ["npz", "dat"])
def test_movietweetings_keeps_users_with_twenty_ratings_in_time_order(tmp_path, kind):
    folder, rows = tmp_path / "movietweetings", ratings()
    folder.mkdir()
    if kind == "npz":
        names = ("user", "item", "rating", "timestamp")
        np.savez(folder / "movietweetings_100k.npz", **dict(zip(names, rows.T, strict=True)))
    else:
        (folder / "ratings.dat").write_text("".join("{}::{:07d}::{}::{}\n".format(*row) for row in rows))
    movies = datasets.load("movietweetings", tmp_path)
    assert movies.owners == ("user 3", "user 7")
    assert movies.owner.tolist() == [0] * 20 + [1] * 21
    items = {item: k for k, item in enumerate(sorted(set(rows[:, 1])))}
    assert movies.x[:20, 0].tolist() == [items[2000 - k] for k in range(20)]
    assert movies.x[20:, 0].tolist() == [items[1000 + k] for k in reversed(range(21))]
    assert movies.y[20:].tolist() == [k % 11 for k in reversed(range(21))]
    assert (movies.y.dtype, movies.classes, movies.gap) == (torch.float32, None, 0)
    assert (movies.loss, movies.metric, movies.model) == (squared_error, absolute_error, "matrix-factorisation")


@pytest.mark.parametrize("damage", ["", "1::2::3\n", "1::2::3::x\n"])
def test_damaged_ratings_are_named(tmp_path, damage):
    (tmp_path / "movietweetings").mkdir()
    (tmp_path / "movietweetings" / "ratings.dat").write_text(damage)
    with pytest.raises(DataError, match="ratings.dat could not be read"):
        datasets.load("movietweetings", tmp_path)


# -- what is there -----------------------------------------------------------------------------------------------------


def test_overview_says_where_each_set_is(tmp_path):
    write_idx_set(tmp_path / "MNIST/raw", pack=False)
    rows = {row[0]: row for row in datasets.overview(tmp_path)}
    assert [*rows] == datasets.names()
    places = {name: row[datasets.OVERVIEW.index("where")] for name, row in rows.items()}
    assert places["mnist"] == places["rotated-mnist"] == "MNIST/raw/"
    assert places["fashion-mnist"] == "not there"
    assert places["gaussian"] == "made by Atoll"
    assert places["digits"] == "comes with scikit-learn"
    assert [row[0] for row in datasets.overview(None, "fashion")] == ["fashion-mnist"]


def test_a_data_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(DataError, match="The data folder must exist"):
        datasets.overview(tmp_path / "nowhere")


# -- finding and reading files -----------------------------------------------------------------------------------------


def test_data_folder_comes_from_the_environment(tmp_path, monkeypatch):
    write_idx_set(tmp_path / "mnist", pack=True)
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    assert len(datasets.load("mnist").y) == 10


def test_unknown_set():
    with pytest.raises(UnknownName) as caught:
        datasets.load("mnits")
    assert str(caught.value).startswith("Unknown data set 'mnits'. Did you mean: mnist, femnist?\nAvailable: cifar10, ")


def test_no_data_folder_known():
    with pytest.raises(DataError) as caught:
        datasets.load("mnist")
    assert str(caught.value) == (
        "`mnist` is read from a data folder. None was given.\n"
        "hint: set ATOLL_DATA to the folder that holds the data sets, or use `digits`: it needs no files."
    )


def test_missing_files_are_named(tmp_path):
    write_idx_set(tmp_path / "mnist", pack=True)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError) as caught:
        datasets.load("mnist", tmp_path)
    assert str(caught.value) == (
        "`mnist` was not found. Looked in\n"
        f"  {tmp_path / 'mnist'}: no t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz\n"
        f"  {tmp_path / 'MNIST/raw'}: no train-images-idx3-ubyte or train-images-idx3-ubyte.gz\n"
        "hint: set ATOLL_DATA to the folder that holds one of these, or see `atoll data mnist` for where to get it."
    )


@pytest.mark.parametrize(("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")])
def test_pickled_cifar_is_declined(tmp_path, name, folder):
    (tmp_path / folder).mkdir()
    with pytest.raises(DataError, match=f"{folder} holds pickles, which may run code and are not read"):
        datasets.load(name, tmp_path)


@pytest.mark.parametrize("damage", [b"", b"not an idx file", idx(np.zeros((6, 28, 28)))[:-1]])
@pytest.mark.parametrize("pack", [False, True])
def test_damaged_idx_files_are_named(tmp_path, damage, pack):
    write_idx_set(tmp_path / "mnist", pack)
    path = tmp_path / "mnist" / f"train-images-idx3-ubyte{'.gz' if pack else ''}"
    path.write_bytes(damage)
    with pytest.raises(DataError) as caught:
        datasets.load("mnist", tmp_path)
    assert str(caught.value).startswith(f"{path} could not be read: ")
    assert str(caught.value).endswith("\nhint: the file is damaged; fetch it again.")


def test_truncated_gzip_is_named(tmp_path):
    write_idx_set(tmp_path / "mnist", pack=True)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="could not be read"):
        datasets.load("mnist", tmp_path)


def test_images_and_labels_must_match(tmp_path):
    write_idx_set(tmp_path / "mnist", pack=False)
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(5)))
    with pytest.raises(DataError, match="Got 6 images and 5 labels up to 0"):
        datasets.load("mnist", tmp_path)


@real
@pytest.mark.parametrize(
    ("name", "images", "labels", "test_images", "test_labels"),
    [  # the known checksums of the unpacked files
        (
            "mnist",
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
        (
            "fashion-mnist",
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
        ),
    ],
)
def test_real_idx_sets_are_the_original_ones(name, images, labels, test_images, test_labels):
    loaded = datasets.load(name, merge=False)
    for (x, y), image_sum, label_sum in (
        ((loaded.x, loaded.y), images, labels),
        (loaded.central, test_images, test_labels),
    ):
        assert hashlib.md5(idx(grey(x[:, 0]))).hexdigest() == image_sum
        assert hashlib.md5(idx(y.numpy())).hexdigest() == label_sum


@real
def test_real_mnist_merged():
    mnist = datasets.load("mnist")
    assert mnist.x.shape == (70000, 1, 28, 28)
    assert mnist.y.bincount().tolist() == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    assert (mnist.x.min(), mnist.x.max()) == (-1, 1)


@real
def test_real_cifar10():
    cifar = datasets.load("cifar10", merge=False)
    assert cifar.x.shape == (50000, 3, 32, 32)
    assert cifar.y.bincount().tolist() == [5000] * 10
    assert cifar.central[0].shape == (10000, 3, 32, 32)
    assert cifar.central[1].bincount().tolist() == [1000] * 10
    assert cifar.y[:5].tolist() == [6, 9, 9, 4, 1]
    assert grey(cifar.x[0, :, 0, 0]).tolist() == [59, 62, 63]
    assert md5(grey(cifar.x[0])) == "564903faacb68848fabcb0f46460d2b5"


NOT_HERE = ("femnist", "cifar10", "million", "movielens-100k", "movielens-100k-leak")


@real
@pytest.mark.parametrize("name", [name for name in datasets.names() if name not in NOT_HERE])
def test_real_sets_are_as_the_catalogue_says(name):
    loaded, entry = datasets.load(name), datasets.CATALOGUE[name]
    assert f"{len(loaded.y):,}" == entry.samples
    assert loaded.classes == entry.classes
    assert len(loaded.owners) == (entry.owners or 0)
    if loaded.owner is not None:  # every owner has samples, and they lie together
        assert np.array_equal(np.unique(loaded.owner), np.arange(len(loaded.owners)))
        assert (np.diff(loaded.owner) >= 0).all()


@real
def test_real_cifar100():
    cifar = datasets.load("cifar100", merge=False)
    assert cifar.x.shape == (50000, 3, 32, 32)
    assert cifar.y.bincount().tolist() == [500] * 100
    assert cifar.central[1].bincount().tolist() == [100] * 100


@real
def test_real_hapt():
    hapt = datasets.load("hapt")
    per_person = np.bincount(hapt.owner)
    assert (per_person.min(), per_person.max()) == (284, 413)
    assert hapt.x[:, :3].norm(dim=1).mean().item() == pytest.approx(1, abs=0.05)  # gravity, in g


@real
def test_real_shakespeare():
    plays = datasets.load("shakespeare")
    assert torch.equal(plays.x[:, 1:], plays.y[:, :-1])
    characters = "\n !$&',-.234568:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz"
    first = plays.owner == plays.owners.index("HAMLET (The Tragedy of Hamlet, Prince of Denmark)")
    said = "".join(decoded(row, characters) for row in plays.x[np.flatnonzero(first)])
    assert said.startswith(
        "A little more than kin, and less than kind.\n\nNot so, my lord; I am too much i' the sun.\n"
    )


@real
def test_real_movietweetings():
    movies = datasets.load("movietweetings")
    assert (movies.y.min(), movies.y.max()) == (0, 10)
    assert movies.x.max() < 10506
    assert np.bincount(movies.owner).min() == 20
