"""Personal models of a site, saved for use elsewhere: numbers, and how raw samples become inputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import safetensors.torch

from atoll.deploy.messages import Message
from atoll.deploy.site import Site
from atoll.deploy.work import write_method
from atoll.runtime.files import write_whole


def save_models(site: Site, message: Message, folder: Path) -> dict[str, Path]:
    """Write the model of each of a site's clients; return the files by client."""
    folder.mkdir(parents=True, exist_ok=True)
    received, _ = site.open_result(message)
    own, saved = site.own_task(received), dict[str, Path]()
    for row, (name, model) in enumerate(site.personal_models(message).items()):
        about = {
            "model": received.terms.model, "method": write_method(received.order.method), "client": name,
            "preprocessing": own.preprocessing(row).as_json(),
        }  # fmt: skip
        path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.safetensors"
        leaves = {leaf: value.detach().cpu().clone() for leaf, value in model.items()}
        write_whole(path, safetensors.torch.save(leaves, {"atoll": json.dumps(about)}))
        saved[name] = path
    return saved
