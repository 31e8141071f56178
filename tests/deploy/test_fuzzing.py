"""Damaged and crafted messages: none is accepted that was changed, no error but a refusal, memory bounded."""

import pytest
from deploy.tools import Rehearsal

from atoll.compose import create
from atoll.deploy import messages
from atoll.testing.fuzzing import Probing, fuzz


def require_refused(found, tried):
    assert found.tried > 0.9 * tried
    assert found.accepted == 0
    assert not found.errors, found.errors[:5]
    assert found.grown < 300 * 2**20


@pytest.mark.parametrize("method", ["scaffold", "fedamp"])
def test_nobody_breaks_on_any_message(tmp_path, method) -> None:
    sites = Rehearsal(tmp_path, rounds=1)
    probing = Probing(sites.sites, sites.keys, count=150)
    jobs = []

    class Listening(Probing):
        def exchange(self, asked, exchange):
            jobs.extend(asked.values())
            yield from super().exchange(asked, exchange)

    probing = Listening(sites.sites, sites.keys, count=150)
    report = sites.run(create(method), transport=probing, evaluation="all")
    assert report.finished
    assert len(probing.found) == 2  # the round, and the result
    for found in probing.found:
        require_refused(found, 150)
    site = sites.site("site-0")
    site.folder = tmp_path / "anew"
    require_refused(fuzz(jobs[:1], sites.key, lambda data: site.receive(messages.read(data)), 200), 200)
