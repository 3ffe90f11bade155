// Compare: the original's text beside the model's, and how far their predictions lie apart over a text of your own.

import { AskError, json, stream } from "./api.js";
import { busy, field, h, number, s, say } from "./dom.js";
import { TokenStream } from "./tokens.js";
import { visible } from "./token-text.js";

const LEVELS = [0.02, 0.1, 0.5, 2];
const STRIP = 56;

/** 0 to 4: how large a divergence in nats is. */
export function level(kl) {
  return kl === null ? 0 : LEVELS.filter((limit) => kl >= limit).length;
}

/** The first place where two lists of token ids differ; null where they are the same, or one only ends earlier. */
export function divergence(a, b) {
  const shorter = Math.min(a.length, b.length);
  for (let place = 0; place < shorter; place += 1) if (a[place] !== b[place]) return place;
  return a.length === b.length ? null : shorter;
}

/** `<sp-compare>` */
export class Compare extends HTMLElement {
  connect(state) {
    this.state = state;
    this.notice = h("sp-notice");
    this.body = h("div", { class: "view" });
    this.append(h("div", { class: "view" }, h("h1", {}, "Compare"), this.notice, this.body));
    this.prompt = h("textarea", { rows: 4, spellcheck: "false" });
    this.prompt.value = "def quicksort(values):\n";
    this.most = h("input", { type: "number", min: 1, step: 1, value: 128 });
    this.temperature = h("input", { type: "number", min: 0, max: 100, step: "any", value: 0 });
    this.seed = h("input", { type: "number", min: 0, step: 1, value: 0 });
    this.write = h("button", { type: "button", class: "main", onclick: () => this.texts() }, "Write both");
    this.verdict = h("p", { class: "result", role: "status" });
    this.sides = [this.side(), this.side()];
    this.own = h("textarea", { rows: 6, spellcheck: "false" });
    this.read = h("button", { type: "button", class: "main", onclick: () => this.divergences() }, "Read with both");
    this.sum = h("p", { class: "result", role: "status" });
    this.strip = h("div", { class: "strip" });
    this.tokens = h("sp-tokens");
    this.tokens.describe = (token) => this.card(token);
    const scale = ["below 0.02", "0.02", "0.1", "0.5", "2 nats and more"].map((label, place) =>
      h("li", {}, h("span", { class: `t kl-${place}` }, "token"), ` ${label}`),
    );
    this.scale = h("ul", { class: "legend", "aria-label": "KL in nats" }, ...scale);
    this.reading = h(
      "div",
      { class: "view", hidden: true },
      this.strip,
      h("section", { class: "output", "aria-label": "Your text" }, this.tokens),
      this.scale,
    );
    this.body.append(
      h("h2", {}, "Both write"),
      field("Prompt", this.prompt),
      h(
        "div",
        { class: "filters" },
        field("Max tokens", this.most),
        field("Temperature", this.temperature),
        field("Seed", this.seed),
      ),
      h("div", { class: "buttons" }, this.write),
      this.verdict,
      h("div", { class: "pair" }, ...this.sides.map((side) => side.node)),
      h("h2", {}, "Both read a text of yours"),
      field(
        "Your text",
        this.own,
        "Every token gets the KL divergence of the model's prediction from the original's, in nats.",
      ),
      h("div", { class: "buttons" }, this.read),
      this.sum,
      this.reading,
    );
    state.addEventListener("model", () => this.fit());
    state.addEventListener("data", () => this.fit());
    this.fit();
  }

  side() {
    const title = h("h2", {});
    const text = h("div", { class: "output mono", tabindex: "0", role: "region" });
    return { node: h("section", { class: "side" }, title, text), title, text };
  }

  fit() {
    const { data, about } = this.state;
    this.body.hidden = true;
    if (data.original === null) {
      this.notice.show(
        "There is nothing to compare with: start the server with --original PATH, the model before it was compressed.",
      );
    } else if (!data.models.some((one) => one.name === data.original)) {
      this.notice.show("The original is still being loaded.");
    } else {
      this.body.hidden = false;
      this.notice.show(
        about.name === data.original ? "The original is chosen above: choose the model that it is compared with." : "",
      );
    }
    const titles = ["Original", about.name];
    this.sides.forEach((side, place) => {
      say(side.title, titles[place]);
      side.text.setAttribute("aria-label", `Text of ${titles[place]}`);
    });
  }

  failed(error) {
    if (!(error instanceof AskError)) throw error;
    this.notice.show(error.message, "error");
  }

  // Texts.

  /** Says in a view's place that something is being done, and does it; an error is told above. */
  async during(button, place, sentence, work) {
    button.disabled = true;
    busy(this, true);
    say(place, sentence);
    this.notice.show("");
    try {
      await work();
    } catch (error) {
      say(place, "");
      this.failed(error);
    } finally {
      button.disabled = false;
      busy(this, false);
    }
  }

  texts() {
    return this.during(this.write, this.verdict, "Both are writing.", async () => {
      const names = [this.state.data.original, this.state.about.name];
      this.showTexts(await Promise.all(names.map((name) => this.text(name))));
    });
  }

  async text(model) {
    const tokens = [];
    const text = new TokenStream();
    const request = {
      model,
      prompt: this.prompt.value,
      max_tokens: Number(this.most.value),
      temperature: Number(this.temperature.value),
      seed: Number(this.seed.value),
      logprobs: 0,
      specpress: { rounds: true },
    };
    await stream("/v1/completions", request, undefined, (event) => tokens.push(...text.add(event)));
    return tokens;
  }

  showTexts(found) {
    const [a, b] = found.map((tokens) => tokens.map((token) => token.id));
    const place = divergence(a, b);
    this.first = place;
    found.forEach((tokens, side) => {
      const shared = place === null ? tokens : tokens.slice(0, place);
      const rest = place === null ? [] : tokens.slice(place);
      const join = (list) => list.map((token) => token.text).join("");
      const parts = [h("span", { class: "shared" }, join(shared))];
      if (rest.length)
        parts.push(
          h(
            "mark",
            {},
            rest[0].text === "" || rest[0].text.trim() === "" ? visible(rest[0].text || rest[0].name) : rest[0].text,
          ),
          h("span", {}, join(rest.slice(1))),
        );
      this.sides[side].text.replaceChildren(...parts);
    });
    if (place === null) return say(this.verdict, `The two texts are the same: ${a.length} tokens.`);
    const [ours, theirs] = found.map((tokens) =>
      tokens[place] ? `“${visible(tokens[place].text || tokens[place].name)}”` : "an end",
    );
    return say(
      this.verdict,
      `The first ${place} tokens are the same; then the original writes ${ours}, and ${this.state.about.name} ${theirs}.`,
    );
  }

  // A text of one's own.

  divergences() {
    return this.during(this.read, this.sum, "Both are reading.", async () => {
      this.showDivergences(await json("/compare", { model: this.state.about.name, text: this.own.value }));
    });
  }

  showDivergences(found) {
    const { positions } = found;
    say(
      this.sum,
      `Mean KL ${number(found.mean_kl, 4)} nats. Perplexity ${number(found.original_perplexity)} of the original, ` +
        `${number(found.perplexity)} of ${this.state.about.name}. The most probable token is the same in ` +
        `${number(100 * found.same_top, 1)} % of ${positions.length - 1} places.`,
    );
    this.reading.hidden = false;
    this.tokens.cut(0);
    positions.forEach((one, place) =>
      this.tokens.put(place, { ...one, name: one.text, origin: `kl-${level(one.kl)}`, place }),
    );
    this.drawStrip(positions.map((one) => one.kl));
  }

  drawStrip(values) {
    const most = Math.max(0.05, ...values.map((value) => value ?? 0));
    const label = `KL divergence at each of ${values.length} places, at most ${number(most, 3)} nats`;
    const svg = s("svg", {
      viewBox: `0 0 ${values.length} ${STRIP}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": label,
    });
    values.forEach((value, place) => {
      if (value === null) return;
      const height = Math.max(1, Math.sqrt(value / most) * STRIP);
      svg.append(s("rect", { x: place + 0.05, width: 0.9, y: STRIP - height, height, class: `kl-${level(value)}` }));
    });
    svg.addEventListener("click", (event) => {
      const box = svg.getBoundingClientRect();
      const place = Math.floor(((event.clientX - box.left) / box.width) * values.length);
      this.tokens.nodes[place]?.focus();
    });
    this.strip.replaceChildren(
      svg,
      h("small", {}, `The highest bar: ${number(most, 3)} nats; heights are square roots. A click goes to the token.`),
    );
  }

  card(token) {
    if (token.kl === null)
      return [h("p", { class: "head" }, h("b", {}, visible(token.text)), " the first token follows nothing")];
    const row = (name, logprob, top) =>
      h("tr", {}, h("td", {}, name), h("td", {}, number(logprob, 3)), h("td", {}, visible(top)));
    return [
      h("p", { class: "head" }, h("b", {}, visible(token.text)), ` token ${token.place + 1}`),
      h("p", {}, `KL ${number(token.kl, 4)} nats`),
      h(
        "table",
        { class: "both" },
        h("thead", {}, h("tr", {}, h("th", {}, ""), h("th", {}, "logprob"), h("th", {}, "expects"))),
        h(
          "tbody",
          {},
          row("original", token.original_logprob, token.original_top),
          row(this.state.about.name, token.logprob, token.top),
        ),
      ),
    ];
  }
}
customElements.define("sp-compare", Compare);
