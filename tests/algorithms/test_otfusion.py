"""OTFusion: neurons are matched by what enters them, and only networks without crossings are taken."""

from collections.abc import Callable, Mapping

import pytest
import torch
from samples import answers
from torch import Tensor, nn

from atoll import Params, Task
from atoll.algorithms.answers.otfusion import matching, reorder
from atoll.algorithms.ensemble import Ensemble
from atoll.algorithms.otfusion import OTFusion
from atoll.kernel.errors import ModelError
from atoll.kernel.params import stack
from atoll.kernel.randomness import generator
from atoll.models import MLP, BodyAndHead
from atoll.testing.conformance import play
from atoll.toolbox.oneshot import average_models, shares


class Skipping(BodyAndHead):
    """Its second layer adds to the first one's answer: their neurons are one and the same."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6)), nn.Linear(6, 3))

    def features(self, x: Tensor) -> Tensor:
        first = self.body[0](x)  # type: ignore[index]
        return first + self.body[2](torch.relu(first))  # type: ignore[index]


def images() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 6), nn.ReLU())
    return BodyAndHead(body, nn.Linear(6, 3))


def deep() -> nn.Module:
    return MLP((4,), 3, hidden=(6, 5))


def drawn(like: Mapping[str, Tensor], seed: int) -> Params:
    """Another model of the same shapes; variances are positive."""
    draw = generator(seed, "another model")
    layout = like.layout if isinstance(like, Params) else None
    leaves = {name: torch.from_numpy(draw.uniform(0.5, 1.5, leaf.shape)).to(leaf.dtype) for name, leaf in like.items()}
    return Params(leaves, layout)


def shuffled(seed: int) -> Callable[[str, Tensor], Tensor]:
    draw = generator(seed, "shuffle")
    return lambda _, incoming: torch.from_numpy(draw.permutation(len(incoming)))


@pytest.mark.parametrize(("model", "shape"), [(deep, (4,)), (images, (1, 5, 5))])
def test_another_order_of_neurons_answers_the_same(
    make_task: Callable[..., Task], model: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    # Also with statistics of BatchNorm that differ between channels, and where images are laid flat.
    task = make_task(model, shape=shape, dtype=torch.float64)
    one = drawn(task.network.initial, 0)
    other = reorder(one, shuffled(1))
    assert not all(torch.equal(one[name], leaf) for name, leaf in other.items())
    torch.testing.assert_close(answers(task, other, task.x), answers(task, one, task.x), rtol=0, atol=1e-9)
    back = matching(other, one)
    for name, leaf in one.items():
        torch.testing.assert_close(back[name], leaf, rtol=0, atol=0)


def test_matching_is_the_best_of_all_orders(make_task: Callable[..., Task]) -> None:
    task = make_task(lambda: MLP((4,), 3, hidden=(4,)), dtype=torch.float64)
    one, other = drawn(task.network.initial, 0), drawn(task.network.initial, 1)
    rows = [torch.cat([w["body.1.weight"], w["body.1.bias"][:, None]], 1) for w in (one, matching(other, one))]
    every = torch.cartesian_prod(*[torch.arange(4)] * 4)
    orders = every[[len(set(order.tolist())) == 4 for order in every]]
    costs = [(rows[0] - rows[1][order]).square().sum() for order in orders]
    torch.testing.assert_close((rows[0] - rows[1]).square().sum(), torch.stack(costs).min(), rtol=0, atol=1e-12)


def test_all_are_matched_to_the_largest_client(make_task: Callable[..., Task]) -> None:
    task = make_task(deep, dtype=torch.float64)
    sent = play(task, Ensemble(epochs=3)).server.answer
    largest = sent.models.client(2)
    matched = stack([matching(sent.models.client(k), largest) for k in range(4)])
    found = play(task, OTFusion(epochs=3, weighting="sqrt")).server.answer
    expected = average_models(matched, shares(sent.counts, "sqrt"))
    assert all(torch.equal(found[name], leaf) for name, leaf in expected.items())


@pytest.mark.parametrize("model", [Skipping, lambda: nn.GroupNorm(2, 4)])
def test_networks_whose_neurons_cannot_change_places_are_refused(
    make_task: Callable[..., Task], model: Callable[[], nn.Module]
) -> None:
    def made() -> nn.Module:
        part = model()
        if isinstance(part, BodyAndHead):
            return part
        return BodyAndHead(nn.Sequential(nn.Linear(4, 4), part), nn.Linear(4, 3))

    with pytest.raises(ModelError, match=r"otfusion needs linear and convolutional layers one after the other"):
        OTFusion().start(make_task(made, dtype=torch.float64).public_facts())


def test_layers_that_do_not_fit_together_are_refused(make_task: Callable[..., Task]) -> None:
    class Narrowed(BodyAndHead):
        def features(self, x: Tensor) -> Tensor:
            return self.body(x)[:, :4]

    with pytest.raises(ModelError, match="one after the other"):
        OTFusion().start(
            make_task(lambda: Narrowed(nn.Linear(4, 6), nn.Linear(4, 3)), dtype=torch.float64).public_facts()
        )
