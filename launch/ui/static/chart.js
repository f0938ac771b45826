// Line charts as SVG: several runs in the same axes, values under the pointer or the arrow keys.

import { compact, count, decimal, drawn, duration, element, isKnown } from "/dom.js";

const LEFT = 56, RIGHT = 16, TOP = 10, BOTTOM = 26;

export class Chart {
  // fromZero: the vertical axis begins at 0.
  constructor(place, { label, fromZero }) {
    this.label = label;
    this.fromZero = fromZero;
    this.series = [];
    this.axis = "env_steps";
    this.target = null;
    this.at = null;
    this.svg = drawn("svg", { tabindex: 0, role: "img" });
    this.tip = element("div", { class: "tip", role: "status", hidden: true });
    place.replaceChildren(this.svg, this.tip);
    this.place = place;
    new ResizeObserver(() => this.draw()).observe(place);
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.step(event));
    this.svg.addEventListener("blur", () => this.point(null));
  }

  // series: [{ name, colour, x, y }], arrays of equal length; null in y: not known.
  update(series, { axis, target = null }) {
    this.series = series.map((one) => ({ ...one, points: known(one.x, one.y) }));
    this.axis = axis;
    this.target = target;
    this.draw();
  }

  draw() {
    const { width, height } = this.place.getBoundingClientRect();
    if (!width) return;
    const points = this.series.flatMap((one) => one.points);
    this.scale = makeScale(points, this.target, this.fromZero, width, height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("aria-label", this.summary());
    const parts = points.length ? [...this.frame(), ...this.curves()] : [nothing(width, height)];
    this.svg.replaceChildren(...parts);
    this.mark();
  }

  summary() {
    const said = this.series.filter((one) => one.points.length).map((one) => {
      const [x, y] = one.points.at(-1);
      return `${one.name}: ${decimal(y)} at ${this.xText(x)}`;
    });
    return `${this.label}. ${said.join("; ") || "No values yet"}. Arrow keys read the values.`;
  }

  frame() {
    const { x, y, width, height, xTicks, yTicks } = this.scale;
    const rows = yTicks.flatMap((value) => [
      drawn("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      drawn("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, compact(value)),
    ]);
    const columns = xTicks.map((value) =>
      drawn("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, this.tick(value)));
    const axis = drawn("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM });
    return [...rows, axis, ...columns, ...this.goal()];
  }

  goal() {
    if (!isKnown(this.target)) return [];
    const { y, width } = this.scale;
    const at = y(this.target);
    return [
      drawn("line", { class: "target", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }),
      drawn("text", { class: "targetlabel", x: LEFT + 6, y: at + 15 }, `target ${decimal(this.target)}`),
    ];
  }

  curves() {
    const { x, y } = this.scale;
    return this.series.filter((one) => one.points.length).flatMap((one) => {
      const path = one.points.map(([a, b], index) => `${index ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`);
      const [a, b] = one.points.at(-1);
      return [
        drawn("path", { class: `curve s${one.colour}`, d: path.join("") }),
        drawn("circle", { class: `end s${one.colour}`, cx: x(a), cy: y(b), r: 3.5 }),
      ];
    });
  }

  tick(value) {
    return this.axis === "seconds" ? duration(value) : compact(value);
  }

  xText(value) {
    return this.axis === "seconds" ? duration(value) : `${count(value)} steps`;
  }

  // ---- values under the pointer

  point(offset) {
    const { width } = this.scale ?? {};
    const inside = offset !== null && offset >= LEFT - 8 && offset <= width - RIGHT + 8;
    this.at = inside ? this.scale.back(offset) : null;
    this.mark();
  }

  step(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1, Escape: 0 }[event.key];
    if (direction === undefined || !this.series.some((one) => one.points.length)) return;
    event.preventDefault();
    if (!direction) return this.point(null);
    const all = [...new Set(this.series.flatMap((one) => one.points.map(([a]) => a)))].sort((a, b) => a - b);
    const here = this.at === null ? all.length : all.findIndex((a) => a >= this.at);
    this.at = all[Math.min(all.length - 1, Math.max(0, here + direction))];
    this.mark();
  }

  mark() {
    this.svg.querySelectorAll(".cursor, .under").forEach((old) => old.remove());
    const found = this.at === null ? [] : this.series.flatMap((one) => {
      const near = nearest(one.points, this.at);
      return near ? [{ ...one, near }] : [];
    });
    this.tip.hidden = !found.length;
    if (!found.length) return;
    const { x, y, width, height } = this.scale;
    const at = x(found[0].near[0]);
    this.svg.append(
      drawn("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: height - BOTTOM }),
      ...found.map((one) =>
        drawn("circle", { class: `end under s${one.colour}`, cx: x(one.near[0]), cy: y(one.near[1]), r: 4.5 })),
    );
    this.tip.replaceChildren(element("strong", {}, this.xText(found[0].near[0])), ...found.map((one) =>
      element("div", {}, element("span", { class: `swatch s${one.colour}` }), one.name, element("b", {}, decimal(one.near[1])))));
    const room = this.tip.offsetWidth + 14;
    this.tip.style.transform = `translate(${at + room > width ? at - room : at + 14}px, ${TOP}px)`;
  }
}

const known = (x, y) => x.map((a, index) => [a, y[index]]).filter(([a, b]) => isKnown(a) && isKnown(b));

function nearest(points, at) {
  if (!points.length || at > points.at(-1)[0] * 1.02 + 1e-9) return null;
  return points.reduce((best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best));
}

function nothing(width, height) {
  return drawn("text", { class: "nothing", x: width / 2, y: height / 2 }, "No values yet");
}

function makeScale(points, target, fromZero, width, height) {
  const xs = points.map(([a]) => a), ys = points.map(([, b]) => b);
  if (isKnown(target)) ys.push(target);
  if (fromZero || !ys.length) ys.push(0);
  const most = xs.reduce((a, b) => Math.max(a, b), 0) || 1;
  const yTicks = ticks(least(ys), greatest(ys), Math.max(2, Math.floor(height / 60)));
  const [low, high] = [Math.min(least(ys), yTicks[0]), Math.max(greatest(ys), yTicks.at(-1))];
  const wide = width - LEFT - RIGHT, tall = height - TOP - BOTTOM;
  return {
    width, height, yTicks,
    xTicks: ticks(0, most, Math.max(2, Math.floor(width / 130))).filter((value) => value <= most),
    x: (value) => LEFT + (value / most) * wide,
    y: (value) => TOP + (1 - (value - low) / (high - low || 1)) * tall,
    back: (offset) => ((offset - LEFT) / wide) * most,
  };
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const greatest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

function ticks(low, high, wanted) {
  const rough = (high - low || Math.abs(high) || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const first = Math.floor(low / step), last = Math.ceil(high / step);
  return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}
