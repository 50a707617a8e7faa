// All rollouts of one task, by the weight version that began them: did the policy learn it?

import { address } from "./address.js";
import { get, ofRun } from "./api.js";
import { element } from "./dom.js";
import { number, percent } from "./format.js";

const MOST = 500;
const MOST_OF_VERSION = 32;

/** A list of versions with the reward of each rollout, which is a link to it. */
export async function sameTask(run, rollout) {
  const wanted = { task: rollout.task_id, sort: "version_first", page_size: MOST };
  const found = await get(ofRun(run, "rollouts"), wanted).catch(() => ({ rows: [] }));
  const rows = found.rows.filter((row) => row.task_id === rollout.task_id && row.version_first !== null && row.reward !== null);
  const versions = new Map();
  for (const row of rows) versions.set(row.version_first, [...(versions.get(row.version_first) ?? []), row]);
  const all = element("a", { href: address("rollouts", run, "", { task: rollout.task_id, sort: "version_first" }) }, "All of them as a table");
  return [element("ol", { class: "versions" }, [...versions].map(([version, of]) => ofVersion(run, rollout, version, of))), element("p", {}, all)];
}

function ofVersion(run, rollout, version, rows) {
  const mean = rows.reduce((sum, row) => sum + row.reward, 0) / rows.length;
  const links = rows.slice(0, MOST_OF_VERSION).map((row) => element("a", {
    href: address("rollout", run, row.request_id), class: `badge ${row.reward >= 1 ? "good" : row.reward > 0 ? "warn" : "bad"}`,
    "aria-label": `Rollout ${row.request_id}, reward ${number(row.reward)}`,
    "aria-current": row.request_id === rollout.request_id && "page" }, number(row.reward)));
  const left = rows.length - links.length;
  return element("li", {}, element("span", {}, `Version ${version}, ${percent(mean)} of ${number(rows.length)}`), links, left > 0 ? ` and ${left} more` : "");
}
