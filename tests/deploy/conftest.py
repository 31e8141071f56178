"""A federation in one process."""

import pytest
from deploy.tools import Rehearsal


@pytest.fixture
def rehearsal(tmp_path):
    return Rehearsal(tmp_path)
