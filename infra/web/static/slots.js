// The slots of a worker or judge: one box for each, coloured by what its claim is doing.

import { address } from "./address.js";
import { element } from "./dom.js";
import { ago } from "./format.js";

const COLOURS = { opening: "colour6", agent: "colour0", judging: "colour0", grading: "colour3", publishing: "colour2" };
const MOST_BOXES = 64;

/** The boxes of `worker`; `claims` are all of the run, by request id. */
export function slots(run, worker, claims) {
  const used = worker.running.slice(0, MOST_BOXES).map((id) => element("li", {}, box(run, id, claims.get(id))));
  const idle = Math.max(0, Math.min(worker.slots, MOST_BOXES) - used.length);
  const boxes = [...used, ...Array.from({ length: idle }, () => element("li", {}, element("span", { class: "slot" })))];
  return element("div", { class: "slots" }, element("ol", {}, boxes), ` ${worker.running.length} of ${worker.slots}`);
}

function box(run, id, claim) {
  if (!claim) return element("span", { class: "slot other", title: `${id}, of another run, or ending` });
  const { phase, turn, claimed_at: claimedAt } = claim.lease;
  const said = `${id}: ${phase}${turn ? `, turn ${turn} of ${claim.max_turns}` : ""}, claimed ${ago(claimedAt)}`;
  return element("a", { class: `slot ${COLOURS[phase] ?? "colour8"}`, href: address("rollout", run, id), title: said, "aria-label": said });
}

/** What the colours say, of the phases that there are. */
export function slotLegend(claims) {
  const phases = [...new Set([...claims.values()].map((claim) => claim.lease.phase))].sort();
  return phases.length ? element("ul", { class: "legend" }, phases.map((phase) => element("li", { class: COLOURS[phase] ?? "colour8" }, phase))) : null;
}
