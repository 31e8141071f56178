"""What a method asks of a federation of sites, said before it begins."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.data.task import Task
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import DeployError
from atoll.kernel.params import Structure, Tree, flatten
from atoll.kernel.wrapper import title_of
from atoll.protect.client_level import ClientPrivacy
from atoll.protect.masks import default_threshold
from atoll.protect.secure import parse_secure


def list_demands(method: Algorithm, task: Task, seed: int = 0, settings: Settings | None = None) -> list[str]:
    """Return what is particular about a method at sites, as sentences; raise if it cannot run there."""
    name = title_of(method)
    if method.needs_public_data and task.public is None:
        raise DeployError(
            f"{name} needs data of the server's own, samples that everybody may see. A coordinator with a schema has "
            "none.",
            hint="give a file of such samples, `public`, or choose a method that needs none: `atoll list` says which.",
        )
    server = method.start(task.public_facts(seed))
    found = []
    if method.defines("prepare"):
        found.append(
            f"{name} begins with {method.exchanges} exchange(s) before the first round: that many more messages."
        )
    if method.defines("unicast"):
        found.append(f"{name} sends each site something of its own: there is one message for each.")
    if not method.sums_suffice:
        found.append(f"{name} reads the reply of every single site: sums over sites would not do.")
    if method.reads_validation:
        found.append(f"{name} chooses on validation samples: a site without any is refused.")
    if method.defines("finish"):
        found.append(f"{name} has a last step at the sites, of which nothing is sent.")
    if method.defines("state_for"):
        found.append("At the end every site receives its part of the server's state: there is one message for each.")
    elif holds_rows_of_clients(server, task.clients):
        found.append(f"At the end every site receives the server's state, which in {name} has a row for each client.")
    elif method.one_shot and not method.sums_suffice:
        found.append(
            f"At the end every site receives the server's state, which may hold what {name} got from others: an "
            "ensemble is the models of all."
        )
    return [*found, *_list_protection(settings or Settings())]


def _list_protection(settings: Settings) -> list[str]:
    """Return what the protection of messages asks of sites, and what it leaves open."""
    found = []
    if settings.secure != "none":
        found.append(
            "A sum under masks takes four exchanges a round: keys, shares, the round's work, and shares that unmask it."
        )
    secure = parse_secure(settings.secure)
    if secure is not None and secure.neighbours:
        near = secure.neighbours + 1
        stay = default_threshold(near)
        found.append(
            f"Each client has masks with {near - 1} others: {stay} of these who help the server uncover it, or "
            f"{stay - 1} if the others drop out, and a round in which more than {near - stay} of such a neighbourhood "
            f"of {near} drop out has no sum."
        )
    if isinstance(settings.privacy, ClientPrivacy):
        found.append("The server is trusted with the noise: it reads every message before it adds any.")
    if settings.privacy is not None:
        found.append(
            "Scores that sites send at the end are sums over their own samples, and no promise of privacy covers them."
        )
    return found


def holds_rows_of_clients(server: Tree, clients: int) -> bool:
    """Return whether a server's state, which sites get at the end, has a row for each client."""
    leaves, structure = flatten(server)
    sizes = (leaf.shape[0] if leaf.ndim else 0 for leaf in leaves)
    return any(rows and size == clients for rows, size in zip(_list_rows(structure), sizes, strict=True))


def _list_rows(structure: Structure) -> Iterator[bool]:
    if structure.kind in ("tensor", "rows"):
        yield structure.kind == "rows"
    elif structure.kind in ("params", "stack"):
        yield from (structure.kind == "stack" for _ in structure.names)
    else:
        for part in structure.parts:
            yield from _list_rows(part)
