"""The command line. Data goes to stdout, progress and messages to stderr; heavy imports wait until they are needed.

Exit codes: 0 done, 1 a run or a check failed, 2 bad input, 130 stopped by Ctrl-C or SIGTERM (and resumable).
"""

# Commands are shown in this order.
from atoll.cli import running, choosing, exporting, auditing, looking, data, writing, rounds, deploying  # noqa: I001
from atoll.cli.program import app

__all__ = [
    "app",
    "auditing",
    "choosing",
    "data",
    "deploying",
    "exporting",
    "looking",
    "main",
    "rounds",
    "running",
    "writing",
]


def main() -> None:
    """Run the `atoll` program."""
    app(prog_name="atoll")
