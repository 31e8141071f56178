"""The page of the notes' table, in English and Chinese, from the records of `oneshot_notes.py`.

What does not depend on records stands in pages/notes-table.md and pages/notes-table.zh.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published import origins, table
from scipy import stats

PAGES = Path(__file__).parent / "pages"
Records = Mapping[str, dict[str, Any]]
BySeed = dict[int, float]
EPOCHS = (1, 11, 21, 36)  # rounds 0, 10, 20 and 35 of the notes
ALPHAS = (0.5, 0.3, 0.1, 0.05)
LAST = EPOCHS[-1]
ENOUGH = 3  # seeds, below which nothing is decided
NOTES = {  # V4 and V5, as the notes have them
    0.5: ((46.21, 38.13), (76.59, 72.43), (83.47, 80.14), (87.07, 84.70)),
    0.3: ((43.16, 35.29), (74.55, 62.50), (81.92, 72.67), (86.02, 77.99)),
    0.1: ((41.18, 24.22), (70.36, 53.56), (78.39, 64.67), (83.73, 71.17)),
    0.05: ((42.17, 14.17), (70.82, 35.88), (79.11, 44.88), (83.67, 49.92)),
}
LOGS = {  # V4 in the public logs of the same work, with clients that really differ
    0.5: (40.45, 73.66, 81.55, 85.94), 0.3: (30.37, 65.87, 74.30, 80.35), 0.1: (31.32, 54.65, 65.34, 71.66),
    0.05: (28.29, 49.73, 57.84, 64.41),
}  # fmt: skip
EARLIER = {  # single runs before this study, of which no records were kept
    (0.5, "V4"): (41.9, 77.2, 83.1, 87.3), (0.5, "V5"): (38.9, 73.6, 81.5, 86.2),
    (0.05, "V4"): (31.5, 58.5, 67.1, 71.7), (0.05, "V5"): (29.9, 53.9, 61.6, 66.0),
}  # fmt: skip
PLANNED = ("V6", "V6-0.1", "V6-0.4", "V6-light")  # arms whose points depend on how long the whole training is


# -- reading records ---------------------------------------------------------------------------------------------------


def scores(
    records: Records, arm: str, alpha: float, epoch: int, temperature: float = 0.5, name: str = "score",
    total: int | None = None,
) -> BySeed:  # fmt: skip
    """Return the score of every seed after an epoch; of arms that plan ahead, in a training of `total` epochs."""
    found: BySeed = {}
    for record in records.values():
        if (record["arm"], record["alpha"], record["temperature"]) != (arm, alpha, temperature):
            continue
        if arm in PLANNED and total not in (None, record["epochs"]):
            continue
        for point in record["points"]:
            if point["epoch"] == epoch and name in point:
                found[record["seed"]] = float(point[name])
    return found


def last_epoch(records: Records, arm: str, alpha: float, temperature: float = 0.5) -> int | None:
    """Return the length of most trainings of an arm that plans ahead; of two as frequent, the longer."""
    lengths = [
        record["epochs"] for record in records.values()
        if (record["arm"], record["alpha"], record["temperature"]) == (arm, alpha, temperature)
        and record["points"] and record["points"][-1]["epoch"] == record["epochs"]
    ]  # fmt: skip
    return max(set(lengths), key=lambda one: (lengths.count(one), one)) if lengths else None


@dataclass(frozen=True)
class Difference:
    """Differences paired by seed."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, one: BySeed, other: BySeed) -> Difference:
        """Pair the seeds that both have."""
        return cls(tuple(one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())))

    @property
    def seeds(self) -> int:
        """How many pairs there are."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """The mean difference."""
        return math.fsum(self.values) / len(self.values)

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        spread = math.fsum((value - self.mean) ** 2 for value in self.values) / (self.seeds - 1)
        return math.sqrt(spread / self.seeds)

    @property
    def half(self) -> float | None:
        """Half the 95 % t-interval; None of a single pair."""
        return None if self.seeds < 2 else float(stats.t.ppf(0.975, self.seeds - 1)) * self.error

    @property
    def seen(self) -> float | None:
        """The smallest difference that so many seeds find in four cases of five, given how they vary."""
        if self.seeds < 2:
            return None
        reach = stats.t.ppf(0.975, self.seeds - 1) + stats.t.ppf(0.8, self.seeds - 1)
        return float(reach) * self.error

    def __str__(self) -> str:
        if not self.values:
            return "–"
        half = self.half
        return f"{self.mean:+.1f}" + ("" if half is None else f" ± {half:.1f}")


def judge(difference: Difference, sign: int) -> str:
    """Return whether a claim holds that a difference has this sign: of fewer than three seeds nothing is said."""
    if difference.seeds < ENOUGH:
        return "open"
    half = difference.half or 0.0
    if sign * difference.mean - half > 0:
        return "holds"
    return "falls" if sign * difference.mean + half < 0 else "open"


def together(verdicts: Sequence[str]) -> str:
    """Return one word for a claim about several skews: it holds if it holds at all, and falls if it falls at one."""
    if "falls" in verdicts:
        return "falls"
    return "holds" if verdicts and set(verdicts) == {"holds"} else "open"


def between(one: Difference, other: Difference) -> tuple[float, float] | None:
    """Return how much larger one mean is than another of other partitions, and half Welch's 95 % interval."""
    if min(one.seeds, other.seeds) < ENOUGH:
        return None
    parts = [(each.error**2, each.seeds - 1) for each in (one, other)]
    total = sum(part for part, _ in parts)
    freedom = total**2 / sum(part**2 / count for part, count in parts) if total else 1.0
    return one.mean - other.mean, float(stats.t.ppf(0.975, freedom)) * math.sqrt(total)


def mean_of(found: BySeed) -> str:
    """Write a mean over seeds with its 95 % t-interval, and how many seeds it has."""
    if not found:
        return "–"
    values = Difference(tuple(found.values()))
    half = values.half
    return f"{values.mean:.1f}" + ("" if half is None else f" ± {half:.1f}") + f" ({values.seeds})"


# -- words -------------------------------------------------------------------------------------------------------------

WORDS = {
    "holds": ("**holds**", "**成立**"),
    "falls": ("**falls**", "**不成立**"),
    "open": ("not decided", "未定"),
    "epochs": ("epochs", "epoch"),
    "notes V4": ("notes, V4", "笔记 V4"),
    "logs V4": ("their logs, V4", "其日志 V4"),
    "ours V4": ("ours, V4", "我们的 V4"),
    "ours V4-all": ("ours, V4, all samples", "我们的 V4，全部样本"),
    "notes V5": ("notes, V5", "笔记 V5"),
    "ours V5": ("ours, V5", "我们的 V5"),
    "notes gap": ("notes, V5 − V4", "笔记 V5 − V4"),
    "our gap": ("ours, V5 − V4", "我们的 V5 − V4"),
    "arm": ("arm", "方案"),
    "stage": ("first stage", "第一阶段"),
    "score": ("score", "分数"),
    "minus V4": ("minus V4", "减 V4"),
    "minus V5": ("minus V5", "减 V5"),
    "released": ("released profile", "按发布的代码"),
    "inductive": ("one image at a time", "一次一张图片"),
    "running": ("running statistics", "滑动统计量"),
    "claim": ("claim", "论断"),
    "verdict": ("verdict", "结论"),
    "found": ("found (points, 95 % interval, seeds)", "实测（百分点，95 % 区间，种子数）"),
    "power": ("could be seen", "能看出的差异"),
    "skew": ("Dirichlet", "Dirichlet"),
    "block": ("block", "模块"),
    "up to": ("epochs", "epoch"),
}


@dataclass(frozen=True)
class Page:
    """The page in one of two languages."""

    records: Records
    chinese: bool

    def word(self, name: str) -> str:
        """Return a word in the language of the page."""
        return WORDS[name][self.chinese]

    def say(self, english: str, chinese: str) -> str:
        """Return one of two sentences."""
        return chinese if self.chinese else english

    def get(self, arm: str, alpha: float, epoch: int = LAST, **more: Any) -> BySeed:
        """Return the scores of an arm by seed."""
        return scores(self.records, arm, alpha, epoch, **more)

    def gap(self, arm: str, other: str, alpha: float, temperature: float = 0.5) -> Difference:
        """Return an arm minus another after 36 epochs; an arm that plans ahead after its last, with the other there."""
        total = last_epoch(self.records, arm, alpha, temperature) if arm in PLANNED else LAST
        if total is None:
            return Difference(())
        one = self.get(arm, alpha, total, temperature=temperature, total=total)
        return Difference.of(one, self.get(other, alpha, total, temperature=temperature))

    # -- tables --------------------------------------------------------------------------------------------------------
    def notes_table(self, alpha: float) -> str:
        """Write the notes' table for one skew beside ours."""
        names = (
            "epochs",
            "notes V4",
            "logs V4",
            "ours V4",
            "ours V4-all",
            "notes V5",
            "ours V5",
            "notes gap",
            "our gap",
        )
        rows = []
        for place, epoch in enumerate((*EPOCHS, 51)):
            v4, v5 = self.get("V4", alpha, epoch), self.get("V5", alpha, epoch)
            if epoch > LAST:
                if not v4 and not v5:
                    continue
                theirs = ("–", "–", "–", "–")
            else:
                (a, b), logged = NOTES[alpha][place], LOGS[alpha][place]
                theirs = (f"{a:.1f}", f"{logged:.1f}", f"{b:.1f}", f"{b - a:+.1f}")
            rows.append([
                str(epoch), theirs[0], theirs[1], mean_of(v4), mean_of(self.get("V4-all", alpha, epoch)), theirs[2],
                mean_of(v5), theirs[3], str(Difference.of(v5, v4)),
            ])  # fmt: skip
        return table([self.word(name) for name in names], rows)

    def stages_table(self) -> str:
        """Write what two stages come to."""
        rows, light = [], self.say("0.2, contrast 0.1 afterwards", "0.2，之后对比权重 0.1")
        shares = {"V6": "0.2", "V6-0.1": "0.1", "V6-0.4": "0.4", "V6-light": light}
        for alpha in ALPHAS:
            for arm, share in shares.items():
                total = last_epoch(self.records, arm, alpha)
                if total is None:
                    continue
                found = self.get(arm, alpha, total, total=total)
                rows.append([
                    f"{alpha:g}", share, str(total), mean_of(found), str(self.gap(arm, "V4", alpha)),
                    str(self.gap(arm, "V5", alpha)),
                ])  # fmt: skip
        names = ("skew", "stage", "epochs", "score", "minus V4", "minus V5")
        return table([self.word(name) for name in names], rows) if rows else self.nothing()

    def statistics_table(self) -> str:
        """Write how much the statistics of the test batch give."""
        rows = []
        for alpha in ALPHAS:
            for arm in ("V4", "V5", "V6"):
                total = last_epoch(self.records, arm, alpha)
                if total and (released := self.get(arm, alpha, total, total=total)):
                    others = [self.get(arm, alpha, total, total=total, name=name) for name in ("inductive", "running")]
                    rows.append([f"{alpha:g}", arm, mean_of(released), *map(mean_of, others)])
        names = ("skew", "arm", "released", "inductive", "running")
        return table([self.word(name) for name in names], rows) if rows else self.nothing()

    def temperature_table(self) -> str:
        """Write the strongest skew at the temperature that the released code trains with."""
        rows = []
        for arm in ("V4", "V4-all", "V5", "V6"):
            total = last_epoch(self.records, arm, 0.05, 0.07) if arm in PLANNED else LAST
            cold = self.get(arm, 0.05, total or LAST, temperature=0.07, total=total)
            warm = self.get(arm, 0.05, total or LAST, total=total)
            if cold:
                rows.append([arm, mean_of(cold), mean_of(warm), str(Difference.of(cold, warm))])
        heads = [self.word("arm"), "0.07", "0.5", "0.07 − 0.5"]
        return table(heads, rows) if rows else self.nothing()

    def conflict_table(self) -> str:
        """Write the cosines of the two gradients by block of the network and span of epochs."""
        found = [one for one in self.records.values() if one.get("conflict")]
        if not found:
            return self.nothing()
        parts = []
        for record in sorted(found, key=lambda one: (one["alpha"], one["arm"], one["seed"])):
            points = sorted((int(epoch), by_name) for epoch, by_name in record["conflict"].items())
            spans = spans_of(points)
            rows = [[name.removeprefix("conflict/"), *cells] for name, cells in spans]
            before = [0, *(epoch for epoch, _ in points)]
            heads = [f"{first + 1}–{last}" for first, last in itertools.pairwise(before)]
            title = (
                f"**{record['arm'].removesuffix('-conflict')}, Dirichlet {record['alpha']:g}, seed {record['seed']}**"
            )
            parts.append(f"{title}\n\n{table([self.word('block'), *heads], rows)}")
        return "\n\n".join(parts)

    def nothing(self) -> str:
        """Say that there is nothing yet."""
        return self.say("Not run yet.", "尚未运行。")

    # -- claims --------------------------------------------------------------------------------------------------------
    def claims(self) -> str:
        """Write the claims of the notes, each with its verdict."""
        rows = [*self.harm(), self.as_much(), self.skew(), self.gradients(), *self.repair(), *self.queue()]
        return table([self.word(name) for name in ("claim", "verdict", "found", "power")], rows)

    def _row(self, claim: str, verdict: str, found: str, power: str = "–") -> list[str]:
        return [claim, self.word(verdict), found or "–", power]

    def _several(
        self, claim: str, sign: int, find: Callable[[float], Difference], alphas: Sequence[float] = ALPHAS
    ) -> list[str]:
        known = {alpha: one for alpha in alphas if (one := find(alpha)).seeds}
        verdicts = [judge(one, sign) for one in known.values()] if len(known) == len(alphas) else ["open"]
        found = "; ".join(f"{alpha:g}: {one} ({one.seeds})" for alpha, one in known.items())
        power = "; ".join(f"{alpha:g}: {one.seen:.1f}" for alpha, one in known.items() if one.seen is not None)
        return self._row(claim, together(verdicts), found, power or "–")

    def harm(self) -> list[list[str]]:
        """The bank harms: a row for each skew, since it may at one and not at another, one by running statistics."""
        rows = [
            self._several(
                self.say(f"The bank harms (V5 < V4) at {alpha:g}", f"特征库有害（V5 < V4），{alpha:g}"),
                -1, lambda at: self.gap("V5", "V4", at), (alpha,),
            )
            for alpha in ALPHAS
        ]  # fmt: skip
        alone = self.say(
            "The bank harms at 0.05 where no test image sees another (running statistics)",
            "测试图片互不影响时（滑动统计量），特征库在 0.05 有害",
        )
        running = self._several(
            alone, -1, lambda at: Difference.of(*(self.get(arm, at, name="running") for arm in ("V5", "V4"))),
            ALPHAS[-1:],
        )  # fmt: skip
        return [*rows, running]

    def as_much(self) -> list[str]:
        """The bank harms by as much as the notes say."""
        known = {alpha: one for alpha in ALPHAS if (one := self.gap("V5", "V4", alpha)).seeds}
        verdicts, found = [], []
        for alpha, one in known.items():
            theirs = NOTES[alpha][-1][1] - NOTES[alpha][-1][0]
            verdicts.append(
                "open" if one.seeds < ENOUGH else judge(Difference(tuple(v - theirs for v in one.values)), -1)
            )
            found.append(f"{alpha:g}: {one} ({one.seeds}), {self.say('notes', '笔记')} {theirs:+.1f}")
        # Less harm than claimed refutes it; as much does not prove it, but nothing here was claimed beyond that.
        word = "falls" if "falls" in verdicts else "open"
        claim = self.say("It harms by as much as the notes' table says", "危害有笔记表格所说的那么大")
        return self._row(claim, word, "; ".join(found))

    def skew(self) -> list[str]:
        """The harm grows with skew."""
        strong, weak = self.gap("V5", "V4", ALPHAS[-1]), self.gap("V5", "V4", ALPHAS[0])
        found = between(strong, weak)
        claim = self.say("The harm grows with skew: larger at 0.05 than at 0.5", "危害随偏斜增大：0.05 大于 0.5")
        if found is None:
            return self._row(claim, "open", "")
        mean, half = found
        verdict = "holds" if mean + half < 0 else "falls" if mean - half > 0 else "open"
        return self._row(claim, verdict, f"{mean:+.1f} ± {half:.1f} ({strong.seeds}, {weak.seeds})")

    def gradients(self) -> list[str]:
        """The gradients of contrast and classification interfere."""
        claim = self.say(
            "The gradients of the two losses interfere: with the bank, their cosine is below 0 over all layers",
            "两个损失的梯度互相干扰：有特征库时，全部层上的余弦小于 0",
        )
        found = [one for one in self.records.values() if one["arm"] == "V5-conflict" and one.get("conflict")]
        by_seed: BySeed = {}
        for record in (one for one in found if one["alpha"] == ALPHAS[-1]):
            latest = max(record["conflict"], key=int)
            each = record["conflict"][latest]["conflict"]
            by_seed[record["seed"]] = math.fsum(each) / len(each)
        means = Difference(tuple(by_seed.values()))
        if not means.seeds:
            return self._row(claim, "open", "")
        half = "" if means.half is None else f" ± {means.half:.2f}"
        return self._row(claim, judge(means, -1), f"0.05: {means.mean:+.2f}{half} ({means.seeds})")

    def repair(self) -> list[list[str]]:
        """Two stages repair it."""
        better = self.say("Two stages are better than the bank (V6 > V5) at 0.05", "两阶段优于特征库（V6 > V5），0.05")
        all_of_it = self.say(
            "Two stages make up for all of it (V6 ≥ V4, shown as V6 > V4) at 0.05",
            "两阶段完全弥补（V6 ≥ V4，以 V6 > V4 为证），0.05",
        )
        return [
            self._several(better, 1, lambda at: self.gap("V6", "V5", at), ALPHAS[-1:]),
            self._several(all_of_it, 1, lambda at: self.gap("V6", "V4", at), ALPHAS[-1:]),
        ]

    def queue(self) -> list[list[str]]:
        """The blind queue harms."""
        return [
            self._several(
                self.say(f"The blind queue harms at {alpha:g}", f"不看标签的队列有害，{alpha:g}"),
                -1, lambda at: self.gap("queue", "V4", at), (alpha,),
            )
            for alpha in (0.5, 0.05)
        ]  # fmt: skip

    # -- the whole -----------------------------------------------------------------------------------------------------
    @property
    def cost(self) -> str:
        """Say how much was run, where."""
        done = [one for one in self.records.values() if "unfinished" not in one]
        if not done:
            return self.nothing()
        minutes = sum(one["seconds"] for one in done) / 60
        places = origins(done)
        return self.say(
            f"{len(done)} cells, {minutes:.0f} minutes in all (several ran side by side), on {places}.",
            f"共 {len(done)} 个单元，合计 {minutes:.0f} 分钟（有几个是并行的），环境：{places}。",
        )

    def render(self) -> str:
        """Write the page."""
        tables = "\n\n".join(f"### Dirichlet {alpha:g}\n\n{self.notes_table(alpha)}" for alpha in ALPHAS)
        text = (PAGES / f"notes-table{'.zh' if self.chinese else ''}.md").read_text(encoding="utf-8")
        return text.format(
            tables=tables, stages=self.stages_table(), statistics=self.statistics_table(), cost=self.cost,
            temperature=self.temperature_table(), conflict=self.conflict_table(), claims=self.claims(),
            earlier=self.earlier(),
        )  # fmt: skip

    def earlier(self) -> str:
        """Write the single runs that came before this study."""
        rows = [[f"{alpha:g}", arm, *(f"{value:.1f}" for value in values)] for (alpha, arm), values in EARLIER.items()]
        return table([self.word("skew"), self.word("arm"), *map(str, EPOCHS)], rows)


def spans_of(points: Sequence[tuple[int, Mapping[str, Sequence[float]]]]) -> list[tuple[str, list[str]]]:
    """Return the mean cosine of each block between points; what is recorded are means over all epochs so far."""
    names = [*points[-1][1]]
    found = []
    for name in names:
        cells, before, total = [], 0, 0.0
        for epoch, by_name in points:
            each = by_name[name]
            so_far = epoch * math.fsum(each) / len(each)
            cells.append(f"{(so_far - total) / (epoch - before):+.2f}")
            before, total = epoch, so_far
        found.append((name, cells))
    return found


def pages(records: Records) -> dict[str, str]:
    """Return the page in both languages, by where it stands in docs/."""
    return {
        "results/notes-table.md": Page(records, chinese=False).render(),
        "zh/notes-table.md": Page(records, chinese=True).render(),
    }
