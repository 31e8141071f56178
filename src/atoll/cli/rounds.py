"""Commands for a federation by files: keys, and round start, train, finish, apply, show."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import completion
from atoll.cli.display import present_run, say, show_progress, write, write_paths
from atoll.cli.options import AGGREGATE, COMPRESS, DP_AT_SITES, SECURE_AT_SITES
from atoll.cli.program import FAILED, app, option
from atoll.kernel.errors import DeployError, UnknownName
from atoll.report.table import plain_table

if TYPE_CHECKING:
    from atoll.data.task import Task
    from atoll.deploy.files import Waiting
    from atoll.deploy.keys import Key, PublicKey
    from atoll.deploy.schemas import Reading
    from atoll.deploy.site import Site
    from atoll.deploy.terms import Terms

round_ = typer.Typer(no_args_is_help=True, help="A federation by files: nobody opens a port, people carry files.")
app.add_typer(round_, name="round")

KEY = option("Your key; else the only one in the folder of keys.", "--key")
FOLDER = option("The coordinator's folder: a run, and what is under way.", "--folder")
STATE = option("The site's own folder, where what it keeps stays.", "--state")
DATA = option("The site's own data: a CSV, Parquet or npz file; else that of the round before.", "--data")


def keys_folder() -> Path:
    """Return the folder of keys: $ATOLL_KEYS, else atoll/keys in the user's folder of settings."""
    own = os.environ.get("ATOLL_KEYS")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(own) if own else home / "atoll" / "keys"


@app.command()
def keys(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What you are called in a federation, as north.")],
    folder: Annotated[Path | None, option("Folder of the key; else $ATOLL_KEYS or ~/.config/atoll/keys.", "-o")] = None,
) -> None:
    """Make a key that signs your messages: NAME.key stays with you, NAME.pub is for the others."""
    from atoll.deploy.keys import Key

    secret, public = Key.make(name).save(folder or keys_folder())
    write_paths(secret=secret, public=public)


def find_key(path: Path | None) -> "Key":
    """Read a key, or the only one there is."""
    from atoll.deploy.keys import read_key

    if path is not None:
        return read_key(path)
    found = sorted(keys_folder().glob("*.key"))
    if len(found) != 1:
        there = f"{len(found)} keys are" if found else "No key is"
        raise DeployError(
            f"Messages are signed with a key. {there} in {keys_folder()}.",
            hint="choose one with --key FILE." if found else "make one: `atoll keys NAME`.",
        )
    return read_key(found[0])


@round_.command()
def start(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="As for `run`.", **completion.METHODS)],
    schema: Annotated[Path, option("What the data are; `atoll data schema` writes it.", "--own-schema")],
    sites: Annotated[
        list[str], option("How many sites, or the .pub file of each, or a folder of these; repeatable.", "--sites")
    ],
    output: Annotated[Path, option("The job to be carried to the sites.", "--out", "-o")] = Path("job.atoll"),
    rounds: Annotated[int | None, option("Exchanges with the sites; else 3, or 1 if the method uploads once.")] = None,
    clients: Annotated[
        list[str] | None, option("How many clients a site has, as north=3; else 1. Repeatable.", "--clients")
    ] = None,
    model: Annotated[str | None, option("Network; else as the data need.", **completion.MODELS)] = None,
    seed: Annotated[int, option("Of everything drawn.")] = 0,
    lr: Annotated[float, option("Step size.")] = 0.1,
    batch_size: Annotated[int, option("Samples per step.")] = 10,
    momentum: Annotated[float, option("Of a client's steps.")] = 0.0,
    weight_decay: Annotated[float, option("Pull of all parameters to 0.")] = 0.0,
    lr_decay: Annotated[float, option("Factor on the step size per round, at most 1.")] = 1.0,
    clip: Annotated[float | None, option("Largest norm of a gradient.")] = None,
    compress: Annotated[str, COMPRESS] = "none",
    aggregate: Annotated[str, AGGREGATE] = "mean",
    dp: Annotated[str, DP_AT_SITES] = "none",
    secure: Annotated[str, SECURE_AT_SITES] = "none",
    name: Annotated[str | None, option("What the federation is called; else as the schema's file.")] = None,
    public: Annotated[
        Path | None, option("A file of samples that everybody may see, for methods that need some.", "--public")
    ] = None,
    metric: Annotated[str, option("What clients are judged by, as for `run`; auto: the usual one.")] = "auto",
    folder: Annotated[Path, FOLDER] = Path("federation"),
    key: Annotated[Path | None, KEY] = None,
) -> None:
    """Begin a federation: write the first job. Who coordinates needs no data, a schema only."""
    from dataclasses import asdict

    from atoll.compose import create
    from atoll.data.schema import Schema
    from atoll.deploy import files
    from atoll.deploy.coordinator import seat_sites
    from atoll.deploy.demands import list_demands
    from atoll.deploy.schemas import choose_model_for, read_public, require_for_sites, task_without_data
    from atoll.deploy.terms import Terms
    from atoll.federation.settings import Settings
    from atoll.kernel.task import Training

    algorithm, form = create(method), Schema.load(schema)
    require_for_sites(form)
    training = Training(lr, batch_size, momentum, weight_decay, clip, lr_decay)
    places = seat_sites(_read_sites(sites), _read_clients(clients or []))
    terms = Terms(
        name=name or schema.stem, clients=sum(len(place.clients) for place in places.values()), sites=places,
        rounds=rounds or (1 if algorithm.one_shot else 3), seed=seed, training=asdict(training),
        model=model or choose_model_for(form), form=form.as_json(),
    )  # fmt: skip
    settings = Settings(metric=metric, compress=compress, aggregate=aggregate, dp=dp, secure=secure)
    seen_by_all = None if public is None else read_public(terms, public)
    for demand in list_demands(algorithm, task_without_data(terms, seen_by_all), seed, settings):
        say(demand)
    if not all(place.key for place in places.values()):
        say("Sites are known by number, not by key: whoever replies first for a place has it from then on.")
    waiting = files.start(algorithm, terms, find_key(key), folder, output, settings, seen_by_all)
    _tell(waiting, folder)


def _read_sites(words: list[str]) -> list["PublicKey | str"]:
    from atoll.deploy.keys import read_public

    found: list[PublicKey | str] = []
    for word in words:
        if word.isdigit():
            if len(words) > 1 or not 1 <= int(word) <= 10_000:
                raise UnknownName(
                    f"`--sites` must be one number from 1 to 10000, or public keys. Got {' '.join(words)}."
                )
            return [f"site-{number}" for number in range(1, int(word) + 1)]
        place = Path(word)
        paths = sorted(place.glob("*.pub")) if place.is_dir() else [place]
        if not paths or not all(path.is_file() for path in paths):
            raise UnknownName(
                f"`--sites` must be a number, .pub files, or a folder of these. There is none at {word}.",
                hint="each site makes its key with `atoll keys NAME` and sends NAME.pub.",
            )
        found += [read_public(path) for path in paths]
    return found


def _read_clients(words: list[str]) -> dict[str, int]:
    found = {}
    for word in words:
        site, _, number = word.partition("=")
        if not number.isdigit() or int(number) < 1:
            raise UnknownName(f"`--clients` must be SITE=NUMBER. Got {word!r}.")
        found[site] = int(number)
    return found


def _tell(waiting: "Waiting", folder: Path) -> None:
    """Say what was written, and what is to be done with it."""
    paths = list(dict.fromkeys(waiting.written.values()))
    what, how = ("result", "apply") if waiting.is_result else ("job", "train")
    where = f"`atoll round {how} {paths[0].name}`" if len(paths) == 1 else f"`atoll round {how}` with its own file"
    say(f"Waiting for {', '.join(waiting.missing)}. At each site: {where}; then here: `atoll round finish REPLIES`.")
    write_paths(**{what if len(paths) == 1 else f"{what} {n}": path for n, path in enumerate(paths)}, folder=folder)


def _open_site(
    reading: "Reading", key: Path | None, site: str | None, state: Path, coordinator: Path | None,
    allow: list[Path] | None, on_epoch: Any = None, stop: Any = None,
) -> "Site":  # fmt: skip
    from atoll.deploy.keys import read_public
    from atoll.deploy.site import Site

    def build(terms: "Terms") -> "Task":
        assert here.seat is not None
        return reading.build_task(terms, here.seat)

    here = Site(
        find_key(key), build, state, site=site, allowed=allow or [], on_epoch=on_epoch, stop=stop,
        coordinator=None if coordinator is None else read_public(coordinator).value.hex(),
    )  # fmt: skip
    return here


SITE = option("Which site this is, where the coordinator does not know its key.", "--site")
CLIENT = option("Column that names the client, if the site has several.", "--client")
COORDINATOR = option("The coordinator's .pub file; else the key of the first job is taken.", "--coordinator")
ALLOW = option("A method's file that may run here; repeatable.", "--allow")
GROUP = option("A column, as patient: no group is on both sides of the split.", "--group")
ORDER = option("A column of times: the past trains, the future tests.", "--order")


@round_.command()
def train(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="The coordinator's file.")],
    data: Annotated[Path | None, DATA] = None,
    output: Annotated[Path, option("The reply to be carried back.", "--out", "-o")] = Path("reply.atoll"),
    site: Annotated[str | None, SITE] = None,
    client: Annotated[str | None, CLIENT] = None,
    group: Annotated[str | None, GROUP] = None,
    order: Annotated[str | None, ORDER] = None,
    state: Annotated[Path, STATE] = Path("atoll-site"),
    key: Annotated[Path | None, KEY] = None,
    coordinator: Annotated[Path | None, COORDINATOR] = None,
    allow: Annotated[list[Path] | None, ALLOW] = None,
) -> None:
    """Do the work of a round at a site, on its own data, and write the reply."""
    from atoll.deploy import messages
    from atoll.deploy.schemas import Reading
    from atoll.deploy.store import writing
    from atoll.runtime.files import write_whole
    from atoll.runtime.interruptions import interruptions

    message = messages.read_file(job)
    reading = Reading.find(state, data, client=client, group=group, order=order)
    with show_progress(1) as bar, interruptions(enabled=True) as stop:  # long training is kept, and goes on
        here = _open_site(reading, key, site, state, coordinator, allow, bar.show_epoch, stop)
        received = here.receive(message)
        if received.is_last:
            raise message.refuse("it is the result, and no job", hint=f"`atoll round apply {job}`.")
        reply = here.answer_message(message)
    reading.save(state)
    with writing(output.parent):
        write_whole(output, reply)
    say(f"{len(reply):,} bytes leave this site; `atoll round show {output}` lists them.")
    write_paths(reply=output)


@round_.command()
def finish(
    replies: Annotated[
        list[Path], typer.Argument(metavar="REPLIES...", help="Files of the sites, or folders of them.")
    ],
    output: Annotated[Path, option("What sites need next: a job, or the result.", "--out", "-o")] = Path(
        "result.atoll"
    ),
    without: Annotated[list[str] | None, option("A site that is not waited for; repeatable.", "--without")] = None,
    folder: Annotated[Path, FOLDER] = Path("federation"),
    key: Annotated[Path | None, KEY] = None,
) -> None:
    """Take the replies of the sites; write the next job, or after the last round the result, and then the report."""
    from atoll.deploy import files

    found, transport = files.finish(folder, find_key(key), files.list_replies(replies), output, without or ())
    for reason in transport.refused.values():
        say(f"refused: {reason}", style="yellow")
    if transport.accepted:
        say(f"accepted: {', '.join(transport.accepted)}")
    if isinstance(found, files.Waiting):
        _tell(found, folder)
        if transport.refused and not transport.accepted:
            raise typer.Exit(FAILED)
        return
    present_run(found)


@round_.command()
def apply(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="The coordinator's file.")],
    data: Annotated[Path | None, DATA] = None,
    output: Annotated[Path, option("The scores, to be carried back.", "--out", "-o")] = Path("scores.atoll"),
    models: Annotated[Path, option("Folder of the personal models.", "--models")] = Path("models"),
    form: Annotated[str, option("Of the models: safetensors, onnx or pt2.", "--format")] = "safetensors",
    int8: Annotated[bool, option("Models with weights of 8 bits.", "--int8")] = False,
    site: Annotated[str | None, SITE] = None,
    client: Annotated[str | None, CLIENT] = None,
    group: Annotated[str | None, GROUP] = None,
    order: Annotated[str | None, ORDER] = None,
    state: Annotated[Path, STATE] = Path("atoll-site"),
    key: Annotated[Path | None, KEY] = None,
    coordinator: Annotated[Path | None, COORDINATOR] = None,
    allow: Annotated[list[Path] | None, ALLOW] = None,
) -> None:
    """Make the personal model of a site from the result, score it on the site's own test data, and save it."""
    from atoll.deploy import messages
    from atoll.deploy.models import save_models
    from atoll.deploy.schemas import Reading
    from atoll.deploy.store import writing
    from atoll.runtime.files import write_whole

    message = messages.read_file(result)
    reading = Reading.find(state, data, client=client, group=group, order=order)
    here = _open_site(reading, key, site, state, coordinator, allow)
    received = here.receive(message)
    if not received.is_last:
        raise message.refuse("it is a job, and not the result yet", hint=f"`atoll round train {result}`.")
    reply = here.answer_message(message)
    own = here.own_task(received)
    rows = [
        [own.client_name(row), kind, *(f"{scores[row]:.3f}" for scores in splits.values())]
        for kind, splits in here.read_scores(message, reply).items()
        for row in range(own.clients)
    ]
    write(plain_table(["client", "model", *(f"{split} {received.measure}" for split in ("val", "test"))], rows))
    with writing(output.parent):
        write_whole(output, reply)
        saved = save_models(here, message, models, format=form, int8=int8)
    say(f"{len(reply):,} bytes of scores are for the coordinator; `atoll round show {output}` lists them.")
    write_paths(
        scores=output, **{f"model {name}" if own.clients > 1 else "model": path for name, path in saved.items()}
    )


@round_.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A job, a reply or a result.")],
) -> None:
    """Say in words what is inside a file and what leaves the site, byte for byte."""
    from atoll.deploy import messages
    from atoll.deploy.showing import describe

    contents = describe(messages.read_file(file))
    write(*contents.sentences, "")
    rows = [[line.part, line.holds, f"{line.bytes:,}"] for line in contents.lines]
    write(plain_table(["part", "holds", "bytes"], [*rows, ["all", "", f"{contents.bytes:,}"]]))
