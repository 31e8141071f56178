"""What messages tell about the items that users know."""

import pytest

from atoll import Task, federate
from atoll.experiments.audit import audit
from atoll.kernel.errors import PrivacyError


def run(method: str, **more: object):
    rows = [(user, (user + 2 * step + step * step) % 23, step) for user in range(12) for step in range(8)]
    table = dict(zip(("user", "item", "time"), map(list, zip(*rows, strict=True)), strict=True))
    return federate(Task.ratings(table, fewest=(3, 1)), method, rounds=1, evaluation="none", progress=False, **more)


@pytest.mark.parametrize("method", ["fedmf", "pfedrec", "gpfedrec", "fedrap"])
def test_a_first_message_names_all_items_and_no_other(method: str) -> None:
    report = audit(run(method), attacks=["labels"])
    assert report.items is not None
    assert (report.items.found, report.items.right) == (1, 1)
    assert report.items.guessing < 0.7
    assert report.figures()["items"]["users"] == 12
    assert report.sentences[0].startswith("First messages give away what users know: by the sign of the biases 100 %")


def test_a_message_of_fcf_names_most_items() -> None:
    """Its vector is solved for, so some errors are small already."""
    report = audit(run("fcf"), attacks=["labels"]).items
    assert report is not None
    assert report.right > 0.9
    assert report.found > 0.5


def test_nothing_is_named_of_who_sends_nothing() -> None:
    report = audit(run("local-items"), attacks=["labels"])
    assert report.items is None
    assert "sends neither a head nor label counts" in report.sentences[0]


def test_secure_sums_hide_messages() -> None:
    with pytest.raises(PrivacyError, match="nobody has single replies"):
        audit(run("fcf", secure="masks:clip=100"), attacks=["labels"])
