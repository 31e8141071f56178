"""The program: errors as messages and exit codes, and what all commands have in common."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from atoll.cli.display import listen, out, say
from atoll.kernel.errors import AtollError, CheckpointError, DivergedError, PayloadError

FAILED, BAD_INPUT, STOPPED = 1, 2, 130
FAILURES = (DivergedError, CheckpointError, PayloadError)  # other errors are about what was asked for
RUNS = Path("runs")
FLAGS = {"strategy": "engine", "folder": "out", "dataset": "task"}  # arguments that have another name as flags


class Commands(TyperGroup):
    """Turns errors into messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an error that Atoll raises becomes a message on stderr."""
        try:
            with terminations():
                return super().invoke(ctx)
        except AtollError as error:
            say(f"error: {name_flags(str(error), self.get_command(ctx, ctx.invoked_subcommand))}", style="red")
            failed = isinstance(error, FAILURES) or isinstance(error.__cause__, OSError)
            raise typer.Exit(FAILED if failed else BAD_INPUT) from None
        except KeyboardInterrupt as stop:
            say(str(stop) or "stopped")
            raise typer.Exit(STOPPED) from None


def name_flags(message: str, command: Any) -> str:
    """Replace the arguments that a message names, as `lr` or `device=cpu`, by the flags of a command."""
    several = getattr(command, "commands", None) or {"": command}  # of a group, any of its commands may have spoken
    parameters = [one for inner in several.values() if inner is not None for one in inner.params]
    flags = {flag[2:].replace("-", "_"): flag for one in parameters for flag in one.opts if flag.startswith("--")}
    flags |= {name: flags[other] for name, other in FLAGS.items() if other in flags}

    def replace(match: re.Match[str]) -> str:
        flag = flags.get(match[1])
        return match[0] if flag is None else flag if match[2] is None else f"{flag} {match[2]}"

    def write_flag(match: re.Match[str]) -> str:
        flag, value = flags.get(match[1]), re.sub(r"[\[\]'\" ]", "", match[2])
        return match[0] if flag is None else f"{flag} {value}"

    message = re.sub(r"(?<![\w`])(\w+)=(\[[^\]]*\]|'[^']*')", write_flag, message)  # features=['age', 'sex']
    # The fields of Training are flags, those of a method or a partition are not.
    return re.sub(r"`(\w+)(?:=([^`]+))?`(?: of Training|(?! of [A-Z]))", replace, message)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Personalized and one-shot federated learning on non-IID data: simulate, compare, deploy.",
)


def _say_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        out().print(f"atoll {version('atoll')}", highlight=False)
        raise typer.Exit


def option(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:  # noqa: A002 - typer's word
    """Make an option of the command line."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


VERBOSE = option("Show what the engine chooses, and more.", "--verbose", "-v")
TRUST = option("Run the method's file that the folder names, though you have not run it before.", "--trust")


@app.callback()
def _every_command(
    _version: Annotated[bool, option("Say the version.", "--version", callback=_say_version, is_eager=True)] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    listen(verbose)


@contextmanager
def terminations() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does."""

    def stop(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
