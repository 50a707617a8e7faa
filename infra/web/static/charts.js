// Charts over steps or time: curves with intervals, and stacked bars, which say what a total is made of. All share their size, axes, marks,
// and a cursor that the mouse and the arrow keys move.
//
// A view is {log, smoothing, range, formatX, label, open, zoom}: whether heights are logarithmic; the share of what came before in a
// smoothed curve, 0 for none; the shown [low, high] of x, or null; how an x is written, and what x is; and what is called with an x that
// was chosen, and with a range that was drawn with the mouse.

import { element, say, svg } from "./dom.js";
import { number } from "./format.js";

const HEIGHT = 200;
const PUBLISHED_PX = 5;
const NEAR_PX = 400; // charts so far below or above what is seen are drawn
const DRAG_PX = 6; // a shorter way of the mouse is a click
export const STEPS = { log: false, smoothing: 0, range: null, formatX: number, label: "step", open: null, zoom: null };
const MARGIN = { top: 10, right: 12, bottom: 24, left: 52 };

/** Larger numbers are not drawn: differences and sums of them would be infinite. */
const canBeDrawn = (value) => Number.isFinite(value) && Math.abs(value) < 1e300;

/** Round values that divide low..high into about `count` parts. */
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw);
  const first = Math.ceil(low / step - 1e-9);
  const found = [];
  for (let index = first; index * step <= high + step * 1e-9; index += 1) found.push(Number((index * step).toPrecision(12)));
  return found;
}

/** A function from a value in low..high to a coordinate in from..to. */
function scale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

/**
 * A figure that draws itself when it comes near to what the reader sees, and again when its width changes: a page of a long run has
 * hundreds of thousands of points, most of them far below.
 *
 * `extent` is {x: [low, high], y: [low, high]}; `draw(plot)` returns SVG elements, where plot has x(), y(), bottom and width;
 * `xs` are the positions of the cursor, and `read(x)` says what is there. `legend` is a list of [name, class].
 */
function frame({ title, extent, draw, xs, read, view, legend = [], marks = [], format = number }) {
  const canvas = svg("svg", { role: "img", tabindex: 0, height: HEIGHT,
    "aria-label": `${title}. Arrow keys move along the curve.${view.open ? " Enter opens the step." : ""}` });
  const readout = element("output", { class: "readout" });
  const names = element("ul", { class: "legend" }, legend.map(([name, colour]) =>
    element("li", { class: colour }, name)));
  let cursor = null;
  let plot = null;
  let pressed = null; // where the mouse was pressed, in pixels

  function render() {
    const width = Math.max(200, canvas.clientWidth || 400);
    canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const bottom = HEIGHT - MARGIN.bottom;
    plot = { width, bottom, top: MARGIN.top, left: MARGIN.left, right: width - MARGIN.right,
      value: scale(MARGIN.left, width - MARGIN.right, ...extent.x),
      x: scale(...extent.x, MARGIN.left, width - MARGIN.right), y: vertically(view, extent.y, bottom) };
    say(canvas, axes(plot, extent, format, view), marksOf(plot, marks, extent.x), draw(plot));
    point(cursor);
  }

  function point(x) {
    cursor = x;
    canvas.querySelector(".cursor")?.remove();
    say(readout, x === null ? "" : [read(x), ...happened(marks, x)].join(" · "));
    if (x !== null) canvas.append(svg("line",
      { class: "cursor", x1: plot.x(x), x2: plot.x(x), y1: plot.top, y2: plot.bottom }));
  }

  const across = (event) => event.clientX - canvas.getBoundingClientRect().left;
  const nearest = (at) => xs.reduce((best, x) => (Math.abs(plot.x(x) - at) < Math.abs(plot.x(best) - at) ? x : best));

  function select(from, to) {
    canvas.querySelector(".chosen")?.remove();
    if (from !== null && Math.abs(to - from) >= DRAG_PX) canvas.append(svg("rect",
      { class: "chosen", x: Math.min(from, to), width: Math.abs(to - from), y: plot.top, height: plot.bottom - plot.top }));
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!xs.length || !plot) return;
    point(nearest(across(event)));
    if (pressed !== null) select(pressed, across(event));
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 0) pressed = across(event);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (pressed === null || !xs.length) return;
    const [from, to] = [pressed, across(event)].sort((a, b) => a - b);
    pressed = null;
    select(null);
    if (to - from >= DRAG_PX) view.zoom?.([plot.value(from), plot.value(to)]);
    else view.open?.(nearest(to));
  });
  canvas.addEventListener("pointerleave", () => {
    pressed = null;
    select(null);
    point(null);
  });
  canvas.addEventListener("blur", () => point(null));
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && cursor !== null) view.open?.(cursor);
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !xs.length || !plot) return;
    event.preventDefault();
    const at = cursor === null ? (by > 0 ? -1 : xs.length) : xs.indexOf(cursor);
    point(xs[Math.min(xs.length - 1, Math.max(0, at + by))]);
  });
  canvas.addEventListener("print", render);
  whenNear(canvas, render);
  const about = [view.log && "logarithmic", view.smoothing > 0 && "smoothed"].filter(Boolean).join(", ");
  return element("figure", { class: view.open ? "chart opens" : "chart" },
    element("figcaption", {}, title, about ? element("small", {}, ` ${about}`) : ""), names, canvas, readout);
}

/** Call `render` when the element is near to what the reader sees, and then whenever its size changes. */
function whenNear(canvas, render) {
  const isNear = ({ top, bottom }) => bottom > -NEAR_PX && top < window.innerHeight + NEAR_PX;
  let isDrawn = false;
  const draw = () => {
    isDrawn = true;
    coming.disconnect();
    render();
  };
  const coming = new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && draw(), { rootMargin: `${NEAR_PX}px` });
  coming.observe(canvas);
  // It is called before the page is painted, so a chart that is drawn anew does not vanish for a moment.
  new ResizeObserver(() => (isDrawn || isNear(canvas.getBoundingClientRect())) && draw()).observe(canvas);
}

// Who prints a page wants all of it.
window.addEventListener("beforeprint", () => document.querySelectorAll(".chart svg").forEach((one) => one.dispatchEvent(new Event("print"))));

/** The coordinate of a height: logarithmic where the view and the values allow it. */
function vertically(view, [low, high], bottom) {
  if (!(view.log && low > 0)) return scale(low, high, bottom, MARGIN.top);
  const place = scale(Math.log10(low), Math.log10(high), bottom, MARGIN.top);
  return (value) => place(Math.log10(Math.max(value, Number.MIN_VALUE)));
}

/** Powers of ten within low..high, with 2 and 5 times them where there are few. */
function powers(low, high) {
  const found = [];
  const factors = Math.log10(high / low) < 2 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1)
    found.push(...factors.map((factor) => Number((factor * 10 ** power).toPrecision(1))).filter((value) => value >= low && value <= high));
  return found.length ? found : [low, high];
}

function axes(plot, extent, format, view) {
  const isLog = view.log && extent.y[0] > 0;
  const across = ticks(...extent.x, Math.min(8, plot.width / 70)).filter((value) => view.label !== "step" || Number.isInteger(value));
  const up = isLog ? powers(...extent.y) : ticks(...extent.y, 4);
  const named = format === number && !isLog ? alike(up) : format;
  const rows = up.flatMap((value) => [
    svg("line", { class: "grid", x1: plot.left, x2: plot.right, y1: plot.y(value), y2: plot.y(value) }),
    svg("text", { class: "tick end", x: plot.left - 6, y: plot.y(value) + 4 }, named(value)),
  ]);
  return [...rows, svg("text", { class: "tick", x: 0, y: plot.bottom + 16 }, view.label), ...across.map((value) =>
    svg("text", { class: "tick middle", x: plot.x(value), y: plot.bottom + 16 }, view.formatX(value)))];
}

/** A format in which all ticks of an axis have the same number of digits. */
function alike(values) {
  const step = Math.abs((values[1] ?? 1) - (values[0] ?? 0));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (digits > 4) return (value) => (value ? value.toExponential(1) : "0");
  return (value) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Dashed lines where something happened, and ticks on the axis where weights were published; the text is their tooltip. */
function marksOf(plot, marks, [low, high]) {
  // Marks at one place look like one: of a long run there are more publications than pixels.
  const places = new Map(marks.filter((mark) => mark.x >= low && mark.x <= high)
    .map((mark) => [`${mark.kind} ${Math.round(plot.x(mark.x))}`, mark]));
  return [...places.values()].map((mark) =>
    svg("line", { class: `mark ${mark.kind}`, x1: plot.x(mark.x), x2: plot.x(mark.x),
      y1: mark.kind === "published" ? plot.bottom - PUBLISHED_PX : plot.top, y2: plot.bottom },
      svg("title", {}, `step ${mark.step}: ${mark.text}`)));
}

/** The texts of the dashed lines at a place, so that they can be read without a mouse. */
function happened(marks, x) {
  return marks.filter((mark) => mark.x === x && mark.kind !== "published").map((mark) => mark.text);
}

/**
 * A chart of curves. A curve is {name, points: [{x, y, low, high}], dots, dashed, run}; its band at x is from `low` to `high`.
 * Its colour goes by the place of its run, or else by its own place in the list. Points without a number are left out.
 */
export function lines({ title, curves, marks = [], floor, ceiling, format = number, view = STEPS }) {
  const drawn = curves
    .map((curve, index) => ({ ...curve, colour: colour(curve.run ?? index), points: shown(curve.points, view) }))
    .filter((curve) => curve.points.length);
  if (!drawn.length) return null;
  const xs = [...new Set(drawn.flatMap((curve) => curve.points.map((point) => point.x)))].sort((a, b) => a - b);
  return frame({
    title, marks, xs, format, view,
    extent: { x: view.range ?? [xs[0], Math.max(xs.at(-1), xs[0] + 1)], y: vertical(drawn, view, floor, ceiling) },
    legend: drawn.length > 1 ? drawn.map((curve) => [curve.dashed ? `${curve.name} (dashed)` : curve.name, curve.colour]) : [],
    draw: (plot) => drawn.flatMap((curve) => draw(plot, curve)),
    read: (x) => [`${view.label} ${view.formatX(x)}`, ...drawn.flatMap((curve) => read(curve, x, format, drawn.length > 1))].join(" · "),
  });
}

/** The points of a curve that the view shows, each with its smoothed height where the view smooths. */
function shown(points, { log, range, smoothing }) {
  const found = points.filter(({ x, y }) => canBeDrawn(x) && canBeDrawn(y) && (!log || y > 0));
  const smooth = smoothing > 0 && found.length > 2 ? smoothed(found, smoothing) : found;
  return range ? smooth.filter(({ x }) => x >= range[0] && x <= range[1]) : smooth;
}

/** An exponential moving average without the bias of its start: as if what came before the first point had no weight. */
function smoothed(points, share) {
  let [mean, weight] = [0, 0];
  return points.map((point) => {
    mean = share * mean + (1 - share) * point.y;
    weight = share * weight + (1 - share);
    return { ...point, smooth: mean / weight };
  });
}

export function colour(index) {
  return `colour${index % 10}`;
}

function vertical(curves, { log, range }, floor, ceiling) {
  // Who enlarges a part of a curve wants to see how it differs there.
  const [least, most] = range || log ? [undefined, undefined] : [floor, ceiling];
  let low = least ?? Infinity;
  let high = most ?? -Infinity;
  for (const { points } of curves)
    for (const point of points) {
      const [y, ends] = [point.y, hasInterval(point) ? point : {}];
      if (least === undefined) low = Math.min(low, log && !(ends.low > 0) ? y : ends.low ?? y);
      if (most === undefined) high = Math.max(high, ends.high ?? y);
    }
  if (high > low) return [low, high];
  const room = Math.abs(low) / 2 || 1;
  return log ? [low / 2, low * 2] : [least ?? low - room, low + room];
}

function hasInterval({ low, high }) {
  return canBeDrawn(low) && canBeDrawn(high);
}

/** The points that can be seen: of each pixel's the one of least height and the one of most. */
function thinned(points, plot, height) {
  const found = new Map();
  for (const point of points) {
    const pixel = Math.round(plot.x(point.x));
    const [least, most] = found.get(pixel) ?? [point, point];
    found.set(pixel, [height(point) < height(least) ? point : least, height(point) > height(most) ? point : most]);
  }
  return [...found.values()].flatMap(([least, most]) => (least === most ? [least] : [least, most].sort((a, b) => a.x - b.x)));
}

function draw(plot, curve) {
  const name = curve.colour;
  const inside = (y) => Math.min(plot.bottom, Math.max(plot.top, plot.y(y)));
  const along = (height, place = plot.y) => thinned(curve.points, plot, height)
    .map((point) => `${plot.x(point.x).toFixed(1)},${place(height(point)).toFixed(1)}`);
  const line = (height, kind) => svg("polyline", { class: `line ${name} ${curve.dashed ? "dashed" : ""} ${kind}`, points: along(height).join(" ") });
  const parts = [];
  if (curve.points.some(hasInterval)) {
    const upper = along((point) => (hasInterval(point) ? point.high : point.y), inside);
    const lower = along((point) => (hasInterval(point) ? point.low : point.y), inside);
    parts.push(svg("polygon", { class: `band ${name}`, points: [...upper, ...lower.reverse()].join(" ") }));
  }
  const isSmooth = curve.points.some((point) => point.smooth !== undefined);
  parts.push(line((point) => point.y, isSmooth ? "raw" : ""));
  if (isSmooth) parts.push(line((point) => point.smooth, ""));
  if (curve.dots || curve.points.length < 3)
    parts.push(...curve.points.flatMap((point) => [
      hasInterval(point) ? svg("line", { class: `whisker ${name}`, x1: plot.x(point.x), x2: plot.x(point.x), y1: inside(point.low), y2: inside(point.high) }) : "",
      svg("circle", { class: name, cx: plot.x(point.x), cy: plot.y(point.y), r: 3 })].filter(Boolean)));
  return parts;
}

function read(curve, x, format, named) {
  return curve.points.filter((point) => point.x === x).map((point) =>
    `${named ? `${curve.name} ` : ""}${format(point.y)}${point.smooth === undefined ? "" : ` (smoothed ${format(point.smooth)})`}${hasInterval(point) ? ` (${format(point.low)} to ${format(point.high)}, 95 %)` : ""}`);
}

const MOST_BARS = 160;

/** A chart of stacked bars. A bar is {x, parts: {name: value}}. With `share` every bar is drawn to the same height. */
export function bars({ title, stacks, marks = [], share = false, format = number, view = STEPS }) {
  const range = view.range ?? [-Infinity, Infinity];
  const kept = merged(stacks.filter((stack) => total(stack) > 0 && canBeDrawn(total(stack)) && stack.x >= range[0] && stack.x <= range[1]));
  if (!kept.length) return null;
  const names = largestFirst(kept);
  const stacked = kept.map((stack) => ({ ...stack, size: total(stack), scale: share ? 1 / total(stack) : 1 }));
  const gap = Math.min(...stacked.slice(1).map((stack, index) => stack.x - stacked[index].x), Infinity);
  const half = Number.isFinite(gap) ? gap / 2 : 0.5;
  return frame({
    title, marks, format, view: { ...view, log: false, smoothing: 0 }, xs: stacked.map((stack) => stack.x),
    extent: { x: [stacked[0].x - half, stacked.at(-1).x + half],
      y: [0, Math.max(...stacked.map((stack) => stack.size * stack.scale))] },
    legend: names.map((name, index) => [name, colour(index)]),
    draw: (plot) => stacked.flatMap((stack) => drawBars(plot, stack, names, half)),
    read: (x) => readBars(stacked.find((stack) => stack.x === x), names, share, format, view),
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

function drawBars(plot, stack, names, half) {
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

function readBars(stack, names, share, format, view) {
  const parts = names.filter((name) => stack.parts[name]).map((name) => {
    const value = stack.parts[name];
    return `${name} ${share ? `${Math.round((100 * value) / stack.size)} %` : format(value)}`;
  });
  return [`${view.label} ${view.formatX(stack.x)}`, ...parts].join(" · ");
}
