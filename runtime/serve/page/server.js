// Server: what /metrics tells, once a second, as small plots over the last two minutes.

import { ask } from "./api.js";
import { h, number, say } from "./dom.js";
import "./plot.js";

const PERIOD = 1000;

/** Prometheus' text as a function: the sum of a figure's lines with these labels; null where there is none. */
export function parsed(text) {
  const lines = [];
  for (const line of text.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const space = line.lastIndexOf(" ");
    const head = line.slice(0, space);
    const brace = head.indexOf("{");
    lines.push([
      brace < 0 ? head : head.slice(0, brace),
      brace < 0 ? "" : head.slice(brace),
      Number(line.slice(space + 1)),
    ]);
  }
  return (name, ...labels) => {
    const found = lines.filter(
      ([other, said]) => other === name && labels.every(([key, value]) => said.includes(`${key}="${escaped(value)}"`)),
    );
    return found.length ? found.reduce((sum, [, , value]) => sum + value, 0) : null;
  };
}

function escaped(value) {
  return value.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll('"', '\\"');
}

/** `<sp-server>` */
export class ServerView extends HTMLElement {
  connect(state) {
    this.state = state;
    this.notice = h("sp-notice");
    const titles = [
      ["tokens", "Tokens/s", ["written", "read of prompts"], 0, ""],
      ["queue", "Texts", ["running", "waiting"], 0, ""],
      ["pages", "Pages held", ["of the cache"], 0, " %"],
      ["prefix", "Prompt tokens from the cache", ["of the last minute"], 0, " %"],
      ["requests", "Texts ended", ["of the last minute"], 0, ""],
      ["alpha", "Drafted tokens accepted", ["α of the last minute"], 0, " %"],
    ];
    this.plots = {};
    for (const [key, ...rest] of titles) {
      this.plots[key] = h("sp-plot");
      this.plots[key].begin(...rest);
    }
    this.totals = h("dl", { class: "stats", "aria-label": "Since the server started" });
    this.cells = {};
    for (const name of ["texts", "tokens", "drafted", "accepted", "refused", "restarts"]) {
      this.cells[name] = h("dd", {}, "–");
      this.totals.append(h("div", {}, h("dt", {}, name), this.cells[name]));
    }
    this.about = h("p", { class: "why" });
    this.append(
      h(
        "div",
        { class: "view" },
        h("h1", {}, "Server"),
        this.notice,
        h("div", { class: "plots" }, ...Object.values(this.plots)),
        h("h2", {}, "Since the server started"),
        this.totals,
        this.about,
      ),
    );
    this.history = [];
    state.addEventListener("model", () => this.reset());
    if (!this.hidden) this.shown(true);
  }

  shown(is) {
    clearTimeout(this.timer);
    if (is && this.state) this.look();
  }

  reset() {
    this.history = [];
  }

  async look() {
    clearTimeout(this.timer);
    const begun = performance.now();
    try {
      const answer = await ask("/metrics");
      this.add(parsed(await answer.text()), begun);
      this.notice.show("");
    } catch (error) {
      this.notice.show(error.message, "error");
      for (const plot of Object.values(this.plots)) plot.add(plot.lines.map(() => null));
    }
    if (!this.hidden) this.timer = setTimeout(() => this.look(), Math.max(200, PERIOD - (performance.now() - begun)));
  }

  add(figure, at) {
    const model = ["model_name", this.state.about.name];
    const of = (name) => figure(name, model) ?? 0;
    const now = {
      at,
      written: of("vllm:generation_tokens_total"),
      read: of("vllm:prompt_tokens_total"),
      asked: of("vllm:prefix_cache_queries_total"),
      hits: of("vllm:prefix_cache_hits_total"),
      ended: of("vllm:request_success_total"),
      drafted: of("vllm:spec_decode_num_draft_tokens_total"),
      accepted: of("vllm:spec_decode_num_accepted_tokens_total"),
    };
    // A server that has started again counts from 0.
    if (this.history.length && now.written < this.history.at(-1).written) this.history = [];
    const last = this.history.at(-1) ?? null;
    const minute = this.history.find((one) => at - one.at <= 60_000) ?? now;
    this.history.push(now);
    if (this.history.length > 120) this.history.shift();
    const rate = (key) => (last ? (1000 * (now[key] - last[key])) / (at - last.at) : null);
    const share = (part, whole) =>
      now[whole] > minute[whole] ? (100 * (now[part] - minute[part])) / (now[whole] - minute[whole]) : null;
    this.plots.tokens.add([rate("written"), rate("read")]);
    this.plots.queue.add([of("vllm:num_requests_running"), of("vllm:num_requests_waiting")]);
    this.plots.pages.add([100 * of("vllm:kv_cache_usage_perc")]);
    this.plots.prefix.add([share("hits", "asked")]);
    this.plots.requests.add([now.ended - minute.ended]);
    this.plots.alpha.add([share("accepted", "drafted")]);
    const totals = {
      texts: now.ended,
      tokens: now.written,
      drafted: now.drafted,
      accepted: now.accepted,
      refused: of("vllm:admission_rejections_total"),
      restarts: of("specpress:engine_restarts_total"),
    };
    for (const [name, value] of Object.entries(totals)) say(this.cells[name], number(value, 0));
    const { about } = this.state;
    const held = about.pages ? `${about.pages} pages of 64 tokens` : "memory for each text, no pages";
    const kernels = about.exact
      ? "exact kernels: a seed gives the same text whoever drafts"
      : "kernels that are not exact";
    say(
      this.about,
      `${about.name}: context of ${about.context} tokens, ${held}, ${about.max_batch} texts in one forward, ` +
        `${kernels}, ${about.fingerprint}. Specpress ${this.state.data.version}.`,
    );
  }
}
customElements.define("sp-server", ServerView);
