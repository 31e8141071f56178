import threading
from typing import ClassVar

import pytest
import torch
from torch import nn

from atoll import federate
from atoll.algorithms.fedavg import FedAvg
from atoll.kernel.errors import ModelError
from atoll.kernel.network import Network, Variant
from atoll.kernel.objective import accuracy, cross_entropy
from atoll.toolbox.client import sgd


class Tied(nn.Module):
    """Two layers that share their weight."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.decode(torch.relu(self.encode(x))))


def test_tied_weights_are_one_leaf_and_train_as_one(make_task, make_cohort):
    task = make_task(Tied, sizes=(4,), dtype=torch.float64)
    assert "decode.weight" not in task.network.initial
    trained = sgd(make_cohort(task), start=task.network.initial, epochs=1).client(0)

    module = Tied().double()
    module.load_state_dict(dict(task.network.initial), strict=False)
    loss = nn.functional.cross_entropy(module(task.x), task.y)  # one batch holds all four samples
    loss.backward()
    expected = module.encode.weight - 0.1 * module.encode.weight.grad  # the sum of both uses' gradients
    assert torch.allclose(trained["encode.weight"], expected, atol=1e-12)


def frozen_body():
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    return module


def test_frozen_parameters_stay_bit_identical_through_training(make_task):
    task = make_task(frozen_body, shares=(0.6, 0.2, 0.2), momentum=0.9, weight_decay=0.1)
    w = federate(task, FedAvg(), rounds=3).server
    start = task.network.initial
    assert torch.equal(w["0.weight"], start["0.weight"])
    assert torch.equal(w["0.bias"], start["0.bias"])
    assert not torch.equal(w["3.weight"], start["3.weight"])


def test_integer_buffers_keep_their_type_and_count_the_steps_of_the_longest_client(make_task):
    task = make_task(frozen_body, sizes=(4, 12))
    w = federate(task, FedAvg(), rounds=2, evaluation="none").server
    assert w["1.num_batches_tracked"].dtype == torch.int64
    assert w["1.num_batches_tracked"].item() == 2 * 3  # 12 samples in batches of 4, twice; counters take the maximum


def test_leaves_are_trained_frozen_or_buffers():
    layout = Network(frozen_body()).layout
    assert layout.names("frozen") == {"0.weight", "0.bias"}
    assert layout.names("trained") == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert layout.names("buffer") == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert layout.norm == {name for name in layout.kinds if name.startswith("1.")}
    assert Network(frozen_body()).parameters == 5 + 5 + 15 + 3


def test_the_head_is_the_last_linear_layer_unless_declared():
    assert Network(frozen_body()).layout.head == {"3.weight", "3.bias"}

    class Declared(nn.Sequential):
        head_modules: ClassVar = ("0",)

    assert Network(Declared(nn.Linear(4, 4), nn.Linear(4, 3))).layout.head == {"0.weight", "0.bias"}


def test_a_declared_head_that_does_not_exist_is_refused():
    class Wrong(nn.Sequential):
        head_modules: ClassVar = ("classifier",)

    with pytest.raises(
        ModelError, match="`head_modules` of Wrong must name its submodules. Got 'classifier'.\nhint: there are: 0."
    ):
        Network(Wrong(nn.Linear(4, 3)))


def test_the_head_of_a_prefix_name_is_not_taken_along():
    class Two(nn.Module):
        head_modules: ClassVar = ("head",)

        def __init__(self):
            super().__init__()
            self.head, self.head2 = nn.Linear(4, 3), nn.Linear(4, 3)

    assert Network(Two()).layout.head == {"head.weight", "head.bias"}


def test_dropout_needs_keys_and_nothing_else_does():
    assert Network(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))).draws
    assert not Network(frozen_body()).draws


def test_moving_a_network_keeps_what_is_known_of_it():
    network = Network(frozen_body())
    network.draws_globally = True
    moved = network.to(torch.device("cpu"), torch.float64)
    assert moved.signature == network.signature
    assert moved.layout == network.layout
    assert moved.draws_globally
    assert moved.initial["0.weight"].dtype == torch.float64
    assert moved.initial["1.num_batches_tracked"].dtype == torch.int64


def test_networks_without_a_signature_share_nothing():
    assert Network(nn.Linear(4, 3)).signature != Network(nn.Linear(4, 3)).signature


def test_each_thread_has_a_module_of_its_own():
    network = Network(nn.Linear(4, 3))
    found = []
    thread = threading.Thread(target=lambda: found.append(network.module(Variant())))
    thread.start()
    thread.join()
    assert network.module(Variant()) is network.module(Variant())
    assert found[0] is not network.module(Variant())


def test_loss_and_score_are_per_sample():
    outputs, targets = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])
    assert accuracy(outputs, targets).tolist() == [1.0, 0.0]
    right = torch.log(1 + torch.exp(torch.tensor(-2.0)))
    assert torch.allclose(cross_entropy(outputs, targets), torch.stack([right, right + 2]))


def test_tokens_are_averaged_within_a_sample():
    outputs = torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])  # one sample, two classes, two tokens
    targets = torch.tensor([[0, 0]])
    assert accuracy(outputs, targets).tolist() == [0.5]
    assert cross_entropy(outputs, targets).shape == (1,)
