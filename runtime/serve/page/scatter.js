// A plot of runs, drawn here: two figures of each, and the front of those that no other outdoes in both.

import { h, number, s } from "./dom.js";

const HEIGHT = 320;
const EDGE = { left: 62, right: 24, top: 24, bottom: 46 };

/** Steps of a scale from low to high at round numbers, about `count` of them. */
export function ticks(low, high, count = 5) {
  const rough = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const out = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step)
    out.push(Number(at.toPrecision(12)));
  return out;
}

/** The points, as {x, y}, that no other is at least as good as in both figures and better in one; sorted by x. */
export function front(points, x, y) {
  const good = (axis, value) => (axis.more ? -value : value);
  return points
    .filter((one) =>
      points.every((other) => {
        const [a, b] = [good(x, other.x) - good(x, one.x), good(y, other.y) - good(y, one.y)];
        return a > 0 || b > 0 || (a === 0 && b === 0);
      }),
    )
    .sort((a, b) => a.x - b.x);
}

function range(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [low - room, high + room];
}

/** Draws runs into `box`. x, y: {key, label, more, scale, digits}; `open(run)` is called for a point that is chosen. */
export function scatter(box, runs, x, y, open) {
  const points = runs
    .map((run) => ({ run, x: run[x.key], y: run[y.key] }))
    .filter((one) => one.x !== null && one.y !== null)
    .map((one) => ({ ...one, x: one.x / x.scale, y: one.y / y.scale }));
  if (!points.length) {
    box.replaceChildren(h("p", { class: "empty" }, `No run here has both figures: ${x.label}, ${y.label}.`));
    return;
  }
  const width = Math.max(280, box.clientWidth - 20);
  const [x0, x1] = range(points.map((one) => one.x));
  const [y0, y1] = range(points.map((one) => one.y));
  const px = (value) => EDGE.left + ((value - x0) / (x1 - x0)) * (width - EDGE.left - EDGE.right);
  const py = (value) => HEIGHT - EDGE.bottom - ((value - y0) / (y1 - y0)) * (HEIGHT - EDGE.top - EDGE.bottom);
  const svg = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": `${y.label} by ${x.label}` });
  for (const at of ticks(x0, x1, width / 110)) {
    svg.append(s("line", { class: "grid", x1: px(at), x2: px(at), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    svg.append(s("text", { x: px(at), y: HEIGHT - EDGE.bottom + 18, "text-anchor": "middle" }, label(at)));
  }
  for (const at of ticks(y0, y1, 5)) {
    svg.append(s("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: py(at), y2: py(at) }));
    svg.append(s("text", { x: EDGE.left - 8, y: py(at) + 4, "text-anchor": "end" }, label(at)));
  }
  const middle = (EDGE.top + HEIGHT - EDGE.bottom) / 2;
  svg.append(
    s(
      "text",
      { class: "axis", x: (EDGE.left + width - EDGE.right) / 2, y: HEIGHT - 8, "text-anchor": "middle" },
      x.label,
    ),
    s("text", { class: "axis", transform: `translate(14 ${middle}) rotate(-90)`, "text-anchor": "middle" }, y.label),
  );
  const best = front(points, x, y);
  if (best.length > 1) {
    svg.append(s("polyline", { class: "front", points: best.map((one) => `${px(one.x)},${py(one.y)}`).join(" ") }));
  }
  const taken = [];
  for (const one of points) {
    const told = `${one.run.name}: ${x.label} ${number(one.x, x.digits)}, ${y.label} ${number(one.y, y.digits)}`;
    const shape = s("circle", { cx: px(one.x), cy: py(one.y), r: 6, class: best.includes(one) ? "best" : "" });
    const point = s("a", { href: "#runs", "aria-label": told }, s("title", {}, told), shape);
    point.addEventListener("click", (event) => {
      event.preventDefault();
      open(one.run);
    });
    svg.append(point);
  }
  for (const one of [...best, ...points.filter((other) => !best.includes(other))])
    name(svg, one, px, py, taken, width - EDGE.right);
  box.replaceChildren(svg);
}

function label(value) {
  return value.toLocaleString("en", { maximumSignificantDigits: 6 });
}

/** A point's name beside it, where there is room for it. */
function name(svg, one, px, py, taken, edge) {
  const text = one.run.recipe || one.run.name;
  const short = text.length > 24 ? `${text.slice(0, 23)}…` : text;
  const width = short.length * 7 + 4;
  const [at, y] = [px(one.x), py(one.y) - 9];
  const left = at + 4 + width > edge ? at - 4 - width : at + 4;
  const free = taken.every((other) => left > other.right || left + width < other.left || Math.abs(other.y - y) > 15);
  if (!free || left < EDGE.left) return;
  taken.push({ left, right: left + width, y });
  svg.append(s("text", { class: "name", x: left, y }, short));
}
