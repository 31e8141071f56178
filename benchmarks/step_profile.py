"""Where the time of a step goes: FAFI's clients on ResNet-18, in several plans, and torch alone beside them.

    python benchmarks/step_profile.py --precision bf16 --seconds 60
    python benchmarks/step_profile.py --precision bf16 --plans 'loop compiled graph channels_last | cudnn combo'

Images are random, so no data set is needed; a step is one batch of 512 in two views, as in the notes' table. For each
plan: milliseconds of a step, seconds of an epoch of 82,695 images, how long the GPU was idle, and its longest kernels.
*torch alone* is the same network by hand, with torch's own BatchNorm and one draw of views for all, and without any
norm: what is left for convolutions. After a bar stand switches of torch: `cudnn` measures which kernel convolves
fastest, `combo` joins small compiled kernels, `layout` has the compiler choose layouts. `--cpu` is a rehearsal with
few images, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import LocalEngine, Task, Training, federate
from atoll.data import augment
from atoll.kernel.randomness import generator
from atoll.models.resnet import ResNet18
from atoll.toolbox.objectives.contrastive import supervised_contrast

EPOCH = 82_695  # images of five clients
PLANS = (
    "loop traced graph channels_last", "loop traced graph channels_last | cudnn",
    "loop compiled graph channels_last | cudnn", "loop compiled graph channels_last",
    "loop compiled graph channels_last | cudnn combo", "loop compiled graph channels_last | cudnn layout",
)  # fmt: skip
SHOWN = 18  # kernels


def images(count: int, batch: int) -> Task:
    """One client with random images; its last batch is short, as those of real clients are."""
    draw = generator(0, "images")
    x = torch.from_numpy(draw.uniform(-1, 1, size=(count, 3, 32, 32))).float()
    training = Training(lr=0.05, momentum=0.9, clip=1.0, batch_size=batch)
    data = {"one": (x.numpy(), draw.integers(10, size=count))}
    task = Task.of_clients(data, ResNet18((3, 32, 32), 10), classes=10, training=training, shares=(1.0, 0.0, 0.0))
    return replace(task, augment=augment.parse("simclr-batch"))


def wait(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def profile(work: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Return the longest kernels of some work, and which share of the time no kernel ran."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    kinds = [ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    with record(activities=kinds) as seen:
        began = time.perf_counter()
        work()
        wait(device)
        took = time.perf_counter() - began
    spans, kernels = [], defaultdict[str, list[float]](list)
    for event in seen.events():
        on_device = str(event.device_type).endswith("CUDA")
        if on_device or device.type != "cuda":
            span = event.time_range
            spans.append((span.start, span.end))
            kernels[event.name].append((span.end - span.start) / 1e3)
    busy, last = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    first = min((start for start, _ in spans), default=0.0)
    length = (last - first) or 1.0
    longest = sorted(kernels.items(), key=lambda pair: -sum(pair[1]))
    total = sum(map(sum, kernels.values())) or 1.0
    return {
        "seconds": round(took, 3),
        "idle": round(1 - busy / length, 3),
        "kernels": [
            {"name": name[:110], "share": round(sum(each) / total, 4), "calls": len(each),
             "us": round(1e3 * sum(each) / len(each), 1)}
            for name, each in longest[:SHOWN]
        ],
        "count": sum(map(len, kernels.values())),
    }  # fmt: skip


@contextmanager
def switched(words: str) -> Iterator[None]:
    """Have torch's switches on that are named."""
    from torch._inductor import config

    names = {"combo": "combo_kernels", "layout": "force_layout_optimization"}
    chosen = {names[word]: True for word in words.split() if word in names}
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = "cudnn" in words.split()
    try:
        with config.patch(**chosen):
            yield
    finally:
        torch.backends.cudnn.benchmark = before


def of_plan(task: Task, plan: str, precision: str, device: torch.device, batch: int, method: str) -> dict[str, Any]:
    """Time whole epochs of a method under a plan, and profile one of them."""
    plan, _, words = plan.partition(" | ")
    with switched(words):
        return {
            **_of_plan(task, plan, precision, device, batch, method),
            "plan": " | ".join(filter(None, [plan, words])),
        }


def _of_plan(task: Task, plan: str, precision: str, device: torch.device, batch: int, method: str) -> dict[str, Any]:
    engine = LocalEngine(device=device.type, precision=precision, strategy=plan)  # type: ignore[arg-type]
    steps = -(-int(task.splits["train"].offsets[-1]) // batch)
    ends = list[float]()

    def on_epoch(*_: int) -> None:
        wait(device)
        ends.append(time.perf_counter())

    def run(epochs: int, folder: str | None = None) -> None:
        federate(
            task, f"{method},epochs={epochs}" if ":" in method else f"{method}:epochs={epochs}", rounds=1,
            engine=engine, evaluation="none", progress=False, on_epoch=on_epoch, trained=folder,
        )  # fmt: skip

    began = time.perf_counter()
    run(1)
    wait(device)
    made = time.perf_counter() - began
    began = time.perf_counter()
    run(4)
    wait(device)
    four = time.perf_counter() - began
    began = time.perf_counter()
    run(1)
    wait(device)
    one = time.perf_counter() - began
    step = (four - one) / (3 * steps)
    found = profile(lambda: run(1), device)
    return {"first": round(made, 1), "ms": round(1e3 * step, 2), "steps": steps, **found}


class Alone(nn.Module):
    """The network as torch has it, with its own norm or none."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.net = ResNet18((3, 32, 32), 10)
        if not norm:
            for part in self.net.modules():
                for name, child in part.named_children():
                    if isinstance(child, nn.BatchNorm2d):
                        setattr(part, name, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.net.features(x)


def of_torch(
    device: torch.device, batch: int, *, norm: bool, compiled: bool, steps: int, words: str = ""
) -> dict[str, Any]:
    """Time a step of torch's own: bf16, channels-last, contrast and classification, foreach SGD."""
    with switched(words):
        found = _of_torch(device, batch, norm=norm, compiled=compiled, steps=steps)
    parts = [
        "torch alone",
        "" if norm else "without norm",
        "compiled" * compiled,
        "graph",
        f"| {words}" if words else "",
    ]
    return {**found, "plan": " ".join(filter(None, parts))}


def _of_torch(device: torch.device, batch: int, *, norm: bool, compiled: bool, steps: int) -> dict[str, Any]:
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    net = Alone(norm=norm).to(device=device, memory_format=torch.channels_last).to(half).train()
    if half is torch.bfloat16:
        for part in net.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.float()
    x = torch.randn(2 * batch, 3, 32, 32, device=device, dtype=half).contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (batch,), device=device).repeat(2)
    rows = torch.randn(10, 512, device=device, requires_grad=True)
    parameters = [*net.parameters(), rows]
    velocity = [torch.zeros_like(one) for one in parameters]

    def step() -> None:
        z = F.normalize(net(x).float(), dim=1)
        loss = F.cross_entropy(z @ rows.T, y) + supervised_contrast(z, y, temperature=0.5).mean()
        g = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        norm_of_all = torch.stack(torch._foreach_norm(g)).float().norm()
        torch._foreach_mul_(g, (1.0 / (norm_of_all + 1e-12)).clamp(max=1.0).to(half))
        with torch.no_grad():
            for v, one, p in zip(velocity, g, parameters, strict=True):
                v.mul_(0.9).add_(one)
                p.sub_(0.05 * v)

    call: Callable[[], None] = torch.compile(step, dynamic=False) if compiled else step
    for _ in range(3):
        call()
    wait(device)
    if device.type == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        call = captured.replay
    wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        call()
    wait(device)
    took = time.perf_counter() - began

    def again() -> None:
        for _ in range(3):
            call()

    return {"ms": round(1e3 * took / steps, 2), "steps": steps, **profile(again, device)}


def show(found: dict[str, Any], batch: int) -> None:
    """Print the figures of one plan."""
    epoch = found["ms"] / 1e3 * EPOCH / batch
    made = f", first run {found['first']} s" if "first" in found else ""
    print(
        f"\n== {found['plan']}: {found['ms']} ms a step, {epoch:.2f} s an epoch, idle {100 * found['idle']:.0f} %{made}"
    )
    for one in found["kernels"]:
        print(f"   {100 * one['share']:5.1f} %  {one['calls']:6d} x {one['us']:9.1f} us  {one['name']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--method", default="fafi:profile=faithful,temperature=0.5")
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--images", type=int, default=32 * 512 + 100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other plan after so many")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch alone")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal: few images on a CPU")
    parser.add_argument("--out", type=Path, help="all figures, as JSON")
    asked = parser.parse_args()
    device = torch.device("cpu" if asked.cpu or not torch.cuda.is_available() else "cuda")
    if asked.cpu:
        asked.images, asked.batch, asked.precision, asked.plans = (
            10,
            4,
            "fp32",
            ["loop traced channels_last | cudnn combo"],
        )
    began, done = time.perf_counter(), list[dict[str, Any]]()
    steps = 2 if asked.cpu else 30
    works: list[Callable[[], dict[str, Any]]] = []
    for norm, words in ((False, ""), (False, "cudnn"), (True, ""), (True, "cudnn")) if not asked.no_torch else ():
        works.append(
            lambda norm=norm, words=words: of_torch(  # type: ignore[misc]
                device, asked.batch, norm=norm, compiled=False, steps=steps, words=words
            )
        )
    task = images(asked.images, asked.batch)
    works += [
        lambda plan=plan: of_plan(task, plan, asked.precision, device, asked.batch, asked.method)  # type: ignore[misc]
        for plan in asked.plans
    ]
    if not asked.no_torch and not asked.cpu:
        works.append(lambda: of_torch(device, asked.batch, norm=True, compiled=True, steps=steps, words="cudnn"))
    for work in works:
        if time.perf_counter() - began > asked.seconds:
            print("no time for more")
            break
        try:
            done.append(work())
            show(done[-1], asked.batch)
        except Exception as error:  # noqa: BLE001 - what one plan cannot do must not hide the others
            print(f"failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(done, indent=1))


if __name__ == "__main__":
    main()
