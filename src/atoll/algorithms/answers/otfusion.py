"""OTFusion: the neurons of all models are put into a common order before they are averaged.

    for every hidden layer:   T_k = argmin_T  sum_ij T_ij |w_i - w_kj|^2,      w = sum_k p_k (T_k w_k T_k'^-1)

w_i are the incoming weights and the bias of neuron i of the reference, w_kj those of neuron j of client k, whose inputs
are in order already: T' is the plan of the layer before. Plans between equally many neurons of equal mass are
permutations, so the exact one is an assignment. All are put into the order of the client with the most samples.

A permutation of hidden neurons does not change what a network answers, but moves its average with others. Made for
small networks of linear and convolutional layers one after the other. BatchNorm moves with the neurons below it.

Reference: Singh, Jaggi. "Model Fusion via Optimal Transport." NeurIPS 2020. https://arxiv.org/abs/1910.05653
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import Replies
from atoll.kernel.errors import ModelError, name_in_messages
from atoll.kernel.params import Params, stack
from atoll.kernel.randomness import generator
from atoll.kernel.task import Facts
from atoll.toolbox.client.features import one_sample, squared_distances
from atoll.toolbox.oneshot import Votes, average_models, count_labels, shares, uploads
from atoll.toolbox.pairs import LocalTraining, ServerAnswer, Start

Order = Callable[[str, Tensor], Tensor]  # which neuron of a layer comes where, given its name and incoming weights


@dataclass(frozen=True, kw_only=True)
class Matched(ServerAnswer):
    """The average of models whose neurons were matched."""

    weighting: Votes = "samples"  # p_k: by training samples, by their square root, or the same for all

    called: ClassVar[str] = "otfusion"
    cites: ClassVar[str] = "singh2020model"

    def require(self, training: LocalTraining, task: Facts) -> None:
        """Raise unless hidden neurons can be put into another order."""
        require_chain(self, task)

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Params:
        """Match the neurons of all models to those of the largest client, and average."""
        models, counts = uploads(replies, "model"), count_labels(replies)
        reference = models.client(int(counts.sum(1).argmax()))
        matched = [matching(models.client(k), reference) for k in range(models.clients)]
        return average_models(stack(matched), shares(counts, self.weighting))


def matching(model: Params, reference: Params) -> Params:
    """Return the function of `model` with its hidden neurons in the order of those of the reference."""
    from scipy.optimize import linear_sum_assignment

    def nearest(layer: str, incoming: Tensor) -> Tensor:
        cost = squared_distances(_incoming(reference, layer), incoming)
        return torch.from_numpy(linear_sum_assignment(cost.cpu().numpy())[1]).to(cost.device)

    return reorder(model, nearest)


def reorder(model: Params, order: Order) -> Params:
    """Return the same function with the neurons of every layer but the last in another order."""
    layers = model.layout.layers if model.layout else ()
    matrices = [layer for layer in layers if f"{layer}.weight" in model and model[f"{layer}.weight"].ndim > 1]
    new, places = dict(model), None
    for layer in layers:
        if layer in matrices:
            if places is not None:
                new[f"{layer}.weight"] = _with_inputs(new[f"{layer}.weight"], places)
            places = None if layer == matrices[-1] else order(layer, _incoming(new, layer))
        if places is not None:  # of a norm layer: that of the layer before it
            own = [name for name in new if name.rpartition(".")[0] == layer and new[name].ndim]
            new |= {name: new[name][places] for name in own}
    return Params(new, model.layout)


def _incoming(model: Mapping[str, Tensor], layer: str) -> Tensor:
    """Return one row per neuron: its weights and, if it has one, its bias."""
    rows = model[f"{layer}.weight"].flatten(1)
    return torch.cat([rows, model[f"{layer}.bias"][:, None]], 1) if f"{layer}.bias" in model else rows


def _with_inputs(weight: Tensor, places: Tensor) -> Tensor:
    """Reorder the inputs of weights; each channel may be several inputs, if images were laid flat."""
    if weight.shape[1] % len(places):
        raise ModelError(f"A layer of {len(places)} neurons must come before one with as many inputs or channels.")
    return weight.reshape(len(weight), len(places), -1)[:, places].reshape(weight.shape)


def require_chain(method: object, task: Facts) -> None:
    """Raise unless another order of the hidden neurons leaves the initial model's answer as it is."""
    draw, one = generator(0, "order of neurons"), one_sample(task)

    def shuffle(_: str, incoming: Tensor) -> Tensor:
        return torch.from_numpy(draw.permutation(len(incoming))).to(incoming.device)

    try:
        before = one.outputs(task.network.initial)
        after = one.outputs(reorder(task.network.initial, shuffle))
        torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-5)
    except (ModelError, AssertionError) as error:
        raise ModelError(
            f"{name_in_messages(method)} needs linear and convolutional layers one after the other: another order of "
            "hidden neurons must not change the answers. It changes those of this network.",
            hint="use the models `mlp` or `cnn`; or an ensemble.",
        ) from error
