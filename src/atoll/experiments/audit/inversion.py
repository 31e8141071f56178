"""Inversion: samples rebuilt from what clients send.

- `first layer`: the change of a linear layer that reads the samples is a sum of (number) x sample; divided by that of
  its bias it is the sample itself, exactly, if there is one (also after several steps).
- `cosine`: a picture is sought whose update points the same way: 1 - cos(update(x), delta) + tau TV(x), by steps along
  the gradient's sign, boxed; several local steps are differentiated through.
- `features`: a class mean of one sample is the feature of this sample: |f(x) - mean|^2 + tau TV(x), with the model that
  was uploaded beside it.

The attacker knows the model that was sent, the training rule, how many samples and steps there are, and the least and
the greatest value of a sample. Labels are inferred from the head where it is sent. Success means: nearer than the mean
sample of other clients.

References: Zhu, Liu, Han, NeurIPS 2019 (DLG); Geiping, Bauermeister, Droege, Moeller, NeurIPS 2020 (cosine).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from atoll.experiments.audit.labels import estimate_answers, infer_label, infer_shares
from atoll.experiments.audit.measures import psnr, ssim
from atoll.experiments.audit.messages import Message, choose_probes, other_samples, play_message
from atoll.experiments.audit.subject import Subject
from atoll.kernel.batch import Batch
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Params
from atoll.kernel.randomness import generator
from atoll.kernel.task import Training
from atoll.toolbox.client.descent import descend, zero_velocity

Values = NDArray[np.float64]
STEPS, STEP, TV = 500, 0.1, 1e-3


@dataclass(frozen=True)
class Picture:
    """What was rebuilt of one sample."""

    client: str
    attack: str
    samples: int  # that the message was made of
    steps: int  # that the client took
    psnr: float  # dB
    baseline: float  # of the mean sample of other clients
    noise: float  # of noise
    ssim: float | None  # structural similarity; None where samples are no pictures
    label: bool | None  # whether its class was found; None where it was not sought
    found: Values
    true: Values

    @property
    def succeeds(self) -> bool:
        """Whether it is nearer than the mean sample of other clients."""
        return self.psnr > self.baseline


def invert_first_layer(message: Message) -> Tensor | None:
    """Return the one sample of a message from a first linear layer with bias; None where there is none."""
    delta = message.delta
    if delta is None or len(message.rows) != 1:
        return None
    layers = message.network.layout.layers
    weight, bias = (delta.get(f"{layers[0]}.{leaf}") for leaf in ("weight", "bias")) if layers else (None, None)
    if weight is None or bias is None or weight.ndim != 2:
        return None
    row = int(bias.abs().argmax())
    found: Tensor = (weight[row].double() / bias[row].double()).nan_to_num().cpu()
    return found


def follow_steps(network: Network, start: Params, x: Tensor, y: Tensor, training: Training, steps: int) -> Params:
    """Return the change of a model by plain steps on one batch; it can be differentiated by x."""
    first = start.trained
    w, velocity = first.map(lambda leaf: leaf.detach().requires_grad_()), zero_velocity(training, first)
    assert isinstance(velocity, Params)
    for _ in range(steps):
        batch = Batch(x, y, None, None, network, Variant(train=False))
        loss = network.loss(batch.outputs(start | w), y).mean()
        gradients = torch.autograd.grad(loss, [*w.values()], create_graph=True, materialize_grads=True)
        g = Params(dict(zip(w, gradients, strict=True)), w.layout)
        w, velocity = descend(training, w, g, velocity, training.lr)
    return w - first


def variation(x: Tensor) -> Tensor:
    """Return how much neighbouring pixels differ; 0 for samples that are no pictures."""
    if x.ndim < 4:
        return x.new_zeros(())
    down, right = x.diff(dim=-2).abs().mean(), x.diff(dim=-1).abs().mean()
    return down + right


def seek(objective: Callable[[Tensor], Tensor], shape: tuple[int, ...], box: tuple[float, float], seed: int) -> Tensor:
    """Return the samples in a box that make an objective small, by steps along the gradient's sign."""
    low, high = box
    draws = generator(seed, "inversion").random(shape)
    x = (low + (high - low) * torch.from_numpy(draws)).requires_grad_()
    optimiser = torch.optim.Adam([x], lr=STEP * (high - low) / 2)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [STEPS * k // 8 for k in (3, 5, 7)], gamma=0.1)
    best, least = x.detach().clone(), float("inf")
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = objective(x)
        loss.backward()  # type: ignore[no-untyped-call]
        if (now := float(loss.detach())) < least:
            best, least = x.detach().clone(), now
        assert x.grad is not None
        x.grad.sign_()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return best


def invert_update(message: Message, y: Tensor, shape: tuple[int, ...], box: tuple[float, float], seed: int) -> Tensor:
    """Return samples whose update points the same way as a message."""
    delta = message.delta
    assert delta is not None
    network, start = message.network.to(torch.device("cpu"), torch.float64), _double(message.start)
    target = _double(delta).trained
    names = [name for name in target if name in start.trained]
    goal = torch.cat([target[name].flatten() for name in names])

    def objective(x: Tensor) -> Tensor:
        made = follow_steps(network, start, x, y, message.training, message.steps)
        mine = torch.cat([made[name].flatten() for name in names])
        return 1 - torch.nn.functional.cosine_similarity(mine, goal, dim=0) + TV * variation(x)

    return seek(objective, (len(y), *shape), box, seed)


def invert_features(message: Message, shape: tuple[int, ...], box: tuple[float, float], seed: int) -> Tensor | None:
    """Return samples, class by class, whose features are the class means of a message; None where none are sent.

    The model must be sent as well.
    """
    sent = message.fields.get("prototypes")
    if sent is None or "model" not in message.fields:
        return None
    network, model = message.network.to(torch.device("cpu"), torch.float64), _double(message.fields["model"])
    counts = message.fields["labels"]["counts"].cpu() if "labels" in message.fields else None
    mean = sent["mean"].double().cpu()
    there = counts > 0 if counts is not None else mean.abs().sum(1) > 0
    goal = mean[there]

    def objective(x: Tensor) -> Tensor:
        y = torch.zeros(len(x), dtype=torch.int64)
        features = Batch(x, y, None, None, network, Variant(train=False)).features(model)
        return (features - goal).square().sum(1).mean() / goal.square().sum(1).mean() + TV * variation(x)

    return seek(objective, (len(goal), *shape), box, seed)


def _double(params: Params) -> Params:
    return params.map(lambda leaf: leaf.detach().cpu().double() if leaf.is_floating_point() else leaf.detach().cpu())


def invert(subject: Subject) -> list[Picture]:
    """Try to rebuild samples from the first messages of some clients; nothing where no attack applies."""
    box = float(subject.task.x.min()), float(subject.task.x.max())
    shape, pictures = tuple(subject.task.x.shape[1:]), list[Picture]()
    for client, rows in choose_probes(subject):
        message = play_message(subject, client, rows)
        tried: dict[str, tuple[Tensor, bool | None]] = {}
        found = invert_features(message, shape, box, subject.seed)
        if found is not None:
            tried["features"] = found, None
        if message.delta is not None and found is None:  # a long training is not followed step by step
            y, right = _find_labels(subject, message)
            analytic = invert_first_layer(message)
            if analytic is not None and analytic.numel() == int(np.prod(shape)):
                tried["first layer"] = analytic.reshape(1, *shape).clamp(*box), right
            tried["cosine"] = invert_update(message, y, shape, box, subject.seed), right
        for attack, (rebuilt, label) in tried.items():
            pictures += _compare(subject, message, attack, rebuilt, label)
    return pictures


def count_small_classes(subject: Subject) -> list[int] | None:
    """Count the class means of clients that are of one, two and three samples; None where no class means are sent."""
    if "prototypes" not in subject.method.sends:
        return None
    counts = np.concatenate(
        [np.unique(subject.labels(subject.rows("train", int(one))), return_counts=True)[1] for one in subject.clients]
    )
    return [int((counts == size).sum()) for size in (1, 2, 3)]


def _find_labels(subject: Subject, message: Message) -> tuple[Tensor, bool | None]:
    """Return the labels that the attacker works with, and whether they are right; the true ones without a head."""
    true = np.sort(subject.labels(message.rows))
    if len(true) == 1:
        label = infer_label(message)
        found = true if label is None else np.array([label])
        return torch.from_numpy(found), None if label is None else bool(found[0] == true[0])
    shares = infer_shares(message, estimate_answers(subject, message))
    if shares is None:
        return torch.from_numpy(true), None
    rest = shares * len(true)
    found = np.floor(rest).astype(np.int64)
    for place in np.argsort(found - rest, kind="stable")[: len(true) - found.sum()]:  # the largest remainders
        found[place] += 1
    labels = np.repeat(np.arange(len(found)), found)[: len(true)]
    return torch.from_numpy(labels), bool(np.array_equal(labels, true))


def _compare(subject: Subject, message: Message, attack: str, rebuilt: Tensor, label: bool | None) -> list[Picture]:
    """Match rebuilt samples with true ones, each to the one it is nearest to."""
    true = subject.task.x[torch.from_numpy(message.rows)].double().cpu().numpy()
    found, span = rebuilt.double().numpy(), subject.span
    apart = np.square(found[:, None] - true[None]).reshape(len(found), len(true), -1).mean(2)
    average = other_samples(subject, message.client).double().mean(0).cpu().numpy()
    noise = generator(subject.seed, "noise picture").random(true.shape[1:]) * span + float(subject.task.x.min())
    return [
        Picture(
            subject.task.client_name(message.client), attack, len(true), message.steps,
            psnr(found[mine], true[its], span), psnr(average, true[its], span), psnr(noise, true[its], span),
            ssim(found[mine], true[its], span) if true[its].ndim == 3 else None, label,
            found[mine], true[its],
        )
        for mine, its in zip(*linear_sum_assignment(apart), strict=True)
    ]  # fmt: skip
