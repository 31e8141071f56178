import gzip
import hashlib
import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.data import datasets
from atoll.errors import DataError, UnknownName

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


def test_data_folder_comes_from_the_environment(tmp_path, monkeypatch):
    write_idx_set(tmp_path / "mnist", pack=True)
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    assert len(datasets.load("mnist").y) == 10


def test_unknown_set():
    with pytest.raises(UnknownName) as caught:
        datasets.load("mnits")
    assert str(caught.value) == (
        "Unknown data set 'mnits'. Did you mean: mnist?\nAvailable: cifar10, digits, fashion-mnist, mnist"
    )


def test_no_data_folder_known():
    with pytest.raises(DataError) as caught:
        datasets.load("mnist")
    assert str(caught.value) == (
        "`mnist` is read from a data folder, and none is known.\n"
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
        "hint: put the files there, or set ATOLL_DATA to the folder that holds one of these."
    )


def test_pickled_cifar_is_declined(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataError, match="holds pickles, which may run code and are not read"):
        datasets.load("cifar10", tmp_path)


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
