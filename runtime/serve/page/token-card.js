// What is told of a single token of a text that was written here.

import { h, number } from "./dom.js";
import { visible } from "./token-text.js";

const WORDS = { own: "the target's own", accepted: "drafted and accepted", forced: "forced by the grammar" };

/** Rows of the most probable tokens, [text, log-probability] each; the one that was taken is marked. */
export function topTable(top, taken) {
  const rows = top.map(([text, value]) => {
    const bar = h("meter", { min: 0, max: 1, value: Math.exp(value), "aria-hidden": "true" });
    const cells = [h("td", {}, visible(text)), h("td", {}, bar), h("td", {}, number(value, 3))];
    return h("tr", value === taken ? { class: "chosen" } : {}, ...cells);
  });
  return rows.length ? h("table", {}, h("tbody", {}, ...rows)) : "";
}

/** The card of a token of Play: tokens.js has its fields. */
export function describe(token) {
  const draft = token.gamma
    ? `round ${token.round}: ${token.gamma} drafted by ${token.drafter}, ${token.kept} accepted`
    : `round ${token.round}: nothing drafted`;
  return [
    h("p", { class: "head" }, h("b", {}, visible(token.text || token.name)), ` ${WORDS[token.origin]}`),
    h("p", {}, `logprob ${token.logprob === null ? "not known" : number(token.logprob, 3)}`),
    h("p", {}, draft),
    h("p", {}, `${number(token.ms, 2)} ms, of which drafting ${number(token.draftMs, 2)} ms`),
    token.ghosts.length ? h("p", {}, `rejected: ${token.ghosts.map(visible).join(" ")}`) : "",
    topTable(token.top, token.logprob),
  ];
}
