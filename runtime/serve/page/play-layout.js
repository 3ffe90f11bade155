// What Play is made of: its form, buttons, figures, text and legend.

import { h } from "./dom.js";
import { describe } from "./token-card.js";
import "./settings.js";
import "./token-text.js";

const FIGURES = ["tokens/s", "α accepted", "τ a round", "γ drafted", "tokens", "seed"];
const LEGEND = [
  ["own", "the target's own"],
  ["accepted", "drafted, accepted"],
  ["forced", "forced by a grammar"],
];

/** Fills the view, and gives it its parts by the names that play.js uses. */
export function layOut(view) {
  view.prompt = h("textarea", { id: "prompt", rows: 5, spellcheck: "false" });
  view.system = h("textarea", { id: "system", rows: 2 });
  view.talk = h("ol", { class: "talk", "aria-label": "Conversation so far" });
  view.modes = ["completion", "chat"].map((name) =>
    h("input", { type: "radio", name: "mode", value: name, id: `mode-${name}`, onchange: () => view.mode() }),
  );
  view.run = h("button", { type: "button", class: "main", onclick: () => view.start() }, "Run");
  view.stop = h("button", { type: "button", disabled: true, onclick: () => view.abort() }, "Stop");
  view.link = h("button", { type: "button", disabled: true, onclick: () => view.copy() }, "Copy link");
  view.reply = h("button", { type: "button", hidden: true, onclick: () => view.answer() }, "Reply");
  view.resume = h("button", { type: "button", hidden: true, onclick: () => view.goOn() }, "Go on");
  view.notice = h("sp-notice");
  view.tokens = h("sp-tokens");
  view.tokens.describe = describe;
  view.empty = h("p", { class: "empty" }, "The text appears here. Ctrl + Enter runs.");
  view.stats = Object.fromEntries(FIGURES.map((name) => [name, h("dd", {}, "–")]));
  view.why = h("p", { class: "why" });
  view.settings = h("sp-settings");
  const ghosts = h("input", { type: "checkbox", id: "ghosts", checked: true });
  ghosts.addEventListener("change", () => view.tokens.classList.toggle("plain", !ghosts.checked));
  const legend = LEGEND.map(([name, label]) => h("li", {}, h("span", { class: `t ${name}` }, "token"), ` ${label}`));
  legend.push(h("li", {}, h("s", { class: "ghost" }, "token"), " drafted, rejected"));
  const mode = h("fieldset", { class: "modes" }, h("legend", { class: "away" }, "Kind of text"));
  for (const radio of view.modes) {
    mode.append(radio, h("label", { for: radio.id }, radio.value === "chat" ? "Chat" : "Completion"));
  }
  view.systemField = h("div", { class: "field" }, h("label", { for: "system" }, "System message"), view.system);
  view.promptLabel = h("label", { for: "prompt" }, "Prompt");
  const cells = Object.entries(view.stats).map(([name, dd]) => h("div", {}, h("dt", {}, name), dd));
  view.append(
    h(
      "div",
      { class: "columns" },
      h(
        "div",
        { class: "text" },
        h("h1", {}, "Play"),
        mode,
        view.systemField,
        view.talk,
        h("div", { class: "field" }, view.promptLabel, view.prompt),
        h("div", { class: "buttons" }, view.run, view.stop, view.reply, view.resume, view.link),
        view.notice,
        h("dl", { class: "stats", "aria-label": "Figures of this text" }, ...cells),
        view.why,
        h("section", { class: "output", "aria-label": "Text" }, view.empty, view.tokens),
        h("ul", { class: "legend", "aria-label": "Where tokens come from" }, ...legend),
        h("p", { class: "option" }, ghosts, h("label", { for: "ghosts" }, "Show rejected drafts")),
      ),
      h("aside", { "aria-label": "Settings" }, view.settings),
    ),
  );
}
