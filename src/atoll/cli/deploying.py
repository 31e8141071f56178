"""Commands for sites on a network: server, client, deploy keys."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import completion
from atoll.cli.display import listen, out, present_run, say, show_progress, write, write_paths
from atoll.cli.options import (
    AGGREGATE,
    COMPRESS,
    DP_AT_SITES,
    ENGINE,
    ROUNDS,
    SECURE_AT_SITES,
    STEPS,
    parse_cohort,
    with_options,
)
from atoll.cli.program import RUNS, VERBOSE, app, option
from atoll.kernel.errors import DeployError, UnknownName
from atoll.report.table import plain_table

if TYPE_CHECKING:
    from atoll.deploy.messages import Message
    from atoll.deploy.network import Network
    from atoll.deploy.site import Site
    from atoll.federation.settings import Settings
    from atoll.kernel.task import Training

SITES, NETWORK = ({"panel": name} for name in ("The sites", "The network"))
PORT = 8443
CARRIER = option("What carries messages: flower, or what another package offers.", **NETWORK)
INSECURE = option("Without TLS: everybody on the way can read what travels.", "--insecure", **NETWORK)
ENGINES = option("Clients at once: auto, loop, whole, threads, chunk:N; or a plan.", **ENGINE)


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """The options of `server`, as they are written down for `--resume`."""

    method: Annotated[
        str | None, option("A method, as for `run`: ditto, ditto:lam=0.1, fafi.", **ROUNDS, **completion.METHODS)
    ] = None
    rounds: Annotated[
        int | None, option("Exchanges with the sites; else 30, or 1 if the method uploads once.", **ROUNDS)
    ] = None
    seed: Annotated[int, option("Of everything drawn.", **ROUNDS)] = 0
    cohort: Annotated[str | None, option("Clients per round: a number, or a share as 0.1; else all.", **ROUNDS)] = None
    eval_every: Annotated[int | None, option("Rounds between evaluations; else a tenth.", min=1, **ROUNDS)] = None
    metric: Annotated[str, option("What clients are judged by, as for `run`; auto: the usual one.", **ROUNDS)] = "auto"
    own_schema: Annotated[
        Path | None, option("What all sites' columns are, written by `atoll data schema`.", **SITES)
    ] = None
    public: Annotated[
        Path | None, option("A file of samples that everybody may see, for methods that need some.", **SITES)
    ] = None
    name: Annotated[str | None, option("What the data are called; else as the schema's file.", **SITES)] = None
    model: Annotated[
        str | None, option("Network, see `atoll list models`; else the usual one.", **SITES, **completion.MODELS)
    ] = None
    sites: Annotated[int | None, option("Begin as soon as so many have joined; else all with a key.", **SITES)] = None
    wait: Annotated[float, option("Seconds to wait for sites before the first round.", **SITES)] = 600.0
    timeout: Annotated[float, option("Seconds after which a site's reply is too late.", **SITES)] = 3600.0
    grace: Annotated[float, option("Seconds that a round waits for a site that is not connected.", **SITES)] = 60.0
    lr: Annotated[float, option("Step size.", **STEPS)] = 0.1
    batch_size: Annotated[int, option("Samples per step.", **STEPS)] = 10
    momentum: Annotated[float, option("Of a client's steps.", **STEPS)] = 0.0
    weight_decay: Annotated[float, option("Pull of all parameters to 0.", **STEPS)] = 0.0
    lr_decay: Annotated[float, option("Factor on the step size per round, at most 1.", **STEPS)] = 1.0
    clip: Annotated[float | None, option("Largest norm of a gradient.", **STEPS)] = None
    compress: Annotated[str, COMPRESS] = "none"
    aggregate: Annotated[str, AGGREGATE] = "mean"
    dp: Annotated[str, DP_AT_SITES] = "none"
    secure: Annotated[str, SECURE_AT_SITES] = "none"
    keys: Annotated[Path, option("The server's folder of `atoll deploy keys`.", **NETWORK)] = Path("keys/server")
    listen: Annotated[str, option("Address and port to listen at.", **NETWORK)] = f"0.0.0.0:{PORT}"
    network: Annotated[str, CARRIER] = "flower"
    insecure: Annotated[bool, INSECURE] = False
    device: Annotated[str, option("auto, cpu, cuda or mps.", **ENGINE, **completion.WHERE)] = "auto"

    def training(self) -> "Training":
        """Return how clients take their steps."""
        from atoll.kernel.task import Training

        names = ("lr", "batch_size", "momentum", "weight_decay", "lr_decay", "clip")
        return Training(**{name: getattr(self, name) for name in names})

    def agree(self, rounds: int) -> dict[str, Any]:
        """Return what sites must agree on, whoever they are: the words of `Terms`."""
        from atoll.data.schema import Schema
        from atoll.deploy.schemas import choose_model_for, require_for_sites

        if self.own_schema is None:
            raise UnknownName(
                "A server has no data: it must be given what the sites' columns are, --own-schema FILE.",
                hint="a site writes it with `atoll data schema FILE --target COLUMN`; no sample is in it.",
            )
        schema = Schema.load(self.own_schema)
        require_for_sites(schema)
        return {
            "name": self.name or self.own_schema.stem, "rounds": rounds, "seed": self.seed,
            "training": dataclasses.asdict(self.training()), "model": self.model or choose_model_for(schema),
            "form": schema.as_json(),
        }  # fmt: skip

    def settings(self, rounds: int) -> "Settings":
        """Return the settings of the federation."""
        from atoll.federation.settings import Settings

        return Settings(
            rounds=rounds, seed=self.seed, cohort=parse_cohort(self.cohort), eval_every=self.eval_every,
            metric=self.metric, compress=self.compress, aggregate=self.aggregate, dp=self.dp, secure=self.secure,
        )  # fmt: skip


@app.command()
@with_options
def server(
    resume: Annotated[bool, option("Go on with the run in --out after the server ended.", "--resume")] = False,
    out: Annotated[Path | None, option("Folder of the results; else one in runs/.")] = None,
    verbose: Annotated[bool, VERBOSE] = False,
    *,
    options: ServerOptions,
) -> None:
    """Federate sites on a network: wait for them, run a method with them, and report; it needs no data."""
    from atoll.cli.running import unused_folder
    from atoll.compose import create
    from atoll.deploy.certificates import ServerKeys
    from atoll.deploy.demands import list_demands
    from atoll.deploy.protection import require_for_sites
    from atoll.deploy.schemas import read_public, task_without_data
    from atoll.deploy.server import Patience, begin, read_begun, serve
    from atoll.deploy.terms import Place, Terms
    from atoll.records.runs import now
    from atoll.runtime.engines.local import LocalEngine
    from atoll.runtime.installed import NETWORKS, load_installed

    follow(verbose)
    network: Network = load_installed(NETWORKS, options.network)
    keys = ServerKeys.read(options.keys)
    patience = Patience(join=options.wait, reply=options.timeout, grace=options.grace)
    if resume:
        if out is None:
            raise UnknownName("`--resume` must come with `--out`, the folder of the run to go on with.")
        folder, begun = out, read_begun(out, keys)
        method, rounds = str(begun.method["name"]), begun.terms.rounds
    else:
        if options.method is None:
            raise UnknownName("A server must know what to run: --method NAME.", hint="`atoll list` shows the methods.")
        method, algorithm = options.method, create(options.method)
        rounds = options.rounds or (1 if algorithm.one_shot else 30)
        words = options.agree(rounds)
        folder = out or unused_folder(RUNS / f"{words['name']}-{method.replace('/', '-')}-{now()}")

        def write_terms(places: Mapping[str, Place]) -> Terms:
            return Terms(clients=sum(len(place.clients) for place in places.values()), sites=dict(places), **words)

        settings = options.settings(rounds)
        require_for_sites(settings, algorithm)
        seats = {site: Place(clients=[number]) for number, site in enumerate(keys.members)}
        terms = write_terms(seats)
        public = None if options.public is None else read_public(terms, options.public)
        there = task_without_data(terms, public)
        for demand in list_demands(algorithm, there, options.seed, settings):
            say(demand)
        # with a client each; once sites have joined, everything is checked with those that they have
        dataclasses.replace(settings, cohort=None).check(there, algorithm)
    nodes = {site: member.node for site, member in keys.members.items()}
    try:
        certificate = None if options.insecure else keys.certificate
        with network.listen(_read_address(options.listen), nodes, certificate) as link:
            say(f"listening at {link.host}:{link.port}{', without TLS' if options.insecure else ''}")
            say(f"run: {folder}")
            if not resume:
                begin(
                    link, keys, algorithm, settings, write_terms, folder, question={"terms": words},
                    sites=options.sites, patience=patience, public=public,
                )  # fmt: skip
            with show_progress(rounds) as bar:
                engine = LocalEngine(device=options.device)
                report = serve(link, keys, folder, patience=patience, engine=engine, on_round=bar.begin(method))
    except KeyboardInterrupt:
        begun_here = (folder / "federation.json").exists()
        how = f"; go on with `atoll server --resume --out {folder}` and the same --keys and --listen"
        raise KeyboardInterrupt(f"stopped{how if begun_here else ''}") from None
    present_run(report)


@app.command()
def client(
    server: Annotated[str, option("The server: HOST, or HOST:PORT.", **NETWORK)],
    data: Annotated[Path, option("This site's own data: a CSV, Parquet or npz file.", **SITES)],
    state: Annotated[Path, option("Folder of what this site keeps; back it up.", **SITES)],
    keys: Annotated[Path, option("This site's folder of `atoll deploy keys`.", **NETWORK)] = Path("keys"),
    client_column: Annotated[str | None, option("The column that names the client.", "--client", **SITES)] = None,
    split: Annotated[str, option("Per cent of a client's samples: train/val/test.", **SITES)] = "60/15/25",
    min_samples: Annotated[int, option("The fewest samples of a client.", min=1, **SITES)] = 2,
    group: Annotated[
        str | None, option("A column, as patient: no group is on both sides of the split.", **SITES)
    ] = None,
    order: Annotated[str | None, option("A column of times: the past trains, the future tests.", **SITES)] = None,
    allow: Annotated[list[Path] | None, option("A method's file that may run here; repeatable.", **SITES)] = None,
    stay: Annotated[bool, option("Take part in one federation after another.", "--stay", **SITES)] = False,
    network: Annotated[str, CARRIER] = "flower",
    insecure: Annotated[bool, INSECURE] = False,
    engine: Annotated[str, ENGINES] = "auto",
    compile_: Annotated[bool | None, option("Else if it pays.", "--compile/--no-compile", **ENGINE)] = None,
    device: Annotated[str, option("auto, cpu, cuda or mps.", **ENGINE, **completion.WHERE)] = "auto",
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Take part in a federation with this site's data, which stay here, as do the personal models."""
    from atoll.data.recipe import shares_of
    from atoll.data.task import Task
    from atoll.deploy.certificates import SiteKeys
    from atoll.deploy.client import Attendant
    from atoll.deploy.schemas import task_of_site
    from atoll.deploy.site import Site
    from atoll.deploy.terms import Place, Terms
    from atoll.runtime.engines.local import LocalEngine
    from atoll.runtime.files import alone_in
    from atoll.runtime.installed import NETWORKS, load_installed

    follow(verbose)
    carrier: Network = load_installed(NETWORKS, network)
    mine, shares = SiteKeys.read(keys), shares_of(split)
    name = mine.key.name
    if not data.exists():
        raise UnknownName(f"`--data` must be a file. There is no {data}.")
    if not insecure and not mine.authority.is_file():
        raise DeployError(
            f"A site knows its server by the certificate of an authority. There is no {mine.authority}.",
            hint="the operator sends ca.crt with the site's keys, or by itself.",
        )

    def build_task(terms: Terms) -> Task:
        reading: dict[str, Any] = {"shares": shares, "min_samples": min_samples, "group": group, "order": order}
        return task_of_site(terms, name, data, client=client_column, **reading)

    def count_clients(question: Mapping[str, Any]) -> int:
        alone = {name: Place(clients=[0]).as_json()}
        return build_task(Terms.of_json({**question["terms"], "clients": 1, "sites": alone})).clients

    site = Site(
        mine.key, build_task, state, site=name, allowed=allow or (),
        coordinator=None if mine.coordinator is None else mine.coordinator.value.hex(),
        engine=LocalEngine(strategy=engine, compile=compile_, device=device),
    )  # fmt: skip
    address = server if server.rpartition(":")[2].isdigit() else f"{server}:{PORT}"
    node = carrier.connect(address, mine.node, None if insecure else mine.authority)
    state.mkdir(parents=True, exist_ok=True)
    with alone_in(state):
        attendant = Attendant(
            mine.key, site, count_clients, lambda message, reply: keep_result(site, message, reply, state), stay=stay
        )
        attendant.attend(node)


def keep_result(site: "Site", message: "Message", reply: bytes, state: Path) -> None:
    """Save the personal models of a federation that is over, and show their scores."""
    from atoll.deploy.models import save_models

    received = site.receive(message)
    own = site.own_task(received)
    scores = site.read_scores(message, reply)
    rows = [
        [own.client_name(row), kind, *(f"{found[row]:.3f}" for found in splits.values())]
        for kind, splits in scores.items()
        for row in range(own.clients)
    ]
    saved = save_models(site, message, state / "models" / message.header.federation)
    write("", plain_table(["client", "model", *(f"{split} {received.measure}" for split in ("val", "test"))], rows))
    write_paths(**{f"model {name}" if own.clients > 1 else "model": path for name, path in saved.items()})


def follow(verbose: bool) -> None:
    """Show who joins, replies and is lost; with `verbose`, everything."""
    listen(verbose=True)
    if not verbose:
        logging.getLogger("atoll").setLevel(logging.WARNING)
        logging.getLogger("atoll.deploy").setLevel(logging.INFO)


def _read_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UnknownName(f"`--listen` must be HOST:PORT. Got {text!r}.", hint=f"for example 0.0.0.0:{PORT}.")
    return host.strip("[]"), int(port)


deploy = typer.Typer(no_args_is_help=True, help="Keys and certificates of a federation on a network.")
app.add_typer(deploy, name="deploy")


@deploy.command("keys")
def make_keys(
    folder: Annotated[Path, option("Folder of the keys; what is there already stays.", "--out", "-o")] = Path("keys"),
    host: Annotated[
        list[str] | None, option("Name or address by which sites reach the server; repeatable.", "--host")
    ] = None,
    site: Annotated[list[str] | None, option("Name of a site; repeatable.", "--site")] = None,
    own: Annotated[
        str | None, option("At a site: make this site's keys only. Send the operator its .pub file.", "--own")
    ] = None,
) -> None:
    """Make the keys of a federation: an authority, the server's certificate and keys for each site."""
    from atoll.deploy import certificates

    if own is not None:
        if host or site:
            raise UnknownName("A site makes its own keys alone: `--own` must not be given with `--host` or `--site`.")
        made = certificates.make_site_keys(folder, own)
    elif not host and not site:
        raise UnknownName(
            "`atoll deploy keys` must know the server's names and the sites. Got neither --host nor --site.",
            hint="for example: atoll deploy keys --host server.example --site Ulm --site Porto",
        )
    else:
        made = certificates.make_keys(folder, hosts=host or [], sites=site or [])
    for path in made:
        out().print(str(path), highlight=False, soft_wrap=True)
