// What every chart shares: its size, axes, marks, and a cursor that the mouse and the arrow keys move.

import { element, svg } from "../dom.js";
import { number } from "../format.js";

const HEIGHT = 200;
const PUBLISHED_PX = 5;
const MARGIN = { top: 10, right: 12, bottom: 24, left: 52 };

/** Round values that divide low..high into about `count` parts. */
export function ticks(low, high, count) {
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
 * A figure that draws itself again when its width changes.
 *
 * `extent` is {x: [low, high], y: [low, high]}; `draw(plot)` returns SVG elements, where plot has x(), y(), bottom and width;
 * `xs` are the positions of the cursor, and `read(x)` says what is there. `legend` is a list of [name, class].
 */
export function frame({ title, extent, draw, xs, read, legend = [], marks = [], format = number }) {
  const canvas = svg("svg", { role: "img", tabindex: 0, height: HEIGHT,
    "aria-label": `${title}. Arrow keys move along the steps.` });
  const readout = element("output", { class: "readout" });
  const names = element("ul", { class: "legend" }, legend.map(([name, colour]) =>
    element("li", { class: colour }, name)));
  let cursor = null;
  let plot = null;

  function render() {
    const width = Math.max(200, canvas.clientWidth || 400);
    canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const bottom = HEIGHT - MARGIN.bottom;
    plot = { width, bottom, top: MARGIN.top, left: MARGIN.left, right: width - MARGIN.right,
      x: scale(...extent.x, MARGIN.left, width - MARGIN.right), y: scale(...extent.y, bottom, MARGIN.top) };
    canvas.replaceChildren(...axes(plot, extent, format), ...marksOf(plot, marks, extent.x), ...draw(plot));
    point(cursor);
  }

  function point(x) {
    cursor = x;
    canvas.querySelector(".cursor")?.remove();
    readout.textContent = x === null ? "" : [read(x), ...happened(marks, x)].join(" · ");
    if (x !== null) canvas.append(svg("line",
      { class: "cursor", x1: plot.x(x), x2: plot.x(x), y1: plot.top, y2: plot.bottom }));
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!xs.length) return;
    const at = event.clientX - canvas.getBoundingClientRect().left;
    point(xs.reduce((best, x) => (Math.abs(plot.x(x) - at) < Math.abs(plot.x(best) - at) ? x : best)));
  });
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("blur", () => point(null));
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !xs.length) return;
    event.preventDefault();
    const at = cursor === null ? (by > 0 ? -1 : xs.length) : xs.indexOf(cursor);
    point(xs[Math.min(xs.length - 1, Math.max(0, at + by))]);
  });
  render();
  new ResizeObserver(render).observe(canvas);
  return element("figure", { class: "chart" }, element("figcaption", {}, title), names, canvas, readout);
}

function axes(plot, extent, format) {
  const across = ticks(...extent.x, Math.min(8, plot.width / 70)).filter(Number.isInteger);
  const up = ticks(...extent.y, 4);
  const named = format === number ? alike(up) : format;
  const rows = up.flatMap((value) => [
    svg("line", { class: "grid", x1: plot.left, x2: plot.right, y1: plot.y(value), y2: plot.y(value) }),
    svg("text", { class: "tick end", x: plot.left - 6, y: plot.y(value) + 4 }, named(value)),
  ]);
  return [...rows, svg("text", { class: "tick", x: 0, y: plot.bottom + 16 }, "step"), ...across.map((value) =>
    svg("text", { class: "tick middle", x: plot.x(value), y: plot.bottom + 16 }, number(value)))];
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
  return marks.filter((mark) => mark.step >= low && mark.step <= high).map((mark) =>
    svg("line", { class: `mark ${mark.kind}`, x1: plot.x(mark.step), x2: plot.x(mark.step),
      y1: mark.kind === "published" ? plot.bottom - PUBLISHED_PX : plot.top, y2: plot.bottom },
      svg("title", {}, `step ${mark.step}: ${mark.text}`)));
}

/** The texts of the dashed lines at a step, so that they can be read without a mouse. */
function happened(marks, step) {
  return marks.filter((mark) => mark.step === step && mark.kind !== "published").map((mark) => mark.text);
}
