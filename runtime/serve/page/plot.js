// A small plot over time, drawn here: one or two lines, and the values that they have now.

import { h, number, s, say } from "./dom.js";

const POINTS = 120;
const WIDTH = 300;
const HEIGHT = 80;

/** `<sp-plot>`: `begin(title, lines, digits, unit)`, then `add(values)` once a second; null: nothing was told. */
export class Plot extends HTMLElement {
  begin(title, lines, digits = 0, unit = "") {
    Object.assign(this, { lines: lines.map((name) => ({ name, values: [] })), digits, unit });
    this.svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    for (const [place, line] of this.lines.entries()) {
      line.path = s("polyline", { class: `line line-${place}`, "vector-effect": "non-scaling-stroke" });
      line.shown = h("dd", {}, "–");
      this.svg.append(line.path);
    }
    this.most = h("span", { class: "most" });
    const list = this.lines.map((line, place) =>
      h("div", {}, h("dt", { class: `key-${place}` }, line.name), line.shown),
    );
    this.replaceChildren(h("h2", {}, title), h("dl", {}, ...list), h("div", { class: "frame" }, this.svg, this.most));
  }

  add(values) {
    for (const [place, line] of this.lines.entries()) {
      line.values.push(values[place]);
      if (line.values.length > POINTS) line.values.shift();
      const value = values[place];
      say(line.shown, value === null ? "–" : `${number(value, this.digits)}${this.unit}`);
    }
    const known = this.lines.flatMap((line) => line.values.filter((value) => value !== null));
    const most = Math.max(this.unit === " %" ? 100 : 1, ...known);
    for (const line of this.lines) {
      const start = POINTS - line.values.length;
      const points = line.values.map((value, place) =>
        value === null
          ? null
          : `${((start + place) / (POINTS - 1)) * WIDTH},${HEIGHT - 2 - (value / most) * (HEIGHT - 6)}`,
      );
      line.path.setAttribute("points", points.filter((one) => one !== null).join(" "));
    }
    say(this.most, `top: ${number(most, most < 10 ? this.digits : 0)}${this.unit}`);
  }
}
customElements.define("sp-plot", Plot);
