"""Who learns from whom: pairs of clients, mixtures, and the room they take."""

import numpy as np
import pytest
import torch

from atoll import Stack, Task
from atoll.kernel.errors import EngineError
from atoll.kernel.params import Layout
from atoll.kernel.randomness import default_generator
from atoll.toolbox.server import mixing

LAYOUT = Layout({"a": "trained", "b": "trained", "mean": "buffer"})
MODELS = Stack(
    {
        "a": torch.tensor([[1.0, 2.0], [1.0, 0.0], [-2.0, -4.0]], dtype=torch.float64),
        "b": torch.tensor([2.0, 0.0, -4.0], dtype=torch.float64),
        "mean": torch.tensor([100.0, -100.0, 5.0], dtype=torch.float64),
    },
    LAYOUT,
)


def test_products_distances_and_cosines_are_over_trained_leaves() -> None:
    # As vectors: (1, 2, 2), (1, 0, 0), (-2, -4, -4).
    torch.testing.assert_close(
        mixing.products(MODELS).tolist(), [[9.0, 1.0, -18.0], [1.0, 1.0, -2.0], [-18.0, -2.0, 36.0]]
    )
    torch.testing.assert_close(
        mixing.squared_distances(MODELS).tolist(), [[0.0, 8.0, 81.0], [8.0, 0.0, 41.0], [81.0, 41.0, 0.0]]
    )
    torch.testing.assert_close(
        mixing.cosines(MODELS).tolist(), [[1.0, 1 / 3, -1.0], [1 / 3, 1.0, -1 / 3], [-1.0, -1 / 3, 1.0]]
    )


def test_distances_far_from_the_origin_keep_their_digits() -> None:
    # Without centring, |w_i|^2 + |w_j|^2 - 2 <w_i, w_j> of numbers near 1000 would leave nothing of 1e-4 in float32.
    models = Stack.of(w=torch.tensor([[1000.0], [1000.0 + 2**-7]]))
    assert mixing.squared_distances(models)[0, 1] == pytest.approx(2**-14, rel=1e-4)


def test_a_model_of_zeros_has_no_direction() -> None:
    assert torch.isfinite(mixing.cosines(Stack.of(w=torch.zeros(2, 3)))).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_of_a_matrix_mix_models(dtype: torch.dtype) -> None:
    models = MODELS.trained.map(lambda leaf: leaf.to(dtype))
    matrix = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=dtype)
    mixture = mixing.mix_models(matrix, models)
    assert mixture["a"].tolist() == [[1.0, 1.0], [-2.0, -4.0]]
    assert mixture["b"].tolist() == [1.0, -4.0]


def test_one_row_at_a_time_gives_the_same_bits() -> None:
    with default_generator(0):
        models, matrix = Stack.of(w=torch.randn(7, 31).double()), torch.rand(7, 7).double()
    together = mixing.mix_models(matrix, models)["w"]
    assert torch.equal(together, torch.cat([mixing.mix_models(row[None], models)["w"] for row in matrix]))


def test_replies_move_the_models_of_their_senders() -> None:
    moved = mixing.with_replies(
        MODELS.trained, np.array([2, 0]), Stack.of(a=torch.ones(2, 2).double(), b=torch.tensor([1.0, 7.0]).double())
    )
    assert moved["b"].tolist() == [9.0, 0.0, -3.0]
    assert MODELS["b"].tolist() == [2.0, 0.0, -4.0]


def test_a_server_without_room_says_how_much_it_needs(make_task, monkeypatch: pytest.MonkeyPatch) -> None:
    task: Task = make_task(sizes=(2, 2, 2))
    needed = 2 * 3 * 4 * task.network.parameters
    monkeypatch.setattr(mixing, "_memory", lambda device: needed)
    assert mixing.initial_models(task.public_facts(), copies=2).clients == 3
    monkeypatch.setattr(mixing, "_memory", lambda device: needed - 1)
    with pytest.raises(EngineError, match=f"all 3 clients, 2 of each at a time: {needed:,} bytes"):
        mixing.initial_models(task.public_facts(), copies=2)


def test_the_memory_of_this_machine_is_known() -> None:
    assert mixing._memory(torch.device("cpu")) > 2**20
