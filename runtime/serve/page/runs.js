// Runs: what lies under --runs, as a table and a plot; one or two of them with figures, recipe and report page.

import { json } from "./api.js";
import { field, h, number, say } from "./dom.js";
import { scatter } from "./scatter.js";

/** Figures of a run: how they are called, shown and compared. `more`: more is better. */
export const FIGURES = {
  compressed_bytes: { label: "size, MB", scale: 1e6, digits: 1 },
  ratio: { label: "times smaller", scale: 1, digits: 2, more: true },
  bits_per_weight: { label: "bits a weight", scale: 1, digits: 2 },
  perplexity: { label: "perplexity", scale: 1, digits: 2 },
  kl_divergence: { label: "KL, nats", scale: 1, digits: 4 },
  top1_agreement: { label: "same top token", scale: 1, digits: 3, more: true },
  tokens_per_second: { label: "tokens/s", scale: 1, digits: 0, more: true },
  speed: { label: "speed over original", scale: 1, digits: 2, more: true },
  speedup: { label: "speedup by drafts", scale: 1, digits: 2, more: true },
  acceptance_rate: { label: "α accepted", scale: 1, digits: 2, more: true },
  tokens_per_round: { label: "τ a round", scale: 1, digits: 2, more: true },
  original_perplexity: { label: "perplexity of the original", scale: 1, digits: 2 },
  original_bytes: { label: "size of the original, MB", scale: 1e6, digits: 1 },
  mismatches: { label: "tokens that differ by drafting", scale: 1, digits: 0 },
};
const COLUMNS = [
  "compressed_bytes",
  "ratio",
  "perplexity",
  "kl_divergence",
  "tokens_per_second",
  "speed",
  "acceptance_rate",
];
const WORDS = {
  recipe: "recipe",
  model: "model",
  draft: "draft",
  drafter: "drafter",
  lossless: "exactness",
  cpu: "processor",
  version: "Specpress",
};
const PLOTS = {
  "size and perplexity": ["compressed_bytes", "perplexity"],
  "size and speed": ["compressed_bytes", "speed"],
  "speed and perplexity": ["speed", "perplexity"],
};

function shown(run, key) {
  const { scale, digits } = FIGURES[key];
  return run[key] === null ? "–" : number(run[key] / scale, digits);
}

/** `<sp-runs>` */
export class Runs extends HTMLElement {
  runs = [];
  chosen = [];
  order = { key: "name", down: false };

  connect(state) {
    this.state = state;
    this.filters = {
      text: h("input", { type: "search", autocomplete: "off" }),
      size: h("input", { type: "number", min: 0, step: "any" }),
      perplexity: h("input", { type: "number", min: 0, step: "any" }),
      speed: h("input", { type: "number", min: 0, step: "any" }),
    };
    for (const input of Object.values(this.filters)) input.addEventListener("input", () => this.draw());
    this.axes = h(
      "select",
      { onchange: () => this.draw() },
      ...Object.keys(PLOTS).map((name) => h("option", {}, name)),
    );
    this.notice = h("sp-notice");
    this.plot = h("div", { class: "plot" });
    this.table = h("div", { class: "scroll runs", role: "region", "aria-label": "Runs", tabindex: "0" });
    this.details = h("section", { class: "details", "aria-label": "Chosen runs" });
    this.count = h("p", { class: "empty", role: "status" });
    this.body = h(
      "div",
      { class: "view" },
      h(
        "div",
        { class: "filters" },
        field("Recipe or name", this.filters.text),
        field("Size, MB, at most", this.filters.size),
        field("Perplexity, at most", this.filters.perplexity),
        field("Speed over original, at least", this.filters.speed),
        field("Plot", this.axes),
      ),
      this.plot,
      this.count,
      this.table,
      this.details,
    );
    const again = h("button", { type: "button", onclick: () => this.read() }, "Read again");
    this.append(
      h("div", { class: "view" }, h("div", { class: "heading" }, h("h1", {}, "Runs"), again), this.notice, this.body),
    );
    this.body.hidden = true;
    // The plot is drawn as wide as it is shown, so that its words keep their size.
    new ResizeObserver(() => this.plotRuns()).observe(this.plot);
    if (!this.hidden) this.read();
  }

  shown(is) {
    if (is && this.state) this.read();
  }

  async read() {
    if (!this.state.data.runs) {
      this.notice.show("No runs are listed: start the server with --runs DIR, the folder that your runs are in.");
      return;
    }
    try {
      const found = await json("/runs");
      this.runs = found.runs;
      this.notice.show(
        found.complete ? "" : `The folder holds more runs than are listed: these are ${found.runs.length}.`,
      );
    } catch (error) {
      this.notice.show(error.message, "error");
      return;
    }
    if (!this.runs.length) this.notice.show("The folder holds no run yet: specpress compress --out writes one.");
    this.body.hidden = !this.runs.length;
    this.chosen = this.chosen.filter((name) => this.runs.some((run) => run.name === name));
    this.draw();
    this.show();
  }

  visible() {
    const { text, size, perplexity, speed } = this.filters;
    const words = text.value.toLowerCase();
    const limit = (input, value, least) =>
      input.value === "" || (value !== null && (least ? value >= Number(input.value) : value <= Number(input.value)));
    return this.runs.filter(
      (run) =>
        `${run.name} ${run.recipe || ""}`.toLowerCase().includes(words) &&
        limit(size, run.compressed_bytes === null ? null : run.compressed_bytes / 1e6) &&
        limit(perplexity, run.perplexity) &&
        limit(speed, run.speed, true),
    );
  }

  draw() {
    const runs = this.visible();
    const { key, down } = this.order;
    runs.sort((a, b) => {
      if (a[key] === null || b[key] === null) return (a[key] === null) - (b[key] === null);
      const order = typeof a[key] === "string" ? a[key].localeCompare(b[key]) : a[key] - b[key];
      return down ? -order : order;
    });
    this.plotRuns();
    const hidden = this.runs.length - runs.length;
    const filtered = hidden ? ", the others are filtered out" : "";
    say(this.count, `${runs.length} of ${this.runs.length}${filtered}. Choose one, or two to see side by side.`);
    const heads = [
      this.head("name", "run"),
      this.head("recipe", "recipe"),
      ...COLUMNS.map((name) => this.head(name, FIGURES[name].label)),
    ];
    const rows = runs.map((run) => this.row(run));
    this.table.replaceChildren(
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, h("th", {}, h("span", { class: "away" }, "chosen")), ...heads)),
        h("tbody", {}, ...rows),
      ),
    );
  }

  plotRuns() {
    if (!this.plot.clientWidth) return;
    const [x, y] = PLOTS[this.axes.value].map((name) => ({ key: name, ...FIGURES[name] }));
    scatter(this.plot, this.visible(), x, y, (run) => this.choose(run.name));
  }

  head(key, label) {
    const current = this.order.key === key;
    const sort = current ? (this.order.down ? "descending" : "ascending") : "none";
    const button = h(
      "button",
      { type: "button", class: "sort", "data-key": key },
      label,
      current ? (this.order.down ? " ↓" : " ↑") : "",
    );
    button.addEventListener("click", () => {
      this.order = { key, down: current && !this.order.down };
      this.draw();
      this.table.querySelector(`[data-key="${key}"]`).focus();
    });
    return h("th", { scope: "col", "aria-sort": sort, class: COLUMNS.includes(key) ? "number" : "" }, button);
  }

  row(run) {
    const box = h("input", { type: "checkbox", "aria-label": `Choose ${run.name}` });
    box.checked = this.chosen.includes(run.name);
    box.addEventListener("change", () => this.choose(run.name));
    const cells =
      run.problem && run.compressed_bytes === null
        ? [h("td", { colspan: COLUMNS.length + 1, class: "problem" }, run.problem)]
        : run.kind === "sweep"
          ? [
              h(
                "td",
                { colspan: COLUMNS.length + 1, class: "empty" },
                "a sweep: its page has the table of all its recipes",
              ),
            ]
          : [h("td", { "data-label": "recipe" }, run.recipe), ...COLUMNS.map((name) => this.cell(run, name))];
    return h("tr", {}, h("td", {}, box), h("th", { scope: "row" }, run.name), ...cells);
  }

  cell(run, name) {
    return h("td", { class: "number", "data-label": FIGURES[name].label }, shown(run, name));
  }

  choose(name) {
    if (this.chosen.includes(name)) this.chosen = this.chosen.filter((other) => other !== name);
    else this.chosen = [...this.chosen.slice(-1), name];
    for (const box of this.table.querySelectorAll("input")) {
      box.checked = this.chosen.includes(box.getAttribute("aria-label").slice(7));
    }
    this.show();
  }

  /** The chosen runs: figures beside one another, then recipes and report pages. */
  async show() {
    const wanted = this.chosen.join("\n");
    const found = [];
    for (const name of this.chosen) {
      try {
        found.push(await json(`/run?${new URLSearchParams({ name })}`));
      } catch (error) {
        this.notice.show(`${name}: ${error.message}`, "error");
        this.chosen = this.chosen.filter((other) => other !== name);
        return this.draw();
      }
    }
    if (wanted !== this.chosen.join("\n")) return undefined;
    if (!found.length) return this.details.replaceChildren();
    const title = found.length > 1 ? "Side by side" : found[0].run.name;
    const parts = [h("h2", {}, title), this.figures(found.map((one) => one.run))];
    const recipes = found.filter((one) => one.recipe !== null);
    if (recipes.length) {
      const texts = recipes.map((one) =>
        h("figure", {}, h("figcaption", {}, `${one.run.name}: recipe.yaml`), h("pre", { tabindex: "0" }, one.recipe)),
      );
      parts.push(h("div", { class: "pair" }, ...texts));
    }
    parts.push(h("div", { class: "pair" }, ...found.map((one) => this.report(one))));
    return this.details.replaceChildren(...parts);
  }

  figures(runs) {
    const rows = [];
    for (const run of runs) {
      if (run.problem)
        rows.push(
          h(
            "tr",
            {},
            h("th", { scope: "row" }, run.name),
            h("td", { class: "problem", colspan: runs.length + 1 }, run.problem),
          ),
        );
    }
    for (const [key, label] of Object.entries(WORDS)) {
      if (runs.every((run) => run[key] === null)) continue;
      const cells = runs.map((run) => h("td", {}, run[key] ?? "–"));
      rows.push(h("tr", {}, h("th", { scope: "row" }, label), ...cells, runs.length === 2 ? h("td", {}) : ""));
    }
    for (const [key, { label, digits, more, scale }] of Object.entries(FIGURES)) {
      const values = runs.map((run) => run[key]);
      if (values.every((value) => value === null)) continue;
      const cells = runs.map((run) => h("td", { class: "number" }, shown(run, key)));
      if (runs.length === 2) {
        const change = values.includes(null) ? null : (values[1] - values[0]) / scale;
        const better = change === null || change === 0 ? "" : change > 0 === Boolean(more) ? "better" : "worse";
        const sign = change > 0 ? "+" : "";
        cells.push(h("td", { class: `number ${better}` }, change === null ? "–" : `${sign}${number(change, digits)}`));
      }
      rows.push(h("tr", {}, h("th", { scope: "row" }, label), ...cells));
    }
    const names = runs.map((run) => h("th", { scope: "col" }, run.name));
    if (runs.length === 2) names.push(h("th", { scope: "col" }, "second − first"));
    const head = h("thead", {}, h("tr", {}, h("th", {}, h("span", { class: "away" }, "figure")), ...names));
    return h(
      "div",
      { class: "scroll", role: "region", "aria-label": "Figures", tabindex: "0" },
      h("table", { class: "figures" }, head, h("tbody", {}, ...rows)),
    );
  }

  report({ run, ticket }) {
    const name = `${run.name}: ${run.kind === "sweep" ? "sweep.html" : "report.html"}`;
    if (!ticket)
      return h(
        "figure",
        {},
        h("figcaption", {}, name),
        h("p", { class: "empty" }, "There is no report page in this folder."),
      );
    const src = `/run-report?${new URLSearchParams({ name: run.name, ticket })}`;
    return h("figure", {}, h("figcaption", {}, name), h("iframe", { src, sandbox: "", title: name }));
  }
}
customElements.define("sp-runs", Runs);
