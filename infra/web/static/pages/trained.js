// Who gets trained: what was offered against what the steps used.

import { get, ofRun } from "../api.js";
import { element, facts, redraw, section, svg, table } from "../dom.js";
import { number } from "../format.js";
import { tally } from "./tasks.js";

const KINDS = [["length", "By length"], ["repository", "By repository"], ["difficulty", "By difficulty"], ["outcome", "By outcome"]];
const WIDEST = 2; // doublings on each side of 1 that the bar shows

export async function show(here) {
  const body = element("div");
  async function refresh() {
    const found = await get(ofRun(here.run, "represented"));
    redraw(body,
      element("p", {}, `${number(found.num_trained)} of ${number(found.num_offered)} training episodes were trained. The ratio is the `
        + "share among the trained over the share among the offered: 1 is fair, 0.5 is half as often as offered."),
      section("Why the others were not", facts(Object.entries(found.reasons ?? {}).sort((a, b) => b[1] - a[1])
        .map(([fate, count]) => [fate, number(count)]))),
      ...KINDS.map(([kind, title]) => section(title, list(title, found.by[kind] ?? []))));
  }
  await refresh();
  return { title: "Who gets trained", body, refresh, kinds: ["episodes", "steps"] };
}

function list(caption, cells) {
  return table(caption, [
    { name: caption.replace(/^By (.)/, (_, first) => first.toUpperCase()), cell: (cell) => cell.bucket },
    { name: "Offered", number: true, cell: (cell) => number(cell.offered) },
    { name: "Trained", number: true, cell: (cell) => number(cell.trained) },
    { name: "Ratio", number: true, cell: (cell) => number(cell.ratio) },
    { name: "Less or more often", cell: (cell) => bar(cell.ratio) },
    { name: "Not trained because", cell: (cell) => tally(cell.reasons) },
  ], cells);
}

/** A bar from the middle, on a scale of doublings: left is trained less often than offered, right more often. */
function bar(ratio) {
  if (ratio === null || ratio === undefined) return "–";
  const doublings = ratio > 0 ? Math.max(-WIDEST, Math.min(WIDEST, Math.log2(ratio))) : -WIDEST;
  const length = (60 * Math.abs(doublings)) / WIDEST;
  return svg("svg", { class: "ratio", viewBox: "0 0 120 12", width: 120, height: 12, "aria-hidden": "true" },
    svg("rect", { class: doublings < 0 ? "less" : "more", x: doublings < 0 ? 60 - length : 60, y: 1, width: length, height: 10 }),
    svg("line", { class: "axis", x1: 60, x2: 60, y1: 0, y2: 12 }));
}
