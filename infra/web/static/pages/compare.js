// Two rollouts side by side, usually of one group: from where on do they differ?

import { address } from "../address.js";
import { get, ofRun } from "../api.js";
import { conversation } from "../conversation.js";
import { element, notice } from "../dom.js";
import { lifeline } from "../lifeline.js";
import { head } from "./rollout.js";

export async function show(here) {
  const ids = [here.query.left, here.query.right];
  if (!ids.every(Boolean)) return { title: "Compare", body: notice("Choose two rollouts from the page of one.") };
  const pair = await Promise.all(ids.map((id) => get(ofRun(here.run, "rollouts", id))));
  const same = firstDifference(...pair.map(commands));
  const columns = pair.map((rollout) => element("section", { "aria-label": rollout.request_id },
    element("h2", {}, element("a", { href: address("rollout", here.run, rollout.request_id) }, rollout.request_id)),
    head(here.run, rollout), lifeline(rollout), conversation(here.run, rollout).body));
  return { title: pair[0].task_id, body: element("div", {}, element("p", {}, same), element("div", { class: "pair" }, columns)) };
}

function commands(rollout) {
  return rollout.outline.map((turn) => turn.commands);
}

function firstDifference(left, right) {
  const length = Math.max(left.length, right.length);
  const index = Array.from({ length }, (_, at) => at).find((at) => left[at] !== right[at]);
  return index === undefined ? "Both ran the same commands in every turn." : `Their commands differ from turn ${index + 1} on.`;
}
