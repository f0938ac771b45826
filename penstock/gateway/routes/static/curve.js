// The mean return of a training over its updates, as a picture with its last figures in words.

import { element } from "./elements.js";

const WIDTH = 600;
const HEIGHT = 160;
const SVG = "http://www.w3.org/2000/svg";

export function drawn({ updates, meanReturn }) {
  const points = updates.map((one, index) => [one, meanReturn[index]]).filter(([, value]) => value !== null);
  if (points.length === 0) return element("p", {}, "Nothing is measured yet.");
  const [last, value] = points.at(-1);
  const told = `Mean return ${value.toPrecision(4)} after ${last} updates`;
  return element("figure", {}, picture(points, told), element("figcaption", {}, told));
}

function picture(points, told) {
  const low = Math.min(...points.map(([, value]) => value));
  const span = Math.max(...points.map(([, value]) => value)) - low || 1;
  const end = points.at(-1)[0] || 1;
  const place = ([update, value]) =>
    `${((update / end) * WIDTH).toFixed(1)},${(HEIGHT - ((value - low) / span) * HEIGHT).toFixed(1)}`;
  const line = shape("polyline", { points: points.map(place).join(" ") });
  const made = shape("svg", { viewBox: `0 -4 ${WIDTH} ${HEIGHT + 8}`, role: "img", "aria-label": told });
  made.append(line);
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
