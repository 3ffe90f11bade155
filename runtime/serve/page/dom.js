// Elements by function calls. Text goes in as text nodes: nothing that a model or a file says becomes markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((one) => one !== null && one !== undefined && one !== false));
  return node;
}

/** An HTML element; props beginning with "on" are listeners, others attributes (true: an empty one). */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An SVG element. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Sets a node's text where it has changed: a text that stays costs no layout. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A sentence for the reader: kind "error", "note" or ""; an empty text hides it. */
export class Notice extends HTMLElement {
  connectedCallback() {
    this.setAttribute("role", "status");
    if (!this.textContent) this.hidden = true;
  }

  show(text, kind = "note", ...more) {
    this.className = kind;
    this.hidden = !text;
    this.replaceChildren(text || "", ...more);
  }
}
customElements.define("sp-notice", Notice);

/** Says that a view is at work, or that it has done one thing more. */
export function busy(view, is) {
  view.setAttribute("aria-busy", String(is));
  if (!is) view.dataset.done = Number(view.dataset.done || 0) + 1;
}

let serial = 0;

/** A label and what it labels. */
export function field(label, input, help) {
  input.id ||= `f${(serial += 1)}`;
  const hint = help ? h("small", { id: `${input.id}-help` }, help) : null;
  if (hint) input.setAttribute("aria-describedby", hint.id);
  return h("div", { class: "field" }, h("label", { for: input.id }, label), input, hint);
}

/** A number as people read it: "-" for none. */
export function number(value, digits = 2) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
