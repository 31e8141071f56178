"""Commands for sites on a network: deploy keys."""

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.display import out
from atoll.cli.program import app, option
from atoll.kernel.errors import UnknownName

deploy = typer.Typer(no_args_is_help=True, help="Keys and certificates of a federation on a network.")
app.add_typer(deploy, name="deploy")


@deploy.command()
def keys(
    folder: Annotated[Path, option("Folder of the keys; what is there already stays.", "--out", "-o")] = Path("keys"),
    host: Annotated[
        list[str] | None, option("Name or address by which sites reach the server; repeatable.", "--host")
    ] = None,
    site: Annotated[list[str] | None, option("Name of a site; repeatable.", "--site")] = None,
    own: Annotated[
        str | None, option("At a site: make this site's key only. Send the operator its .pub file.", "--own")
    ] = None,
) -> None:
    """Make the keys of a federation: an authority, the server's certificate and a key for each site."""
    from atoll.deploy.flower.certificates import make_keys, make_site_keys

    if own is not None:
        if host or site:
            raise UnknownName("A site makes its own key alone: `--own` must not be given with `--host` or `--site`.")
        made = make_site_keys(folder, own)
    elif not host and not site:
        raise UnknownName(
            "`atoll deploy keys` must know the server's names and the sites. Got neither --host nor --site.",
            hint="for example: atoll deploy keys --host server.example --site Ulm --site Porto",
        )
    else:
        made = make_keys(folder, hosts=host or [], sites=site or [])
    for path in made:
        out().print(str(path), highlight=False, soft_wrap=True)
