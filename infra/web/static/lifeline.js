// The life of a rollout as bars over time: where it was, what its worker did meanwhile, and when it was judged.

import { element, svg } from "./dom.js";
import { duration } from "./format.js";

const WIDTH = 1000; // of the drawing, in its own units; the page stretches it
const HEIGHT = 14;
const LEAST_WIDTH = 2; // so that what was short can be seen

const QUEUED = { name: "in the queue", colour: "colour8" };
const PLAYED = { name: "played", colour: "colour0" };
const WAITED = { name: "waiting for its group and a step", colour: "colour6" };
const TAKEN = { name: "waiting for a checkpoint", colour: "colour5" };
const GENERATED = { name: "generating", colour: "colour2" };
const RAN = { name: "running commands", colour: "colour1" };
const GRADED = { name: "grading", colour: "colour3" };
const JUDGE_QUEUED = { name: "in the judges' queue", colour: "colour9" };
const JUDGED = { name: "judged", colour: "colour7" };

// What is the case from an event on; null: nothing more.
const AFTER = {
  rollout: { enqueued: QUEUED, "re-enqueued": QUEUED, requeued: QUEUED, returned: QUEUED, failed: QUEUED, claimed: PLAYED,
    published: WAITED, read: WAITED, acknowledged: null, withdrawn: null, "dead-lettered": null },
  judge: { enqueued: JUDGE_QUEUED, "re-enqueued": JUDGE_QUEUED, requeued: JUDGE_QUEUED, returned: JUDGE_QUEUED,
    failed: JUDGE_QUEUED, claimed: JUDGED },
};
const OTHERWISE = { rollout: TAKEN, judge: null };

/** A figure of the life of a rollout; null if too little is known of it. */
export function lifeline(rollout) {
  const events = rollout.life ?? [];
  const [start, end] = [events[0]?.at, events.at(-1)?.at];
  if (!(end > start)) return null;
  const lanes = [["It was", spansOf(events, "rollout")], ["Its worker was", work(rollout)], ["Its judge", spansOf(events, "judge")]]
    .filter(([, spans]) => spans.length);
  const drawn = lanes.map(([label, spans]) => element("div", { class: "lane" }, element("span", { class: "label" }, label),
    bar(label, spans, (at) => (WIDTH * (at - start)) / (end - start))));
  const sums = totals(lanes.flatMap(([, spans]) => spans));
  return element("figure", { class: "chart lifeline" }, element("figcaption", {}, `${duration(end - start)} from its first event to its last`),
    drawn, element("ul", { class: "legend" }, sums.map(([state, sum]) => element("li", { class: state.colour }, `${state.name} ${duration(sum)}`))));
}

function spansOf(events, kind) {
  const own = events.filter((event) => event.kind === kind);
  return own.slice(0, -1).flatMap((event, index) => {
    const state = event.what in AFTER[kind] ? AFTER[kind][event.what] : OTHERWISE[kind];
    return state ? [{ state, from: event.at, to: own[index + 1].at }] : [];
  });
}

/** What the worker of the last attempt did, one after the other. When each began is not recorded, so pauses between are left out. */
function work(rollout) {
  if (!rollout.started_at) return [];
  let at = rollout.started_at;
  const steps = rollout.turns.flatMap((turn) => [[GENERATED, turn.generate_s],
    [RAN, turn.actions.reduce((sum, action) => sum + (action.observation?.wall_s ?? 0), 0)]]);
  const spans = steps.filter(([, seconds]) => seconds > 0).map(([state, seconds]) => ({ state, from: at, to: (at += seconds) }));
  const grade = rollout.reward?.grade_s;
  return grade ? [...spans, { state: GRADED, from: Math.max(at, rollout.finished_at - grade), to: Math.max(at, rollout.finished_at) }] : spans;
}

function bar(label, spans, x) {
  const said = totals(spans).map(([state, sum]) => `${state.name} ${duration(sum)}`).join(", ");
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, height: HEIGHT, preserveAspectRatio: "none", role: "img", "aria-label": `${label} ${said}` },
    spans.map(({ state, from, to }) => svg("rect", { class: `bar ${state.colour}`, x: x(from), y: 0, height: HEIGHT,
      width: Math.max(LEAST_WIDTH, x(to) - x(from)) }, svg("title", {}, `${state.name}, ${duration(to - from)}`))));
}

function totals(spans) {
  const sums = new Map();
  for (const { state, from, to } of spans) sums.set(state, (sums.get(state) ?? 0) + to - from);
  return [...sums];
}
