"""What of a model is shared when a part of it is private."""

from __future__ import annotations

import logging

from atoll.kernel.params import Params, Part

log = logging.getLogger("atoll.toolbox.client")


def say_what_is_shared(method: object, model: Params, private: Part) -> None:
    """Say aloud when a private part leaves all or nothing to share; `all` and `none` say it themselves."""
    name, leaves = type(method).__name__, len(model.part(private))
    if leaves == len(model) and private != "all":
        log.warning(
            "%s shares nothing: %r is the whole model. Every client learns alone: this is Local.", name, private
        )
    if leaves == 0 and private != "none":
        log.warning("%s shares everything: this model has no %r. This is FedAvg.", name, private)
