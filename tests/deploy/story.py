"""A federation by file: a coordinator and five hospitals, each in a directory of its own."""

import hashlib
import json
from dataclasses import asdict

import numpy as np

from atoll import Training
from atoll.compose import create
from atoll.data.own import find_schema_of
from atoll.deploy import files, messages
from atoll.deploy.coordinator import seat_sites
from atoll.deploy.keys import Key
from atoll.deploy.messages import MAGIC
from atoll.deploy.schemas import choose_model_for, read_public, task_of_site
from atoll.deploy.site import Site
from atoll.deploy.terms import Terms
from atoll.federation.settings import Settings
from atoll.kernel.randomness import generator

NAMES = ("Ulm", "Porto", "Lund", "Riga", "Graz")


def write_hospital(path, number, samples=40):
    """Invent a hospital's file: in half of the hospitals, pressure has the opposite effect."""
    draw = generator(number, "hospital")
    age, pressure, sex = draw.normal(50, 10, samples), draw.normal(120, 15, samples), draw.integers(2, size=samples)
    risk = (age - 50) / 10 + (pressure - 120) / 15 * (1 if number % 2 else -1) + draw.normal(size=samples)
    rows = ["age,sex,pressure,readmitted"]
    for a, s, p, r in zip(age, sex, pressure, risk, strict=True):
        rows.append(f"{a:.1f},{'FM'[s]},{p:.1f},{'yes' if r > 0 else 'no'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")


class Story:
    """A federation whose files are carried by a test."""

    def __init__(self, folder, method="fedavg", *, rounds=2, names=NAMES[:3], model="mlp:4", public=None, **settings):
        self.folder, self.names = folder, names
        for number, name in enumerate(names):
            write_hospital(folder / name / "my.csv", number)
        schema = find_schema_of(folder / names[0] / "my.csv", target="readmitted")
        self.key, self.keys = Key.make("center"), {name: Key.make(name) for name in names}
        self.terms = Terms(
            name="hospitals", clients=len(names), sites=seat_sites([key.public for key in self.keys.values()]),
            rounds=rounds, training=asdict(Training()), model=model or choose_model_for(schema), form=schema.as_json(),
        )  # fmt: skip
        given = None if public is None else read_public(self.terms, public)
        self.waiting = files.start(
            create(method), self.terms, self.key, self.run, self.out("job"), Settings(**settings), given
        )

    @property
    def run(self):
        return self.folder / "center" / "run"

    def out(self, name):
        return self.folder / "center" / f"{name}.atoll"

    def site(self, name, **more):
        data = self.folder / name / more.pop("data", "my.csv")
        return Site(
            self.keys[name], lambda terms: task_of_site(terms, name, data), self.folder / name / "state", **more
        )

    def job(self, name):
        return messages.read_file(self.waiting.written[name])

    def reply(self, name, **more):
        """Let a site answer what is waited for; return the file."""
        path = self.folder / name / f"reply-{self.waiting.exchange.number}.atoll"
        path.write_bytes(self.site(name, **more).answer_message(self.job(name)))
        return path

    def finish(self, replies, **more):
        out = self.out(f"next-{self.waiting.exchange.number}")
        found, transport = files.finish(self.run, self.key, replies, out, **more)
        if isinstance(found, files.Waiting):
            self.waiting = found
        return found, transport

    def play(self):
        """Play to the end; return the report."""
        while True:
            found, transport = self.finish([self.reply(name) for name in self.names])
            assert not transport.refused
            if not isinstance(found, files.Waiting):
                return found


def forge(data, key=None, *, body=None, **changes):
    """Return a message with other fields in its header, or another body, signed anew if there is a key."""
    length = int.from_bytes(data[8:16], "little")
    header, signature = json.loads(data[16 : 16 + length]), data[16 + length : 80 + length]
    rest = data[80 + length :] if body is None else body
    about = changes.pop("about", {})
    header |= changes | {"about": header["about"] | about}
    if body is not None:
        header |= {"bytes": len(rest), "sha256": hashlib.sha256(rest).hexdigest()}
    if key is not None:
        header |= {"key": key.public.value.hex()}
    text = json.dumps(header, separators=(",", ":")).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + text
    return head + (signature if key is None else key.sign(head)) + rest


def is_in(path, values):
    """Return whether numbers stand in a file, as float32 or float64."""
    data = path.read_bytes()
    return any(np.asarray(values, kind).tobytes() in data for kind in (np.float32, np.float64))
