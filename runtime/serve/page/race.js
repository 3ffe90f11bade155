// Race: the same prompt with and without speculation, in turns on one engine, each with its clock.

import { AskError, stream } from "./api.js";
import { busy, field, h, number, say } from "./dom.js";
import { Counts } from "./tokens.js";

const LANES = [
  { key: "plain", title: "Without speculation" },
  { key: "drafted", title: "With speculation" },
];

// As the engine counts a round in which the machine was elsewhere when it chooses the draft length.
const OUTLIER = 1.5;

/** The middle of some numbers; null of none. */
export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/** One text of one lane: what it gained, and its rounds after the prompt's. */
export class Lap {
  constructor() {
    this.counts = new Counts();
    this.ids = [];
    this.rounds = [];
    this.text = "";
  }

  add(event) {
    const choice = event.choices[0];
    if (!choice) return;
    this.text += choice.text;
    for (const round of choice.specpress?.rounds || []) {
      const before = this.counts.rounds;
      this.counts.add(round);
      this.ids.push(...round.gained);
      if (this.counts.rounds > before) this.rounds.push(round);
    }
  }

  /** Tokens a second of the engine's time, the prompt's left out. A round counts as OUTLIER usual ones at most. */
  get speed() {
    const groups = new Map();
    for (const round of this.rounds) {
      const width = round.drafted.length;
      groups.set(width, [...(groups.get(width) || []), round.ms]);
    }
    let spent = 0;
    for (const times of groups.values()) {
      const most = OUTLIER * median(times);
      for (const time of times) spent += Math.min(time, most);
    }
    return spent ? (1000 * this.counts.gained) / spent : null;
  }
}

/** τ / (γc + v) by these laps' middle costs over a plain step: c of a drafted token, v of a forward by its width. */
export function predicted(plain, drafted) {
  const step = median(plain.flatMap((lap) => lap.rounds.map((round) => round.ms)));
  const rounds = drafted.flatMap((lap) => lap.rounds);
  if (!step || !rounds.length) return null;
  const drafting = rounds.filter((round) => round.drafted.length);
  const c = median(drafting.map((round) => round.draft_ms / round.drafted.length)) ?? 0;
  const byWidth = new Map();
  for (const round of rounds) {
    const width = round.drafted.length;
    byWidth.set(width, [...(byWidth.get(width) || []), round.ms - round.draft_ms]);
  }
  let v = 0;
  for (const times of byWidth.values()) v += (times.length * median(times)) / rounds.length;
  const tau = rounds.reduce((sum, round) => sum + round.gained.length, 0) / rounds.length;
  const gamma = rounds.reduce((sum, round) => sum + round.drafted.length, 0) / rounds.length;
  return (tau * step) / (gamma * c + v);
}

/** How many tokens of two texts differ, place by place. */
export function different(a, b) {
  let count = Math.abs(a.length - b.length);
  for (let place = 0; place < Math.min(a.length, b.length); place += 1) count += a[place] !== b[place];
  return count;
}

/** `<sp-race>` */
export class Race extends HTMLElement {
  connect(state) {
    this.state = state;
    this.prompt = h("textarea", { rows: 4, spellcheck: "false" });
    this.prompt.value = "class Matrix:\n    def __init__(self, rows, columns):\n";
    this.most = h("input", { type: "number", min: 2, step: 1, value: 192 });
    this.turns = h("input", { type: "number", min: 1, max: 20, step: 1, value: 3 });
    this.temperature = h("input", { type: "number", min: 0, max: 100, step: "any", value: 0 });
    this.length = h("input", { type: "number", min: 0, max: 64, step: 1, placeholder: "what pays" });
    this.drafter = h("select", {});
    this.go = h("button", { type: "button", class: "main", onclick: () => this.run() }, "Race");
    this.stop = h("button", { type: "button", disabled: true, onclick: () => this.controller?.abort() }, "Stop");
    this.notice = h("sp-notice");
    this.result = h("p", { class: "result", role: "status" });
    this.figures = h("p", { class: "why" });
    this.lanes = Object.fromEntries(LANES.map(({ key, title }) => [key, this.lane(title)]));
    this.table = h("div", { class: "scroll", role: "region", "aria-label": "Turns", tabindex: "0" });
    this.table.hidden = true;
    this.append(
      h(
        "div",
        { class: "view" },
        h("h1", {}, "Race"),
        h(
          "p",
          { class: "empty" },
          "One engine writes the same text without and with drafts, in turns. The clocks show the engine's own time.",
        ),
        field("Prompt", this.prompt),
        h(
          "div",
          { class: "filters" },
          field("Max tokens", this.most),
          field("Turns", this.turns),
          field("Drafter", this.drafter),
          field("Draft length", this.length),
          field("Temperature", this.temperature),
        ),
        h("div", { class: "buttons" }, this.go, this.stop),
        this.notice,
        h("div", { class: "pair lanes" }, ...Object.values(this.lanes).map((lane) => lane.node)),
        this.result,
        this.figures,
        this.table,
      ),
    );
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run();
    });
    const fit = () => {
      const names = state.about.drafters.filter((name) => name !== "none" && name !== "prediction");
      this.drafter.replaceChildren(...names.map((name) => h("option", {}, name)));
    };
    state.addEventListener("model", fit);
    fit();
  }

  lane(title) {
    const clock = h("span", { class: "clock" }, "0 ms");
    const speed = h("span", { class: "empty" }, "");
    const bar = h("progress", { max: 1, value: 0, "aria-label": `${title}: tokens written` });
    const text = h("pre", { tabindex: "0", "aria-label": `${title}: text` });
    const node = h(
      "section",
      { class: "lane", "aria-label": title },
      h("h2", {}, title),
      h("p", { class: "times" }, clock, speed),
      bar,
      text,
    );
    return { node, clock, speed, bar, text };
  }

  /** The request of a lane. */
  request(lane, seed) {
    const specpress = { rounds: true, drafter: lane === "plain" ? "none" : this.drafter.value };
    if (lane !== "plain" && this.length.value !== "") specpress.draft_length = Number(this.length.value);
    return {
      model: this.state.about.name,
      prompt: this.prompt.value,
      max_tokens: Number(this.most.value),
      temperature: Number(this.temperature.value),
      seed,
      ignore_eos: true,
      specpress,
    };
  }

  async run() {
    if (this.controller) return;
    this.controller = new AbortController();
    busy(this, true);
    this.go.disabled = true;
    this.stop.disabled = false;
    this.notice.show("");
    say(this.result, "");
    say(this.figures, "");
    this.table.hidden = true;
    const laps = { plain: [], drafted: [] };
    const turns = Math.max(1, Math.min(20, Number(this.turns.value) || 1));
    const seed = Math.floor(Math.random() * 2 ** 32);
    try {
      // One turn that does not count: memory and caches are warm afterwards, and the choice of the draft length has begun.
      say(this.figures, "Warming up.");
      for (const { key } of LANES) await this.lap(key, seed);
      for (let turn = 0; turn < turns; turn += 1) {
        // Who begins changes: a machine that slows down or speeds up meanwhile favours neither.
        const order = turn % 2 ? ["drafted", "plain"] : ["plain", "drafted"];
        for (const key of order) laps[key].push(await this.lap(key, seed));
        this.tell(laps, turn + 1, turns);
      }
    } catch (error) {
      if (error.name === "AbortError") this.notice.show("Stopped.");
      else if (error instanceof AskError) this.notice.show(error.message, "error");
      else throw error;
    } finally {
      this.controller = null;
      this.go.disabled = false;
      this.stop.disabled = true;
      busy(this, false);
    }
  }

  async lap(key, seed) {
    const lap = new Lap();
    const lane = this.lanes[key];
    const request = this.request(key, seed);
    let timer = 0;
    const show = () => {
      timer = 0;
      say(lane.clock, `${number(lap.counts.promptMs + lap.counts.ms, 0)} ms`);
      say(lane.speed, lap.speed === null ? "" : `${number(lap.speed, 0)} tokens/s`);
      lane.bar.value = lap.counts.tokens / request.max_tokens;
      say(lane.text, lap.text);
    };
    show();
    await stream("/v1/completions", request, this.controller.signal, (event) => {
      lap.add(event);
      // Seldom: drawing takes processor time from an engine on the same machine, and more of it without drafts.
      timer ||= setTimeout(show, 150);
    });
    clearTimeout(timer);
    show();
    return lap;
  }

  tell(laps, turn, turns) {
    const pairs = laps.plain.map((plain, place) => [plain, laps.drafted[place]]);
    const speedup = median(pairs.map(([plain, drafted]) => drafted.speed / plain.speed));
    const said = predicted(laps.plain, laps.drafted);
    const tokens = pairs.reduce((sum, [plain]) => sum + plain.ids.length, 0);
    const wrong = pairs.reduce((sum, [plain, drafted]) => sum + different(plain.ids, drafted.ids), 0);
    this.outcome = { speedup, predicted: said, tokens, wrong };
    say(
      this.result,
      `${number(speedup)} times as fast with speculation; predicted ${number(said)}. ${wrong} of ${tokens} tokens differ.` +
        (turn < turns ? ` Turn ${turn} of ${turns}.` : ""),
    );
    const all = new Counts();
    for (const lap of laps.drafted) {
      for (const name of ["rounds", "gained", "drafted", "accepted"]) all[name] += lap.counts[name];
    }
    const told = all.drafted
      ? ""
      : " Nothing was drafted: by what was measured it would not pay, or nothing was found to copy.";
    say(
      this.figures,
      `α ${number(all.alpha)}, τ ${number(all.tau)}, γ ${number(all.gamma)}. Predicted: τ / (γc + v), with the ` +
        `costs of these rounds. Speeds leave the prompt's reading out.${told}`,
    );
    const head = ["turn", "without", "with", "ratio", "differ"];
    const rows = pairs.map(([plain, drafted], place) => {
      const values = [
        place + 1,
        number(plain.speed, 0),
        number(drafted.speed, 0),
        number(drafted.speed / plain.speed),
        different(plain.ids, drafted.ids),
      ];
      return h("tr", {}, ...values.map((value) => h("td", { class: "number" }, String(value))));
    });
    const heads = head.map((name) => h("th", { scope: "col", class: "number" }, name));
    this.table.replaceChildren(
      h(
        "table",
        {},
        h("caption", {}, "Tokens a second in each turn"),
        h("thead", {}, h("tr", {}, ...heads)),
        h("tbody", {}, ...rows),
      ),
    );
    this.table.hidden = false;
  }
}
customElements.define("sp-race", Race);
