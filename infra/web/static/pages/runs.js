// All runs of the directories that the server was given, and those that Redis knows.

import { address } from "../address.js";
import { get } from "../api.js";
import { badge, element, notice, redraw, table, unwell } from "../dom.js";
import { ago, number, percent } from "../format.js";

const COLUMNS = [
  // A run that only Redis knows has no curves.
  { name: "Run", cell: (run) => element("a", { href: address(run.directory ? "run" : "fleet", run.id) }, run.id) },
  { name: "State", cell: state },
  { name: "Step", number: true, cell: (run) => (run.num_steps ? `${number(run.step)} of ${number(run.num_steps)}` : number(run.step)) },
  { name: "Version", number: true, cell: (run) => number(run.version) },
  { name: "Reward", number: true, title: "mean of the last step", cell: (run) => number(run.reward_mean) },
  { name: "Held-out success", number: true, title: "of the last evaluation, sampled", cell: (run) => percent(run.success) },
  { name: "Last heard", number: true, cell: (run) => ago(run.updated_at) },
  { name: "Directory", cell: (run) => run.directory || "only in Redis" },
];

function state(run) {
  if (run.live) return [run.complaints.length ? badge("unwell", "bad") : badge("live", "good"), " ", run.phase ?? ""];
  if (run.ended) return [run.complaints.length ? badge("unwell", "bad") : badge("ended"), " ", run.ended];
  return run.live === null ? [badge("not known"), " without Redis"] : badge("no trainer", "warn");
}

export async function show() {
  const body = element("div");
  async function refresh() {
    const found = await get("/api/runs");
    redraw(body, found.gone ? notice(found.gone) : "", unwell(found),
      table("Runs, newest first", COLUMNS, found.runs, "There is no run yet. `swerve train` starts one."));
  }
  await refresh();
  return { title: "Runs", body, refresh, kinds: ["steps", "evaluations", "endings", "status"] };
}
