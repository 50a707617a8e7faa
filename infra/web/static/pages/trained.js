// Who gets trained: what was asked for against what the steps used.

import { get, ofRun } from "../api.js";
import { element, facts, notice, redraw, section, svg, table } from "../dom.js";
import { number, percent } from "../format.js";
import { tally } from "./tasks.js";

const KINDS = [["length", "By length, in sampled tokens"], ["difficulty", "By difficulty of the task"], ["outcome", "By outcome"], ["task", "By task"]];
const WIDEST = 2; // doublings on each side of 1 that the bar shows
const MOST_ROWS = 200;

export async function show(here) {
  const body = element("div");
  async function refresh() {
    const found = await get(ofRun(here.run, "represented"));
    redraw(body,
      ...found.warnings.map((text) => notice(`${text[0].toUpperCase()}${text.slice(1)}.`)),
      element("p", {}, `Of ${number(found.num_asked)} training rollouts that were asked for, ${number(found.num_finished)} finished with a reward and `
        + `${number(found.num_trained)} were trained. The ratio is the share among the trained over the share among those asked for: 1 is fair, 0.5 is `
        + "half as often. Intervals are at 95 %, with groups as the draws. Difficulty goes by the task's success over the whole run; tasks that are never or always solved have nothing to teach."),
      section("Why the others were not", facts(Object.entries(found.reasons ?? {}).sort((a, b) => b[1] - a[1])
        .map(([fate, count]) => [fate, number(count)]))),
      ...KINDS.map(([kind, title]) => section(title, list(title, found, found.by[kind] ?? []))));
  }
  await refresh();
  return { title: "Who gets trained", body, refresh, kinds: ["episodes", "steps"] };
}

function list(caption, found, buckets) {
  const tokens = buckets.reduce((sum, one) => sum + one.sampled_tokens, 0);
  const share = (part, total) => (total ? `${number(part)} (${percent(part / total)})` : number(part));
  // Of many, those that are trained least often for how often they are asked for.
  const shown = buckets.length > MOST_ROWS ? [...buckets].sort((a, b) => (a.ratio?.high ?? Infinity) - (b.ratio?.high ?? Infinity)).slice(0, MOST_ROWS) : buckets;
  return [table(caption, [
    { name: caption.replace(/^By (.)/, (_, first) => first.toUpperCase()), cell: (one) => one.name },
    { name: "Asked for", number: true, cell: (one) => share(one.asked, found.num_asked) },
    { name: "Finished", number: true, cell: (one) => share(one.finished, found.num_finished) },
    { name: "Trained", number: true, cell: (one) => share(one.trained, found.num_trained) },
    { name: "Trained tokens", number: true, cell: (one) => share(one.sampled_tokens, tokens) },
    { name: "Ratio, 95 % interval", number: true, cell: (one) => estimate(one.ratio) },
    { name: "Ratio of tokens", number: true, cell: (one) => estimate(one.token_ratio) },
    { name: "Less or more often", cell: (one) => bar(one.ratio) },
    { name: "Not trained because", cell: (one) => tally(one.reasons) },
  ], shown), buckets.length > shown.length ? element("p", { class: "hint" }, `The ${number(MOST_ROWS)} that are trained least often for how often they are asked for, of ${number(buckets.length)}.`) : ""];
}

function estimate(found) {
  return found ? `${number(found.value)} (${number(found.low)} to ${number(found.high)})` : "–";
}

/** The interval as a bar around a line in the middle, on a scale of doublings: left is trained less often than asked for, right more often. */
function bar(ratio) {
  if (!ratio) return "–";
  const x = (value) => 60 + (60 * Math.max(-WIDEST, Math.min(WIDEST, value > 0 ? Math.log2(value) : -WIDEST))) / WIDEST;
  const kind = ratio.high < 1 ? "less" : ratio.low > 1 ? "more" : "even";
  return svg("svg", { class: "ratio", viewBox: "0 0 120 12", width: 120, height: 12, "aria-hidden": "true" },
    svg("rect", { class: kind, x: x(ratio.low), y: 3, width: Math.max(2, x(ratio.high) - x(ratio.low)), height: 6 }),
    svg("circle", { class: kind, cx: x(ratio.value), cy: 6, r: 3.5 }), svg("line", { class: "axis", x1: 60, x2: 60, y1: 0, y2: 12 }));
}
