"""What every method must pass, whoever wrote it: `atoll check NAME`, `atoll check ./mine.py`, or from a test.

Each check trains tiny models on six unequal clients in float64, where results are compared bit for bit. One client has
a single sample, one has a single class. A method is made with its default hyperparameters, or with those that are
given (`atoll check ditto:lam=0`, `check(Ditto(lam=0))`). What lasts long by default is played shorter: two
epochs, one round before something else begins, so every part of a method has its turn. Nothing is downloaded.

    for result in check(Ditto):
        print(result.name, result.passed, result.message)

`battery` lists the checks, which are in `determinism`, `sites`, `messages`, `participation`, `models` and
`declarations`. They play a method (`playing`) on one task (`tasks`) in several ways (`engines`), and compare what comes
out (`trees`). Several checks look at the same runs, which are watched and played once for each method (`rehearsal`,
`tries`).

`quadratics` makes tasks whose answers are known in closed form, for the tests that are about one method only; `play`
runs a method on them and `personal_models` reads what came out.
"""

from atoll.testing.conformance.battery import Check, Result, check, checks
from atoll.testing.conformance.errors import ConformanceError
from atoll.testing.conformance.known import Quadratic, quadratics
from atoll.testing.conformance.methods import Method, everything
from atoll.testing.conformance.playing import personal_models, play

__all__ = [
    "Check", "ConformanceError", "Method", "Quadratic", "Result", "check", "checks", "everything",
    "personal_models", "play", "quadratics",
]  # fmt: skip
