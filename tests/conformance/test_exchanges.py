"""What a one-shot method may exchange before its only upload: statistics, once."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from atoll import Algorithm, Cohort, Params, Replies, Stack, Update
from atoll.testing.conformance import ConformanceError, checks
from atoll.toolbox.client import sgd
from atoll.toolbox.client.labels import label_counts

upload_once = next(one for one in checks() if one.name == "one-shot-methods-upload-once")


@dataclass(frozen=True, kw_only=True)
class AsksFirst(Algorithm):
    """Averages once, after it asked for label counts."""

    one_shot: ClassVar[bool] = True
    sends: ClassVar[dict[str, str]] = {"delta": "model", "labels": "statistic"}

    def prepare(self, w: Params, cohort: Cohort) -> Update:
        return Update(send={"labels": label_counts(cohort)})

    def absorb(self, w: Params, replies: Replies) -> Params:
        return w

    def local(self, w: Params, cohort: Cohort) -> Update:
        return Update(send={"delta": sgd(cohort, start=w, epochs=1) - w})


@dataclass(frozen=True, kw_only=True)
class AsksTwice(AsksFirst):
    """Does so twice."""

    @property
    def exchanges(self) -> int:
        return 2


@dataclass(frozen=True, kw_only=True)
class AsksForModels(AsksFirst):
    """Asks for models, not for statistics."""

    def prepare(self, w: Params, cohort: Cohort) -> Update:
        return self.local(w, cohort)


@dataclass(frozen=True, kw_only=True)
class SendsBack(AsksFirst):
    """Sends the average back, on which all clients train on."""

    def last_broadcast(self, w: Params) -> Params:
        return w

    def finish(self, w: Params, cohort: Cohort) -> Stack:
        return sgd(cohort, start=w, epochs=1)


def test_a_download_after_the_upload_is_said() -> None:
    assert upload_once.run(SendsBack) == "after an exchange of statistics; with a download after the upload"


def test_one_exchange_of_statistics_is_said() -> None:
    assert upload_once.run(AsksFirst) == "after an exchange of statistics"


@pytest.mark.parametrize(
    ("method", "said"), [(AsksTwice, "must send once up per client"), (AsksForModels, "Models were uploaded")]
)
def test_more_is_refused(method: type[Algorithm], said: str) -> None:
    with pytest.raises(ConformanceError, match=said):
        upload_once.run(method)
