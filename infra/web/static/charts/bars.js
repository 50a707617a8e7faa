// Stacked bars over steps: what a total is made of.

import { svg } from "../dom.js";
import { number } from "../format.js";
import { frame } from "./frame.js";
import { colour } from "./lines.js";

const MOST_BARS = 160;

/** A chart of stacked bars. A bar is {x, parts: {name: value}}. With `share` every bar is drawn to the same height. */
export function bars({ title, stacks, marks = [], share = false, format = number }) {
  const kept = merged(stacks.filter((stack) => total(stack) > 0));
  if (!kept.length) return null;
  const names = largestFirst(kept);
  const shown = kept.map((stack) => ({ ...stack, size: total(stack), scale: share ? 1 / total(stack) : 1 }));
  const gap = Math.min(...shown.slice(1).map((stack, index) => stack.x - shown[index].x), Infinity);
  const half = Number.isFinite(gap) ? gap / 2 : 0.5;
  return frame({
    title, marks, format, xs: shown.map((stack) => stack.x),
    extent: { x: [shown[0].x - half, shown.at(-1).x + half],
      y: [0, Math.max(...shown.map((stack) => stack.size * stack.scale))] },
    legend: names.map((name, index) => [name, colour(index)]),
    draw: (plot) => shown.flatMap((stack) => draw(plot, stack, names, half)),
    read: (x) => read(shown.find((stack) => stack.x === x), names, share, format),
  });
}

function total(stack) {
  return Object.values(stack.parts).reduce((sum, value) => sum + value, 0);
}

/** Neighbours are averaged, so that each bar can be seen. */
function merged(stacks) {
  const each = Math.ceil(stacks.length / MOST_BARS);
  if (each <= 1) return stacks;
  const found = [];
  for (let start = 0; start < stacks.length; start += each) {
    const group = stacks.slice(start, start + each);
    const parts = {};
    for (const stack of group)
      for (const [name, value] of Object.entries(stack.parts)) parts[name] = (parts[name] ?? 0) + value / group.length;
    found.push({ x: group[0].x, parts });
  }
  return found;
}

function largestFirst(stacks) {
  const sums = new Map();
  for (const stack of stacks)
    for (const [name, value] of Object.entries(stack.parts)) sums.set(name, (sums.get(name) ?? 0) + value);
  return [...sums].filter(([, sum]) => sum > 0).sort((a, b) => b[1] - a[1]).map(([name]) => name);
}

function draw(plot, stack, names, half) {
  const left = plot.x(stack.x - half * 0.85);
  const width = Math.max(1, plot.x(stack.x + half * 0.85) - left);
  let from = 0;
  return names.filter((name) => stack.parts[name]).map((name) => {
    const to = from + stack.parts[name] * stack.scale;
    const bar = svg("rect", { class: `bar ${colour(names.indexOf(name))}`, x: left, width, y: plot.y(to),
      height: Math.max(0, plot.y(from) - plot.y(to)) });
    from = to;
    return bar;
  });
}

function read(stack, names, share, format) {
  const parts = names.filter((name) => stack.parts[name]).map((name) => {
    const value = stack.parts[name];
    return `${name} ${share ? `${Math.round((100 * value) / stack.size)} %` : format(value)}`;
  });
  return [`step ${number(stack.x)}`, ...parts].join(" · ");
}
