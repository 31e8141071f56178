"""The cells of the one-shot tables: which methods, on which tasks, and what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from published import Cell

SERVER_WORDS = (
    "averaging", "batch_statistics", "dynamic", "fusion", "normalise", "of", "own", "own_by", "refine",
    "refine_labels", "weighting",
)  # fmt: skip
TRAINING = {"lr": 0.05, "momentum": 0.9, "clip": 1.0}
ARMS = {  # of the corrected table
    "FAFI, clean": "fafi",
    "public bank, as run (V5)": "fafi-bank",
    "V5 with label mask": "fafi-bank:masked=True",
    "V5 with a random bank": "fafi-bank:pool_from=random",
    "V5 with an image pool": "fafi-bank:pool=images,masked=True,mass=1",
    "two-stage, as proposed (V6)": "fafi-two-stage",
    "label-aware queue": "fafi-queue",
}
CONTROLS = {  # only at the smallest alpha, after the last epoch
    "FAFI, released settings": "fafi:profile=faithful",  # on these data: dealt once, a view per sample, all normalised
    "V5 on FAFI, released settings": "fafi-bank:profile=faithful",
    "bank of an untrained network": "fafi-bank:pool_from=untrained",
    "image pool of noise": "fafi-bank:pool=images,pool_from=noise,masked=True,mass=1",
    "public samples as more to classify": "fafi-bank:pool=labelled",
    "two-stage, as coded": "fafi-two-stage:stages=recurring",
    "label-blind queue": "fafi-queue:queue_same=blind,mass=0",
}
CONFLICTS = {  # the cosine of the gradients of contrast and classification
    "FAFI, clean": "fafi-plus:conflict=measured",
    "V5": "fafi-plus:conflict=measured,pool=features,masked=False,mass=0",
}
SERVERS = {  # all of one training by cross-entropy
    "one-shot FedAvg": "oneshot-avg",
    "ensemble of logits": "ensemble",
    "ensemble of logits, by size": "ensemble:weighting=samples",
    "ensemble of logits, by class": "ensemble:weighting=classes",
    "ensemble of probabilities": "ensemble:of=probs",
    "ensemble of probabilities, by class": "ensemble:of=probs,weighting=classes",
    "FedDF": "oneshot-df",
    "FedDF, probabilities by class": "oneshot-df:of=probs,weighting=classes",
    "fused features, nearest prototype": "oneshot-proto",
    "RGA, class means, moments of public samples": "rga:prototypes=means,moments=public",
    "margins": "oneshot-margins",
    "FedDF, taught by margins": "oneshot-df:of=margins",
}
FRAMES = {  # all of one training to a fixed frame
    "FedETF": "fedetf",
    "RGA": "rga",
    "RGA, moments of public samples": "rga:moments=public",
}
HEADS = {  # on features that no client trains
    "AFL, random features": "afl",
    "AFL, more random features": "afl:width={width}",
    "AFL, features of public samples": "afl:features=public",
    "Gaussian head (FedCGS)": "fedcgs",
    "FedCGS, features of public samples": "fedcgs:features=public",
    "FedPFT": "fedpft",
    "FedPFT, features of public samples": "fedpft:features=public",
}
OTHERS = {
    "CE + SupCon, ensemble of logits": "ce-supcon",
    "CE + SupCon, probabilities by class": "ce-supcon:of=probs,weighting=classes",
    "FAFI, clean": "fafi",
    "FAFI, released settings": "fafi:profile=faithful",
    # Run while shared blocks of ABHS stayed as they were broadcast; today these names mean something else.
    "a model of the public samples alone": "abhs:theta=0,personal=none",
    "former ABHS (A)": "abhs:personal=none",
    "former ABHS, local (B)": "abhs-local:personal=none",
}
TRAININGS = [  # of fafi-plus, the promising first
    "pool=labelled",
    "",
    "contrast=0",
    "prior=restricted",
    "balanced=True",
    "prior=balanced",
    "anchors=etf",
    "pool=anchored",
    "queue=4096",
    "hardness=1",
    "synthetic=True",
    "rarity=0.5",
    "pool=images",
    "pool=means",
    "reference=mmd",
]
ANSWERS = {  # of the clients of one training; the best of all is the one on validation samples
    "fused features": "",
    "half their own": "own=0.5",
    "their own": "own=1",
    "three quarters margins": "own=0.75,own_by=margins",
    "margins": "own=1,own_by=margins",
    "by evidence": "dynamic=True",
}
REFINED = ["refine=200", "pool=labelled,refine=200"]  # with labels of public samples on the server
PUBLIC_WORDS = ("pool", "reference", "refine")  # what needs public samples
NOISE = {"as it is": "fafi", "deterministic kernels": "fafi", "falling step size": "fafi:falling=True"}
REPEATS = 3  # of a cell, all with the first seed
WALK = {  # the options in which the profiles differ, at the values of the clean one; the last four are of servers
    "double_ce": "False", "scale": "16", "normal_start": "False", "temperature": "0.1", "momentum_reset": "False",
    "drop_last": "False", "batch_statistics": "False", "averaging": "owners", "fusion": "iffi", "normalise": "True",
}  # fmt: skip
ABLATION = {  # what margins are made of: all answers of FAFI's clients
    "margins": "fafi/margins",
    "without the common scale": "fafi/margins:common=False",
    "covariance: a multiple of I": "fafi/margins:shrinkage=1",
    "shrinkage 0.01": "fafi/margins:shrinkage=0.01",
    "shrinkage 0.1": "fafi/margins:shrinkage=0.1",
    "shrinkage 0.5": "fafi/margins:shrinkage=0.5",
    "votes by samples of the class": "fafi/margins:voting=classes",
    "all votes alike": "fafi/margins:voting=uniform",
    "no scale, no covariance, votes alike": "fafi/margins:common=False,shrinkage=1,voting=uniform",
    "fused features": "fafi",
    "their own prototypes": "fafi/ensemble",
    "their own prototypes, by class": "fafi/ensemble:of=probs,weighting=classes",
}
RIVALS = {  # margins beside other ways to answer clients of few classes
    "FAFI, released settings": "fafi:profile=faithful",
    "FAFI, clean": "fafi",
    "FAFI's clients, answered by margins": "fafi/margins",
    "FAFI+: three quarters margins": "fafi-plus:own=0.75,own_by=margins",
    "RGA on FAFI's features": "fafi/rga",
    "a student of FAFI's margins": "fafi/feddf:of=margins",
    "FedETF": "fedetf",
    "FedOV": "fedov",
    "FedOV, one client heard": "fedov:heard=1",
    "FedOV, samples as they are": "fedov:augmented=False",
    "ensemble of probabilities": "ensemble:of=probs",
    "ensemble of logits, by class": "ensemble:weighting=classes",
    "ensemble of probabilities, by class": "ensemble:of=probs,weighting=classes",
    "margins": "oneshot-margins",
}
STUDIES = {  # what decides an open question: a pattern of names of cells
    "noise": "noise-",
    "walk": "walk-",
    "ablation": "ablation-",
    "rivals": "rivals-",
    "arms": r"corrected-a(0\.05|0\.3)-e(36|10|2)-",
    "skew": r"corrected-a.*-e(36|10|2)-",
}
STAGES = [f"fafi-two-stage:stage_share={share}{more}" for share in ("0.1", "0.4") for more in ("", ",contrast=0.1")]


def added(*words: str) -> str:
    """fafi-plus with all of this."""
    return ":".join(["fafi-plus", *filter(None, [",".join(filter(None, words))])])


@dataclass(frozen=True)
class Scale:
    """The same experiments for one machine or another."""

    name: str  # in front of its cells' names
    recipe: dict[str, Any]
    batch_size: int
    alphas: tuple[float, ...]  # of the corrected table
    ladder: tuple[float, ...]  # alphas of the others
    epochs: tuple[int, ...]
    short: int  # epochs after which candidates are compared first, and gradients
    seeds: tuple[int, ...]
    width: int  # of more random features
    trainings: tuple[str, ...]
    controls: tuple[str, ...] = tuple(CONTROLS.values())
    normalises: bool = True  # whether the network has BatchNorm
    noise: float | None = None  # 95 % half-width of a difference of two cells that were trained apart; None: no noise
    partitions: tuple[int, ...] = (0, 1, 2, 3, 4)  # seeds of the walk, the arms, the ablation and the rivals

    def cell(self, table: str, alpha: float, method: str, epochs: int | None, seed: int, family: str = "") -> Cell:
        """A cell whose name begins with its table."""
        task = f"{self.name}{table}-a{alpha:g}" + (f"-e{epochs}" if epochs else "")
        words, family = with_epochs(method, epochs), family or family_of(method)
        recipe = {**self.recipe, "partition": f"dirichlet:{alpha:g}"}
        return Cell(task, words, seed, recipe, {**TRAINING, "batch_size": self.batch_size}, {"rounds": 1}, family)

    def cells(self) -> list[Cell]:
        """All of them; the first seed, and there the smallest alpha, comes first."""
        tables = [one for seed in self.seeds for one in (*self._tables(seed), *self._ladder(seed), *self._fusion(seed))]
        settled = [
            one for seed in self.partitions for one in (*self._walk(seed), *self._rivals(seed), *self._arms(seed))
        ]
        return list({one.name: one for one in (*tables, *self._noise(), *settled)}.values())

    def _noise(self) -> list[Cell]:
        """The same cells again and again, each with a training of its own."""
        last, seed = self.epochs[-1], self.seeds[0]
        return [
            self.cell(f"noise-{how.replace(' ', '-')}-{repeat}", alpha, method, last, seed, f"noise {how} {repeat}")
            for alpha in self.alphas
            for how, method in NOISE.items()
            for repeat in range(REPEATS)
        ]

    def _walk(self, seed: int) -> list[Cell]:
        """From FAFI's released settings to the clean profile, one option after another, and one option alone."""
        methods = [*walk(), *singles()]
        return [
            self.cell("walk", self.alphas[0], method, self.epochs[-1], seed, walk_family(method)) for method in methods
        ]

    def _rivals(self, seed: int) -> list[Cell]:
        """The ablation of margins, and margins beside others."""
        last, found = self.epochs[-1], list[Cell]()
        for alpha in self.alphas:
            found += [self.cell("ablation", alpha, one, last, seed, "fafi") for one in ABLATION.values()]
            found += [self.cell("rivals", alpha, one, last, seed, rival_family(one)) for one in RIVALS.values()]
        return found

    def _arms(self, seed: int) -> list[Cell]:
        """The arms of the corrected table after the last epoch, and other stages."""
        arms = [*ARMS.values(), *STAGES]
        return [self.cell("corrected", alpha, arm, self.epochs[-1], seed) for alpha in self.ladder for arm in arms]

    def _tables(self, seed: int) -> list[Cell]:
        """The corrected table, its controls, and the conflict of gradients."""
        found = []
        for alpha in self.alphas:
            found += [self.cell("corrected", alpha, arm, e, seed) for arm in ARMS.values() for e in self.epochs]
            found += [self.cell("conflict", alpha, arm, self.short, seed) for arm in CONFLICTS.values()]
        return found + [self.cell("controls", self.alphas[0], arm, self.epochs[-1], seed) for arm in self.controls]

    def _ladder(self, seed: int) -> list[Cell]:
        """Methods side by side, and what can be added to FAFI."""
        last, found = self.epochs[-1], list[Cell]()
        for alpha in self.ladder:
            found += [self.cell("ladder", alpha, method, last, seed, "cross-entropy") for method in SERVERS.values()]
            found += [self.cell("ladder", alpha, method, last, seed, "frame") for method in FRAMES.values()]
            heads = (method.format(width=self.width) for method in HEADS.values())
            found += [self.cell("ladder", alpha, method, None, seed, "heads") for method in heads]
            found += [self.cell("ladder", alpha, method, last, seed) for method in OTHERS.values()]
            for epochs in sorted({self.short, last}):
                found += [self.cell("candidates", alpha, method, epochs, seed) for method in self.candidates]
        return found

    @property
    def candidates(self) -> list[str]:
        """Every training with every answer, and more; FAFI itself is among them."""
        return [*(added(one, how) for one in self.trainings for how in ANSWERS.values()), *map(added, REFINED)]

    def _fusion(self, seed: int) -> list[Cell]:
        """What a server can make of FAFI's clients."""
        found = []
        for alpha in self.ladder:
            for fusion in ("size", "uniform", "iffi", "iffi_code"):
                for normalise in (False, True):
                    for batch in (False, True) if self.normalises else (False,):
                        how = f"fusion={fusion},normalise={normalise},batch_statistics={batch}"
                        methods = [
                            f"fafi:{how},averaging=all",
                            f"fafi:{how},averaging=owners",
                            f"fafi-plus:{how},dynamic=True",
                        ]
                        found += [self.cell("fusion", alpha, method, self.epochs[-1], seed) for method in methods]
        return found


def family_of(method: str) -> str:
    """What is left of a method's words without those that only its server reads: FAFI, where nothing is."""
    name, _, rest = method.partition(":")
    kept = [word for word in rest.split(",") if word and word.partition("=")[0] not in SERVER_WORDS]
    return ":".join([name, ",".join(kept)]) if kept else name.removesuffix("-plus")


def walk() -> list[str]:
    """FAFI with released settings, then with one more option of the clean profile each: the last is that profile."""
    words = [f"{option}={value}" for option, value in WALK.items()]
    return [",".join(["fafi:profile=faithful", *words[:count]]) for count in range(len(words) + 1)]


def singles() -> list[str]:
    """FAFI with released settings but for one option; the first of them is in the walk."""
    return [f"fafi:profile=faithful,{option}={value}" for option, value in [*WALK.items()][1:]]


def walk_family(method: str) -> str:
    """Those that train alike: what is left without options of servers."""
    return ",".join(word for word in method.split(",") if word.partition("=")[0] not in SERVER_WORDS)


def rival_family(method: str) -> str:
    """Those that train alike."""
    training = method.partition(":")[0].partition("/")[0]
    if training in ("ensemble", "oneshot-margins"):
        return "cross-entropy"
    return family_of(method) if training == "fafi-plus" or "=False" in method or "profile" in method else training


def with_epochs(method: str, epochs: int | None) -> str:
    """`fafi:contrast=2` as `fafi:epochs=36,contrast=2`."""
    name, _, rest = method.partition(":")
    words = [*([f"epochs={epochs}"] if epochs else []), *([rest] if rest else [])]
    return f"{name}:{','.join(words)}" if words else name


COMMON = {"clients": 5, "public": 0.1, "augment": "simclr"}
FULL = Scale(
    name="",
    recipe={**COMMON, "dataset": "cifar10", "model": "resnet18", "split": "95/5/0", "central": "official"},
    batch_size=512,
    alphas=(0.05, 0.1, 0.3, 0.5),
    ladder=(0.05, 0.3),
    epochs=(1, 11, 21, 36),
    short=11,
    seeds=(0, 1, 2),
    width=4096,
    trainings=tuple(TRAININGS),
    noise=7.7,  # by eight repeats of one cell, whose standard deviation is 2.8
)
SMALL = Scale(
    name="small-",
    recipe={
        **COMMON, "dataset": "fashion-mnist", "model": "lenet", "split": "90/10/0", "central": "0.25", "samples": 6000,
    },
    batch_size=64,
    alphas=(0.05, 0.3),
    ladder=(0.05, 0.3),
    epochs=(1, 10),
    short=10,
    seeds=(0, 1, 2),
    width=1000,
    trainings=tuple(TRAININGS),
    controls=(),
    normalises=False,
    partitions=(3, 4, 5, 6, 7),  # on those of seeds 0, 1 and 2 the rule of margins was found
)  # fmt: skip


TINY = Scale(  # to see that everything runs: its figures mean nothing
    name="tiny-",
    recipe={**SMALL.recipe, "samples": 400},
    batch_size=32,
    alphas=(0.3,),
    ladder=(0.3,),
    epochs=(1, 2),
    short=1,
    seeds=(0,),
    width=50,
    trainings=("",),
    controls=(),
    normalises=False,
    partitions=(0, 1),
)


RELEASED = 35.0  # seconds of FAFI's released code for an epoch of these clients on an H200


def speeds() -> list[Cell]:
    """An epoch of FAFI's own clients, who share samples: 82,695 of them in all."""
    recipe = {**FULL.recipe, "partition": "fafi:0.05:1", "public": 0.0, "split": "100/0/0"}
    plans = [
        ("bf16", "compiled channels_last"), ("bf16", "traced channels_last"), ("fp32", "traced"),
        ("fp32", "traced channels_last"), ("fp32", "compiled"), ("tf32", "traced channels_last"),
        ("tf32", "compiled channels_last"),
    ]  # fmt: skip
    return [
        Cell(
            f"speed-{precision}-{words.replace(' ', '-')}", "fafi:epochs=1", 1, recipe,
            {**TRAINING, "batch_size": 512}, {"rounds": 1, "evaluation": "central"}, f"speed {precision} {words}",
        )
        for precision, words in plans
    ]  # fmt: skip
