// The life of a rollout as bars over time: where it was, what its worker did meanwhile, and when it was judged.

import { badge, element, svg, table } from "./dom.js";
import { duration, number } from "./format.js";

const WIDTH = 1000; // of the drawing, in its own units; the page stretches it
const HEIGHT = 14;
const LEAST_WIDTH = 2; // so that what was short can be seen

const QUEUED = { name: "in the queue", colour: "colour8" };
const PLAYED = { name: "played", colour: "colour0" };
const WAITED = { name: "waiting for its group and a step", colour: "colour6" };
const TAKEN = { name: "waiting for a checkpoint", colour: "colour5" };
const OPENED = { name: "starting its container", colour: "colour8" };
const AWAITED = { name: "waiting for an engine", colour: "colour4" };
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

/** What the worker of the last attempt did, by the times that it recorded. Commands follow their reply at once, one after the other. */
function work(rollout) {
  const { started_at: start, finished_at: end, seconds } = rollout;
  if (!start) return [];
  const opened = seconds?.open_s ? [{ state: OPENED, from: start, to: start + seconds.open_s }] : [];
  const graded = rollout.reward?.grade_s ? [{ state: GRADED, from: end - rollout.reward.grade_s, to: end }] : [];
  return [...opened, ...rollout.outline.flatMap(ofTurn), ...graded];
}

/** The spans of one turn: waiting for an engine, the reply, and the commands. */
function ofTurn(turn) {
  if (!turn.asked_at) return [];
  const [begun, replied] = [turn.asked_at + turn.engine_wait_s, turn.asked_at + turn.generate_s];
  return [{ state: AWAITED, from: turn.asked_at, to: begun }, { state: GENERATED, from: begun, to: replied },
    { state: RAN, from: replied, to: replied + turn.command_s }].filter(({ from, to }) => to > from);
}

/** A table of the turns on the clock of the rollout, each with a way to it; null where their times are not known. */
export function turnsOnTheClock(rollout, open) {
  const turns = rollout.outline.map((turn, index) => ({ ...turn, index })).filter((turn) => turn.asked_at);
  if (!turns.length) return null;
  const spans = turns.map(ofTurn);
  const start = rollout.started_at;
  const end = Math.max(rollout.finished_at, ...spans.flat().map(({ to }) => to));
  const spansOfTurn = new Map(turns.map((turn, place) => [turn, spans[place]]));
  return table("Turns on the clock of the worker", [
    { name: "Turn", number: true, cell: (turn) => element("button", { type: "button", class: "link", click: () => open(turn.index) }, turn.index + 1) },
    { name: "Asked after", number: true, cell: (turn) => duration(turn.asked_at - start) },
    { name: "Waited", number: true, cell: (turn) => duration(turn.engine_wait_s) },
    { name: "Reply", number: true, cell: (turn) => duration(turn.generate_s - turn.engine_wait_s) },
    { name: "Commands", number: true, cell: (turn) => [duration(turn.command_s), turn.is_failed ? [" ", badge("failed", "warn")] : ""] },
    { name: "Judge", number: true, cell: (turn) => (turn.score === null ? "" : number(turn.score)) },
    { name: "On the clock", cell: (turn) => bar(`Turn ${turn.index + 1}`, spansOfTurn.get(turn), (at) => (WIDTH * (at - start)) / (end - start)) },
  ], turns);
}

const MOST_SPANS = 500; // more cannot be told apart

function bar(label, spans, x) {
  const said = totals(spans).map(([state, sum]) => `${state.name} ${duration(sum)}`).join(", ");
  const drawn = spans.length > MOST_SPANS ? longest(spans, x) : spans;
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, height: HEIGHT, preserveAspectRatio: "none", role: "img", "aria-label": `${label} ${said}` },
    drawn.map(({ state, from, to }) => svg("rect", { class: `bar ${state.colour}`, x: x(from), y: 0, height: HEIGHT,
      width: Math.max(LEAST_WIDTH, x(to) - x(from)) }, svg("title", {}, `${state.name}, ${duration(to - from)}`))));
}

/** The longest span of each small part of the drawing. */
function longest(spans, x) {
  const found = new Map();
  for (const span of spans) {
    const part = Math.floor(x(span.from) / LEAST_WIDTH);
    const before = found.get(part);
    if (!before || before.to - before.from < span.to - span.from) found.set(part, span);
  }
  return [...found.values()];
}

function totals(spans) {
  const sums = new Map();
  for (const { state, from, to } of spans) sums.set(state, (sums.get(state) ?? 0) + to - from);
  return [...sums];
}
