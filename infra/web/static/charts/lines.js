// Curves over steps, with error bands.

import { svg } from "../dom.js";
import { number } from "../format.js";
import { frame } from "./frame.js";

/**
 * A chart of curves. A curve is {name, points: [{x, y, error}], dots, dashed, run}; `error` is the half width of its band at x.
 * Its colour goes by the place of its run, or else by its own place in the list. Points without a number are left out.
 */
export function lines({ title, curves, marks = [], floor, ceiling, format = number }) {
  const drawn = curves
    .map((curve, index) => ({ ...curve, colour: colour(curve.run ?? index), points: curve.points.filter((point) => Number.isFinite(point.y)) }))
    .filter((curve) => curve.points.length);
  if (!drawn.length) return null;
  const xs = [...new Set(drawn.flatMap((curve) => curve.points.map((point) => point.x)))].sort((a, b) => a - b);
  return frame({
    title, marks, xs, format,
    extent: { x: [xs[0], Math.max(xs.at(-1), xs[0] + 1)], y: vertical(drawn, floor, ceiling) },
    legend: drawn.length > 1 ? drawn.map((curve) => [curve.dashed ? `${curve.name} (dashed)` : curve.name, curve.colour]) : [],
    draw: (plot) => drawn.flatMap((curve) => draw(plot, curve)),
    read: (x) => [`step ${number(x)}`, ...drawn.flatMap((curve) => read(curve, x, format, drawn.length > 1))].join(" · "),
  });
}

export function colour(index) {
  return `colour${index % 10}`;
}

function vertical(curves, floor, ceiling) {
  let low = floor ?? Infinity;
  let high = ceiling ?? -Infinity;
  for (const { points } of curves)
    for (const { y, error = 0 } of points) {
      if (floor === undefined) low = Math.min(low, y - error);
      if (ceiling === undefined) high = Math.max(high, y + error);
    }
  if (high > low) return [low, high];
  const room = Math.abs(low) / 2 || 1;
  return [floor ?? low - room, low + room];
}

function draw(plot, curve) {
  const name = curve.colour;
  const at = ({ x, y }) => `${plot.x(x).toFixed(1)},${plot.y(y).toFixed(1)}`;
  const inside = (y) => Math.min(plot.bottom, Math.max(plot.top, plot.y(y)));
  const parts = [];
  if (curve.points.some((point) => point.error)) {
    const upper = curve.points.map(({ x, y, error = 0 }) => `${plot.x(x)},${inside(y + error)}`);
    const lower = curve.points.map(({ x, y, error = 0 }) => `${plot.x(x)},${inside(y - error)}`);
    parts.push(svg("polygon", { class: `band ${name}`, points: [...upper, ...lower.reverse()].join(" ") }));
  }
  parts.push(svg("polyline", { class: `line ${name} ${curve.dashed ? "dashed" : ""}`, points: curve.points.map(at).join(" ") }));
  if (curve.dots || curve.points.length < 3)
    parts.push(...curve.points.flatMap(({ x, y, error }) => [
      error ? svg("line", { class: `whisker ${name}`, x1: plot.x(x), x2: plot.x(x), y1: inside(y - error), y2: inside(y + error) }) : "",
      svg("circle", { class: name, cx: plot.x(x), cy: plot.y(y), r: 3 })].filter(Boolean)));
  return parts;
}

function read(curve, x, format, named) {
  return curve.points.filter((point) => point.x === x).map(({ y, error }) =>
    `${named ? `${curve.name} ` : ""}${format(y)}${error ? ` ± ${format(error)}` : ""}`);
}
