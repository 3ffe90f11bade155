// A text of which every token can be looked at: by pointer, or by arrow keys, as one stop of the tab key.

import { h } from "./dom.js";

let cards = 0;

/** What a token reads like where its text would show nothing. */
export function visible(text) {
  if (text === "") return "(no text)";
  if (text.trim() !== "") return text;
  const spaces = (run) => (run.length > 4 ? `·×${run.length}` : "·".repeat(run.length));
  return text.replace(/ +/g, spaces).replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

/**
 * `<sp-tokens>`: `put(place, token)` shows or changes a token, `cut(length)` forgets those from there on.
 *
 * A token has its `text`, `name` (what it reads like alone), `origin` (a class of style.css), and may have `ghosts`.
 * `describe(token)`, which the view sets, returns the nodes of the card that is shown beside a token.
 */
export class TokenText extends HTMLElement {
  tokens = [];
  nodes = [];
  current = 0;
  describe = () => [];

  connectedCallback() {
    if (this.box) return;
    this.box = h("div", { role: "listbox", "aria-label": "Text, token by token", "aria-orientation": "horizontal" });
    this.box.hidden = true;
    this.card = h("div", { class: "card", role: "tooltip", id: `card-${(cards += 1)}` });
    this.card.hidden = true;
    this.append(this.box, this.card);
    // Not pointerover: a text that is scrolled below a pointer at rest is not pointed at.
    this.box.addEventListener("pointermove", (event) => event.target !== this.told && this.point(event.target));
    this.box.addEventListener("pointerleave", () => this.settle());
    this.box.addEventListener("focusin", (event) => this.point(event.target, true));
    this.box.addEventListener("focusout", () => this.hide());
    this.box.addEventListener("keydown", (event) => this.key(event));
    addEventListener("scroll", () => this.settle(), { passive: true });
  }

  put(place, token) {
    this.box.hidden = false;
    let node = this.nodes[place];
    if (!node) {
      node = h("span", { role: "option", tabindex: place === this.current ? "0" : "-1", "aria-selected": "false" });
      node.place = place;
      this.nodes[place] = node;
      this.box.append(node);
    }
    const shown = token.text === "" ? token.name : token.text;
    this.tokens[place] = token;
    node.className = `t ${token.origin}${token.text === "" ? " empty" : ""}`;
    if (node.textContent !== shown) node.textContent = shown;
    if (shown.trim() === "") node.setAttribute("aria-label", visible(shown));
    this.ghosts(node, token);
  }

  ghosts(node, token) {
    node.rejected?.remove();
    node.rejected = null;
    if (!token.ghosts?.length) return;
    node.rejected = h("span", { class: "ghosts", "aria-hidden": "true" });
    for (const text of token.ghosts) node.rejected.append(h("s", { class: "ghost" }, visible(text)));
    if (token.ghostsAfter) node.after(node.rejected);
    else node.before(node.rejected);
  }

  cut(length) {
    for (const node of this.nodes.splice(length)) {
      node.rejected?.remove();
      node.remove();
    }
    this.tokens.length = Math.min(this.tokens.length, length);
    this.current = Math.min(this.current, Math.max(0, length - 1));
    if (this.nodes.length) this.nodes[this.current].tabIndex = 0;
    this.box.hidden = length === 0;
    this.hide();
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    let place = this.current;
    if (step) place += step;
    else if (event.key === "Home") place = 0;
    else if (event.key === "End") place = this.nodes.length - 1;
    else if (event.key === "Escape") return this.hide();
    else return;
    event.preventDefault();
    this.nodes[Math.max(0, Math.min(this.nodes.length - 1, place))]?.focus();
  }

  point(node, focused = false) {
    if (node.place === undefined) return;
    if (focused) {
      this.nodes[this.current].tabIndex = -1;
      this.nodes[this.current].setAttribute("aria-selected", "false");
      this.current = node.place;
      node.tabIndex = 0;
      node.setAttribute("aria-selected", "true");
    }
    node.setAttribute("aria-describedby", this.card.id);
    this.card.replaceChildren(...this.describe(this.tokens[node.place]));
    this.told = node;
    this.position(node);
  }

  // The card of the token that has the focus comes back when a pointer has gone, and goes along where the text is
  // scrolled, which focus itself does with what was out of sight.
  settle() {
    const node = this.nodes[this.current];
    if (!this.card.hidden && node && node === document.activeElement) this.point(node);
    else this.hide();
  }

  hide() {
    this.told = null;
    if (this.card) this.card.hidden = true;
  }

  position(node) {
    const at = node.getClientRects()[0] || node.getBoundingClientRect();
    this.card.hidden = false;
    const { width, height } = this.card.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left, innerWidth - width - 8));
    const above = at.top - height - 8;
    const top = at.bottom + height + 8 > innerHeight && above > 0 ? above : at.bottom + 8;
    this.card.style.left = `${left}px`;
    this.card.style.top = `${top}px`;
  }
}
customElements.define("sp-tokens", TokenText);
