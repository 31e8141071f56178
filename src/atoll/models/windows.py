"""Networks for windows of measurements over time, of shape (channels, length).

The GRU is written out, not taken from `nn.GRU`, so the model runs for many clients at once and is traced as others are.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from atoll.kernel.errors import ModelError
from atoll.models.split import BodyAndHead

KERNEL = 5  # places that a convolution sees


class CNN1d(BodyAndHead):
    """Convolutions over time, each with ReLU and pooling by 2, and the mean over what is left of time.

    11,686 parameters on 6x128 with 6 classes.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (32, 64)) -> None:
        channels, _ = window_size("CNN1d", shape, shortest=2 ** len(hidden))
        layers: list[nn.Module] = []
        for wide, narrow in pairwise([channels, *hidden]):
            layers += [nn.Conv1d(wide, narrow, KERNEL, padding=KERNEL // 2), nn.ReLU(), nn.MaxPool1d(2)]
        super().__init__(nn.Sequential(*layers, MeanOverTime()), nn.Linear(hidden[-1], classes))


class MeanOverTime(nn.Module):
    """Average [n, channels, length] over its length."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, channels]."""
        return x.mean(2)


class GRULayer(nn.Module):
    """A gated recurrent unit (Cho et al., 2014) that reads [n, length, width] from the first moment to the last."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 3 * hidden)  # of the reset gate, the update gate and the new state
        self.states = nn.Linear(hidden, 3 * hidden)
        for leaf in self.parameters():
            nn.init.uniform_(leaf, -(hidden**-0.5), hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states after every moment, [n, length, hidden]."""
        if torch.compiler.is_exporting():
            return self._in_one_operation(x)
        given, found = self.inputs(x), []
        state = torch.zeros_like(given[:, 0, : given.shape[2] // 3])
        for moment in given.unbind(1):
            gates, new = moment.split([2 * state.shape[1], state.shape[1]], 1)
            own_gates, own_new = self.states(state).split([2 * state.shape[1], state.shape[1]], 1)
            reset, update = (gates + own_gates).sigmoid().chunk(2, 1)
            state = update * state + (1 - update) * (new + reset * own_new).tanh()
            found.append(state)
        return torch.stack(found, 1)

    def _in_one_operation(self, x: Tensor) -> Tensor:
        """Compute the same by the operation that other runtimes know; it cannot run for many clients at once."""
        start = x.new_zeros(1, x.shape[0], self.states.in_features)
        leaves = [self.inputs.weight, self.states.weight, self.inputs.bias, self.states.bias]
        states: Tensor = torch.gru(
            x, start, leaves, has_biases=True, num_layers=1, dropout=0.0, train=False, bidirectional=False,
            batch_first=True,
        )[0]  # fmt: skip
        return states


class LastState(nn.Module):
    """Read a window moment by moment, layer after layer, and return the last state."""

    def __init__(self, channels: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(GRULayer(width, state) for width, state in pairwise([channels, *hidden])))

    def forward(self, x: Tensor) -> Tensor:
        """Return the state after the last moment of [n, channels, length]."""
        states: Tensor = self.layers(x.transpose(1, 2))
        return states[:, -1]


class GRU(BodyAndHead):
    """Gated recurrent units over time; the head reads the last state.

    14,214 parameters on 6x128 with 6 classes.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (64,)) -> None:
        channels, _ = window_size("GRU", shape, shortest=1)
        super().__init__(LastState(channels, hidden), nn.Linear(hidden[-1], classes))


def window_size(model: str, shape: tuple[int, ...], shortest: int) -> tuple[int, int]:
    """Return `shape` as (channels, length); raise unless it is a window of at least `shortest` moments."""
    if len(shape) != 2 or shape[1] < shortest:
        raise ModelError(
            f"{model} must be given windows of shape (channels, length), at least {shortest} long. Got shape {shape}.",
            hint="use the model `mlp`, which takes any shape.",
        )
    return shape[0], shape[1]
