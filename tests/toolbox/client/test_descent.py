import pytest
import torch

from atoll import Training
from atoll.kernel.params import Params
from atoll.toolbox.client import descend, zero_velocity

W, G = Params.of(a=torch.tensor([1.0, 2.0])), Params.of(a=torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize(
    ("rule", "direction"),
    [
        (Training(), [3.0, 4.0]),
        (Training(weight_decay=0.5), [3.5, 5.0]),
        (Training(clip=2.5), [1.5, 2.0]),
        (Training(clip=10.0), [3.0, 4.0]),
    ],
)
def test_a_step_by_hand(rule, direction):
    w, _ = descend(rule, W, G, zero_velocity(rule, W), 0.1)
    torch.testing.assert_close(w["a"], W["a"] - 0.1 * torch.tensor(direction))


def test_momentum_remembers():
    rule = Training(momentum=0.5)
    w, velocity = descend(rule, W, G, zero_velocity(rule, W), 0.1)
    w, velocity = descend(rule, w, G, velocity, 0.1)
    torch.testing.assert_close(velocity["a"], 1.5 * G["a"])
    torch.testing.assert_close(w["a"], W["a"] - 0.1 * 2.5 * G["a"])


def test_without_momentum_there_is_no_velocity():
    assert not zero_velocity(Training(), W)
    assert set(zero_velocity(Training(momentum=0.9), W | Params.of(b=1.0), only=["b"])) == {"b"}
