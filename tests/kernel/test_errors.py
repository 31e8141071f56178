import pickle

import pytest

from atoll.kernel import errors
from atoll.kernel.errors import AtollError, DivergedError, HyperparameterError, unknown


def test_unknown_name_offers_the_nearest_and_lists_all():
    assert str(unknown("algorithm", "dito", ["fedavg", "ditto", "apfl"])) == (
        "Unknown algorithm 'dito'. Did you mean: ditto?\nAvailable: apfl, ditto, fedavg"
    )


def test_unknown_name_without_neighbours_asks_nothing():
    assert str(unknown("model", "xyz", ["mlp", "cnn"])) == "Unknown model 'xyz'.\nAvailable: cnn, mlp"


def test_unknown_name_ignores_case():
    assert "Did you mean: ditto?" in str(unknown("algorithm", "Ditto", ["ditto"]))


def test_hint_is_the_last_line():
    error = HyperparameterError("`lam` must be positive. Got -1 instead.", hint="try 0.1.")
    assert str(error) == "`lam` must be positive. Got -1 instead.\nhint: try 0.1."
    assert error.hint == "try 0.1."


def test_without_hint_the_message_stands_alone():
    assert str(AtollError("no.")) == "no."


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("UnknownName", LookupError),
        ("HyperparameterError", ValueError),
        ("TaskError", ValueError),
        ("PartitionError", ValueError),
        ("ModelError", ValueError),
        ("DataError", ValueError),
        ("DivergedError", ArithmeticError),
        ("RunError", RuntimeError),
        ("CheckpointError", errors.RunError),
        ("OneShotError", ValueError),
        ("PayloadError", ValueError),
        ("EngineError", RuntimeError),
        ("CohortError", ValueError),
    ],
)
def test_each_error_is_also_the_builtin_that_fits(name, builtin):
    kind = getattr(errors, name)
    assert issubclass(kind, AtollError)
    assert issubclass(kind, builtin)
    assert name in errors.__doc__


def test_an_error_crosses_process_boundaries_whole():
    error = DivergedError("loss is nan.", client=7, round=3, hint="lower `lr`.")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (str(copy), copy.client, copy.round) == ("loss is nan.\nhint: lower `lr`.", 7, 3)
