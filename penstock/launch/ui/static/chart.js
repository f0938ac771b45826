// Line charts by uPlot: several runs in the same axes, values under the pointer or the arrow keys.

import { compact, count, decimal, duration, element, isKnown } from "/dom.js";

const { uPlot } = globalThis; // vendor/uPlot.iife.min.js, which index.html loads first
const LEFT = 56, TOP = 10, BOTTOM = 30;
// Between two ticks: 1, 2 or 5 times a power of ten, which `decimal` writes in full.
const STEPS = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** (power - 1))).flat();

const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export class Chart {
  // fromZero: the vertical axis begins at 0.
  constructor(place, { label, fromZero }) {
    Object.assign(this, { label, fromZero, series: [], axis: "env_steps", target: null, plot: null, key: "" });
    this.place = element("div", { class: "plot", tabindex: 0, role: "img" });
    this.tip = element("div", { class: "tip", role: "status", hidden: true });
    this.nothing = element("p", { class: "nothing" }, "No values yet");
    place.replaceChildren(this.place, this.tip);
    new ResizeObserver(() => (this.plot ? this.plot.setSize(this.size()) : this.rebuild())).observe(place);
    new MutationObserver(() => this.rebuild()).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    this.place.addEventListener("keydown", (event) => this.step(event));
    this.place.addEventListener("blur", () => this.leave());
  }

  // series: [{ name, colour, x, y }], arrays of equal length; null in y: not known.
  update(series, { axis, target = null }) {
    this.series = series.map((one) => ({ ...one, points: known(one.x, one.y) }));
    this.axis = axis;
    this.target = target;
    this.place.setAttribute("aria-label", this.summary());
    const key = JSON.stringify([axis, target, series.map((one) => [one.name, one.colour])]);
    if (key !== this.key || !this.plot) {
      this.key = key;
      this.rebuild();
    } else this.plot.setData(this.data());
  }

  size() {
    const { width, height } = this.place.getBoundingClientRect();
    return { width, height };
  }

  data() {
    const shown = this.series.map((one) => [one.points.map(([a]) => a), one.points.map(([, b]) => b)]);
    return shown.length ? uPlot.join(shown) : [[], []];
  }

  rebuild() {
    this.plot?.destroy();
    const empty = !this.series.some((one) => one.points.length);
    this.plot = null;
    this.place.replaceChildren(...(empty ? [this.nothing] : []));
    if (empty || !this.size().width) return;
    const axis = (values, size) => ({
      stroke: shade("muted"), grid: { stroke: shade("grid") }, ticks: { show: false }, size, incrs: STEPS,
      values: (_, ticks) => ticks.map(values), font: "12px system-ui",
    });
    this.plot = new uPlot({
      ...this.size(),
      legend: { show: false },
      scales: { x: { time: false, range: (_, __, most) => [0, most || 1] }, y: { range: (_, low, high) => this.range(low, high) } },
      padding: [TOP, 16, 0, 0],
      axes: [{ ...axis((value) => this.tick(value), BOTTOM), grid: { show: false } }, axis(compact, LEFT)],
      series: [{}, ...this.series.map((one) => ({
        label: one.name, stroke: shade(`s${one.colour}`), width: 2, spanGaps: true, points: { show: false },
      }))],
      cursor: { y: false, drag: { setScale: false, x: false, y: false } },
      hooks: { setCursor: [() => this.mark()], draw: [(plot) => this.decorate(plot)] },
    }, this.data(), this.place);
  }

  range(low, high) {
    const values = [low, high, ...(isKnown(this.target) ? [this.target] : []), ...(this.fromZero ? [0] : [])];
    return uPlot.rangeNum(Math.min(...values), Math.max(...values), { min: { pad: 0.05, soft: 0, mode: this.fromZero ? 1 : 3 }, max: { pad: 0.05 } });
  }

  // The target, and the newest value of each series.
  decorate({ ctx, bbox, valToPos }) {
    ctx.save();
    if (isKnown(this.target)) {
      const y = valToPos(this.target, "y", true);
      ctx.strokeStyle = ctx.fillStyle = shade("good");
      ctx.setLineDash([5 * devicePixelRatio, 5 * devicePixelRatio]);
      ctx.lineWidth = 1.5 * devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.textAlign = "left";
      ctx.font = `600 ${12 * devicePixelRatio}px system-ui`;
      ctx.fillText(`target ${decimal(this.target)}`, bbox.left + 6 * devicePixelRatio, y + 15 * devicePixelRatio);
    }
    for (const one of this.series.filter((one) => one.points.length)) {
      const [a, b] = one.points.at(-1);
      ctx.fillStyle = shade(`s${one.colour}`);
      ctx.beginPath();
      ctx.arc(valToPos(a, "x", true), valToPos(b, "y", true), 3.5 * devicePixelRatio, 0, 7);
      ctx.fill();
    }
    ctx.restore();
  }

  summary() {
    const said = this.series.filter((one) => one.points.length).map((one) => {
      const [x, y] = one.points.at(-1);
      return `${one.name}: ${decimal(y)} at ${this.xText(x)}`;
    });
    return `${this.label}. ${said.join("; ") || "No values yet"}. Arrow keys read the values.`;
  }

  tick(value) {
    return this.axis === "seconds" ? duration(value) : compact(value);
  }

  xText(value) {
    return this.axis === "seconds" ? duration(value) : `${count(value)} steps`;
  }

  // ---- values under the pointer

  step(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1, Escape: 0 }[event.key];
    if (direction === undefined || !this.plot) return;
    event.preventDefault();
    if (!direction) return this.leave();
    const xs = this.plot.data[0];
    const here = this.plot.cursor.idx ?? xs.length;
    const at = Math.min(xs.length - 1, Math.max(0, here + direction));
    this.plot.setCursor({ left: this.plot.valToPos(xs[at], "x"), top: TOP });
  }

  leave() {
    this.plot?.setCursor({ left: -10, top: -10 });
  }

  mark() {
    const { idx, left } = this.plot.cursor;
    const at = isKnown(idx) && left >= 0 ? this.plot.data[0][idx] : null;
    const found = at === null ? [] : this.series.flatMap((one) => {
      const near = nearest(one.points, at);
      return near ? [{ ...one, near }] : [];
    });
    this.tip.hidden = !found.length;
    if (!found.length) return;
    this.tip.replaceChildren(element("strong", {}, this.xText(at)), ...found.map((one) =>
      element("div", {}, element("span", { class: `swatch s${one.colour}` }), one.name, element("b", {}, decimal(one.near[1])))));
    const x = left + LEFT, room = this.tip.offsetWidth + 14;
    this.tip.style.transform = `translate(${x + room > this.size().width ? x - room : x + 14}px, ${TOP}px)`;
  }
}

const known = (x, y) => x.map((a, index) => [a, y[index]]).filter(([a, b]) => isKnown(a) && isKnown(b));

function nearest(points, at) {
  if (!points.length || at > points.at(-1)[0] * 1.02 + 1e-9) return null;
  return points.reduce((best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best));
}
