"""A plan from end to end.

1. Sizes are known from shapes. What each option of each layer damages, what products and forwards cost, and how many
   drafts each drafter gets accepted is measured on the original, once.
2. The best assignment within the budgets is solved for, compressed and measured, again and again: each measurement
   corrects the predictions, one that breaks a budget tightens it, until there are as many that keep all budgets as were
   asked for, the next is predicted to be no better, or the time is up.
3. Those that keep the budgets are timed in turns; measured figures choose among them.
4. The winner's recipe is run once more, whole, into best/; plan.json, plan.md and plan.html say what was found.

Everything that was measured goes into a journal at once, so that the same command goes on after a kill.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from compress.artifact import Artifact
from compress.best import around, candidates, contest, elsewhere, plan
from compress.best.candidates import Measured
from compress.best.contest import ORIGINAL, Way, fastest
from compress.best.costs import Costs
from compress.best.folder import BEST, CANDIDATES, discard, tidy
from compress.best.further import Further, further
from compress.best.journal import Journal
from compress.best.original import drafts_of, know, prompts_of
from compress.best.predict import Known, Predicted, propose, reachable, require_reachable
from compress.best.prepare import Ready, require_own_decoder
from compress.best.question import Question
from compress.best.space import CACHES, OPTIONS, Assignment
from compress.errors import UserError
from compress.report.size import weight_bytes as files_bytes
from compress.report.timing import Work
from runtime import load

if TYPE_CHECKING:
    from compress.remote.runs import Nodes
    from runtime.model.load import Model

# A budget of quality is aimed at a little below, and below what broke it.
_AIM, _BELOW = 0.97, 0.93
# How far the aim is lowered where all that was proposed was measured already.
_LOWERED = (1.0, 0.9, 0.75, 0.6, 0.4, 0.2)
# Of --minutes, the share after which no candidate is begun: the contest and the last run come after.
_SHARE = 0.6
# The next candidate must be predicted within this of the best that keeps all budgets.
_CLOSE = 1.03
_CONTEST_SECONDS = 60.0


class Planner:
    """Works on one question; what it has measured lies in the journal."""

    def __init__(self, asked: Question, ready: Ready, journal: Journal, nodes: "Nodes | None" = None):
        """nodes: of a cluster, on which candidates are compressed, one each; None: here, one after the other."""
        self.nodes = nodes
        self.asked, self.ready, self.inputs, self.journal = asked, ready, ready.inputs, journal
        self.context, self.budgets = asked.context, asked.budgets
        self.assignments: dict[str, Assignment] = {}

    def run(self) -> None:
        """Finds the plan and writes it. Raises UserError where nothing is predicted, or measured, to keep them."""
        original = self._load(self.inputs.target.path)
        require_own_decoder(original)
        draft = None if self.inputs.draft is None else self._load(self.inputs.draft.path)
        known = self._corrected(know(self.asked, self.ready, self.journal, original, draft))
        require_reachable(known, self.budgets, self._damage(known))
        self.journal.begin_search(self.asked.search())
        while not self.journal.search["done"] and (batch := self._next(known)):
            if self.nodes is not None:
                elsewhere.compress_all(batch, known, self.context, self.nodes)
            for one in batch:
                found = self._make(one, known, original)
                self.journal.note(measured={**self.journal.measured, one.key: found.to_dict()})
            known = self._corrected(known)
        self.journal.note(search={**self.journal.search, "done": True})
        kept = [one.key for one in self._measured() if self._broken(one, None) is None]
        if not kept:
            # Of another call with the same budgets there may be more time.
            self.journal.note(search={})
            raise UserError(self._nothing(known))
        ways = self._contest(original, draft, kept)
        self._read_prompts(original, kept)
        winner = self._winner(kept, ways)
        chosen = known.predict(self.assignments[winner])
        self._last_run(chosen)
        self._look_further()
        refused = {
            one.key: broken
            for one in self._measured()
            if (broken := self._broken(one, fastest(ways, one.key) if one.key in kept else None)) is not None
        }
        plan.write(
            plan.Plan(
                model=self.inputs.target.name,
                budgets=self.budgets,
                units=self.ready.units,
                original_bytes=files_bytes(self.inputs.target.path),
                measured=tuple(self._measured()),
                refused=refused,
                ways=tuple(ways),
                first_ms=self.journal.first.get("ms", {}) if self.budgets.ttft is not None else {},
                winner=winner,
                front=around.front(known, self.budgets, chosen.damage),
                prices=around.prices(known, self.budgets, chosen),
                about={
                    "context": self.asked.tokens,
                    "batch": self.asked.batch,
                    "prompt_tokens": self.asked.prompt_tokens,
                    "eval_tokens": self.context.eval_tokens,
                    "damages": self.journal.damages_are,
                    "damage_factor": known.quality.factor,
                    "rest_ms": list(known.costs.rest),
                    "round_ms": list(known.costs.beyond),
                },
                further=tuple(Further.from_dict(one) for one in self.journal.further),
            ),
            self.context.folder,
        )
        self.journal.note(finished=True)

    def _make(self, one: Predicted, known: Known, original: "Model") -> Measured:
        """A candidate's figures, measured here beside the original's."""
        self.context.note(
            f"candidate {len(self.journal.measured) + 1}: {one.disk / 1e6:.2f} MB, predicted "
            f"{self.budgets.shown(one.figure)} and {one.pace.tokens_per_second:.0f} tokens/s"
        )
        folder = self.context.folder / CANDIDATES / one.key
        found = candidates.make(one, known, candidates.Measuring(self.inputs, original), folder)
        broken = self._broken(found, None)
        self.context.note(f"measured: {broken or self.budgets.shown(found.figure(self.budgets))}")
        return found

    def _load(self, path: Path) -> "Model":
        return load(path, threads=self.context.threads)

    def _measured(self) -> list[Measured]:
        return [Measured.from_dict(one) for one in self.journal.measured.values()]

    def _corrected(self, known: Known) -> Known:
        """With the factors that fit what was measured."""
        options = {str(option): option for option in (*OPTIONS, *CACHES)}
        for one in self._measured():
            self.assignments[one.key] = {unit: options[word] for unit, word in one.choice.items()}
        if not self.journal.measured:
            return known
        figures = [(self.assignments[one.key], one.figure(self.budgets)) for one in self._measured()]
        return replace(known, quality=known.quality.fitted(figures))

    def _damage(self, known: Known) -> float | None:
        """The most that damages may sum up to: what the budget of quality means by now, and below whatever broke it."""
        limit = self.budgets.figure_limit
        if limit is None:
            return None
        broke = [
            known.quality.total(self.assignments[one.key])
            for one in self._measured()
            if one.figure(self.budgets) > limit
        ]
        return min([_AIM * limit / known.quality.factor, *(_BELOW * damage for damage in broke)])

    def _next(self, known: Known) -> list[Predicted]:
        """The candidates to make next, as many as there are nodes; none: no more."""
        measured = self._measured()
        kept = [one for one in measured if self._broken(one, None) is None]
        late = self.journal.seconds > 60 * self.asked.minutes * _SHARE
        if len(kept) >= self.asked.wanted or len(measured) >= 3 * self.asked.wanted or (late and measured):
            return []
        damage = self._damage(known)
        found: dict[str, Predicted] = {}
        bar = min((known.predict(self.assignments[one.key]).objective(self.budgets.goal) for one in kept), default=None)
        for lowered in _LOWERED if damage is not None else (1.0,):
            for one in propose(known, self.budgets, None if damage is None else lowered * damage):
                if one.key in self.journal.measured or all(option.keeps for option in one.assignment.values()):
                    continue
                if bar is None or one.objective(self.budgets.goal) <= _CLOSE * bar:
                    found.setdefault(one.key, one)
                if len(found) == (1 if self.nodes is None else self.nodes.count):
                    return list(found.values())
        return list(found.values())

    def _broken(self, one: Measured, way: Way | None) -> str | None:
        """The budget that measured figures break, in words, or None; `way`: how it decodes, where that is known."""
        budgets = self.budgets
        if (limit := budgets.figure_limit) is not None and one.figure(budgets) > limit:
            return f"breaks the budget of quality: {budgets.shown(one.figure(budgets))}"
        if budgets.disk is not None and one.disk > budgets.disk:
            return f"breaks --disk: {one.disk / 1e6:.2f} MB"
        if budgets.memory is not None and one.memory > budgets.memory:
            return f"breaks --memory: {one.memory / 1e6:.2f} MB"
        if budgets.latency is not None and way is not None and way.latency_ms > budgets.latency:
            return f"breaks --latency: {way.latency_ms:.3g} ms a token"
        # What is timed has its prompts read, too.
        if budgets.ttft is not None and way is not None and (spent := self.journal.first["ms"][one.key]) > budgets.ttft:
            return f"breaks --ttft: {spent:.3g} ms to the first token"
        return None

    def _nothing(self, known: Known) -> str:
        """Why nothing was found, with the nearest of what was measured."""
        if not self.journal.measured:
            return (
                "within these budgets the model is best as it is: nothing is to be compressed; each budget within the "
                f"others reaches {reachable(known, self.budgets, self._damage(known))}"
            )
        nearest = min(self._measured(), key=lambda one: one.figure(self.budgets))
        figure = self.budgets.shown(nearest.figure(self.budgets))
        return (
            f"none of {len(self.journal.measured)} candidates keeps the budgets in measurement: the nearest has "
            f"{figure}, {nearest.disk / 1e6:.2f} MB on disk and {nearest.memory / 1e6:.2f} MB in memory: allow more, "
            "or give it more --minutes"
        )

    def _contest(self, original: "Model", draft: "Model | None", kept: list[str]) -> list[Way]:
        if self.journal.timed.get("between") != kept:
            finalists = {key: self._load(self.context.folder / CANDIDATES / key / "model") for key in kept}
            known = {one.key: one for one in self._measured()}
            drafts = drafts_of(self.journal)
            work = Work(
                prompts_of(self.asked, self.inputs, original), self.context.new_tokens, seconds=_CONTEST_SECONDS
            )
            found = contest.hold(
                original,
                finalists,
                draft,
                known,
                drafts,
                Costs.from_dict(self.journal.costs).beyond,
                work,
                self.context.progress,
            )
            self.journal.note(timed={"between": kept, "ways": [asdict(way) for way in found]})
        return [Way(**way) for way in self.journal.timed["ways"]]

    def _read_prompts(self, original: "Model", kept: list[str]) -> None:
        """Times first tokens of the original and the finalists, where they have a budget."""
        between = {"of": kept, "tokens": self.asked.prompt_tokens}
        if self.budgets.ttft is None or self.journal.first.get("between") == between:
            return
        finalists = {key: self._load(self.context.folder / CANDIDATES / key / "model") for key in kept}
        text = self.inputs.text.windows.calibration.flatten().tolist()
        prompt = (text * (1 + self.asked.prompt_tokens // len(text)))[: self.asked.prompt_tokens]
        found = contest.first_tokens({ORIGINAL: original, **finalists}, prompt, self.context.progress)
        self.journal.note(first={"between": between, "ms": found})

    def _winner(self, kept: list[str], ways: list[Way]) -> str:
        """The best by measured figures. Raises UserError where none keeps the budgets of time."""
        measured: Mapping[str, Measured] = {one.key: one for one in self._measured()}
        within = [key for key in kept if self._broken(measured[key], fastest(ways, key)) is None]
        if not within:
            least = []
            if self.budgets.latency is not None:
                least.append(f"{min(fastest(ways, key).latency_ms for key in kept):.3g} ms a token (--latency)")
            if self.budgets.ttft is not None:
                first = self.journal.first["ms"]
                least.append(
                    f"{min(first[key] for key in kept):.3g} ms to the first token (--ttft), the original "
                    f"{first[ORIGINAL]:.3g} ms"
                )
            raise UserError(
                f"none of {len(kept)} candidates that keep the other budgets is fast enough: the fastest took "
                f"{' and '.join(least)}: allow more"
            )
        if self.budgets.goal == "speed":
            return max(within, key=lambda key: fastest(ways, key).tokens_per_second)
        if self.budgets.goal == "size":
            return min(within, key=lambda key: measured[key].disk)
        return min(within, key=lambda key: measured[key].figure(self.budgets))

    def _look_further(self) -> None:
        """What may follow the winner's recipe, once: its times are measured, too."""
        if not self.journal.further:
            from compress.recipe import Recipe

            winner = Recipe.load(self.context.folder / BEST / "recipe.yaml")
            self.journal.note(further=[one.to_dict() for one in further(self.inputs, winner)])

    def _last_run(self, chosen: Predicted) -> None:
        """The winner's run with its whole report, and a check that it has the candidate's weights."""
        from compress.pipeline import run
        from compress.recipe import Recipe

        out = self.context.folder / BEST
        partial = out.with_name(f"{BEST}.partial")
        if self.journal.winner != chosen.key:
            # Of other budgets, which were asked for in this folder before.
            for folder in (out, partial):
                discard(folder)
            self.journal.note(winner=chosen.key, further=[])
        if not (out / "report.json").is_file():
            recipe = Recipe.load(self.context.folder / CANDIDATES / chosen.key / "recipe.yaml")
            run(replace(self.context, recipe=recipe, out=out, resume=candidates.begun(partial)))
        tidy(out)
        before = Artifact(self.context.folder / CANDIDATES / chosen.key).manifest["files"]
        after = Artifact(out).manifest["files"]
        other = [name for name in before if name.startswith("model/") and before[name] != after.get(name)]
        if other:
            raise ValueError(f"best/: {other[0]} is not what was measured: the run gives other bytes a second time")
