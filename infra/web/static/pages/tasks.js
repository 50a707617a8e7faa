// Each task of a run: whether it teaches, what it cost, how it went over versions, and whether its grader can be trusted.

import { address, remember } from "../address.js";
import { get, ofRun } from "../api.js";
import { badge, element, redraw, section, table } from "../dom.js";
import { number, percent } from "../format.js";

const MOST_ROWS = 500;
const LESSONS = {
  teaches: "teaches: the rewards of some group differ",
  always_solved: "dead weight: always solved",
  never_solved: "dead weight: never solved",
  same_in_groups: "dead weight: the same reward in each group",
  no_reward: "without a reward",
};
const SHOWN = {
  all: { text: "all", wanted: () => true },
  ...Object.fromEntries(Object.entries(LESSONS).map(([name, text]) => [name, { text, wanted: (task) => task.lesson === name }])),
  quarantined: { text: "quarantined", wanted: (task) => Boolean(task.quarantined) },
  doubtful: { text: "with a grader in doubt", wanted: isDoubtful },
};
const VERIFIED = {
  ok: ["verified", "good"],
  never: ["never verified", "warn"],
  changed: ["changed since it was verified", "warn"],
  wrong: ["found wrong", "bad"],
};

export async function show(here) {
  const drawn = element("div");
  let found = null;
  function draw() {
    const choice = SHOWN[here.query.show] ?? SHOWN.all;
    const tasks = found.tasks.filter(choice.wanted).sort((a, b) => (b.variance ?? -1) - (a.variance ?? -1));
    const heldout = found.heldout.filter(choice.wanted);
    redraw(drawn,
      section("Which tasks teach", lessons(found.tasks)),
      section("Training tasks", played(here.run, "Training tasks, those with the most variance first", tasks, true)),
      section("Held-out tasks", played(here.run, "Held-out tasks", heldout, false)),
      section("Can their graders be trusted?", trust(here.run, [...tasks, ...heldout])));
  }
  async function refresh() {
    found = await get(ofRun(here.run, "tasks"));
    draw();
  }
  const select = element("select", { change: (event) => {
    remember(here, { ...here.query, show: event.target.value });
    draw();
  } }, Object.entries(SHOWN).map(([name, { text }]) => element("option", { value: name, selected: here.query.show === name }, text)));
  await refresh();
  const form = element("form", { class: "filters" }, element("label", {}, "Show tasks", select));
  return { title: "Tasks", body: element("div", {}, form, drawn), refresh, kinds: ["episodes", "quarantines"] };
}

/** What was spent on tasks that teach, and on dead weight. */
function lessons(tasks) {
  const all = sum(tasks, "sampled_tokens");
  const rows = Object.entries(LESSONS).map(([name, text]) => ({ text, tasks: tasks.filter((task) => task.lesson === name) }))
    .filter((row) => row.tasks.length);
  const spent = all ? `${percent(sum(tasks, "sampled_tokens_with_signal") / all)} of the sampled tokens are in groups whose rewards differ; only these teach.` : "";
  return [element("p", {}, `${number(tasks.length)} tasks were played. `, spent), table("Tasks by what they teach", [
    { name: "Lesson", cell: (row) => row.text },
    { name: "Tasks", number: true, cell: (row) => number(row.tasks.length) },
    { name: "Episodes", number: true, cell: (row) => number(sum(row.tasks, "num_episodes")) },
    { name: "Groups that teach", number: true, cell: (row) => ofAll(sum(row.tasks, "groups_with_signal"), sum(row.tasks, "groups")) },
    { name: "Sampled tokens", number: true, cell: (row) => number(sum(row.tasks, "sampled_tokens")) },
    { name: "Share of tokens", number: true, cell: (row) => percent(all ? sum(row.tasks, "sampled_tokens") / all : null) },
  ], rows, "No training task was played yet.")];
}

function played(run, caption, tasks, isTraining) {
  const columns = [
    { name: "Task", cell: (task) => link(run, task) },
    { name: "Episodes", number: true, cell: (task) => number(task.num_episodes) },
    { name: "Success", number: true, cell: (task) => percent(task.success) },
    { name: "By version", cell: byVersion },
    { name: "Variance", number: true, title: "of the rewards", cell: (task) => number(task.variance) },
    { name: "Groups that teach", number: true, cell: (task) => ofAll(task.groups_with_signal, task.groups) },
    { name: "Turns", number: true, title: "mean of an episode", cell: (task) => number(task.mean_turns) },
    { name: "Tokens", number: true, title: "sampled in all", cell: (task) => number(task.sampled_tokens) },
    { name: "Tokens that teach", number: true, title: "the share in groups whose rewards differ", cell: (task) => percent(task.sampled_tokens ? task.sampled_tokens_with_signal / task.sampled_tokens : null) },
    { name: "Fates", cell: (task) => tally(task.fates) },
  ];
  const shown = isTraining ? columns : columns.filter((one) => !one.name.endsWith("that teach"));
  return limited(tasks, (rows) => table(caption, shown, rows, "None."));
}

function trust(run, tasks) {
  return limited([...tasks].sort((a, b) => isDoubtful(b) - isDoubtful(a)), (rows) => table("Graders, those in doubt first", [
    { name: "Task", cell: (task) => link(run, task) },
    { name: "Verification", cell: ({ verification }) => (verification ? badge(...VERIFIED[verification.verified]) : "not known") },
    { name: "Quarantine", cell: (task) => (task.quarantined ? [badge("quarantined", "bad"), " ", task.quarantined] : "") },
    { name: "Tests", number: true, title: "that the known fix passes", cell: (task) => number(task.verification?.num_tests) },
    { name: "Controlled", number: true, title: "tests that can be made to fail", cell: (task) => number(task.verification?.num_controlled) },
    { name: "Flaky", number: true, title: "tests that passed in some runs of the known fix only", cell: (task) => number(task.verification?.num_flaky) },
    { name: "Weakness", number: true, title: "the share of wrong patches that pass, and its 95 % interval", cell: weakness },
    { name: "Control at best", title: "confirmed: every test that needs the fix can be contradicted", cell: (task) => task.verification?.control ?? "–" },
    { name: "Controls of passes", cell: (task) => tally(task.controls) || "–" },
    { name: "Verdicts that differ", number: true, title: "patches that came again and were judged differently", cell: (task) => ofAll(task.patches_judged_differently, task.patches_judged_again) },
    { name: "Grader failures", number: true, cell: (task) => number(task.grader_failures) },
  ], rows, "None."));
}

function isDoubtful(task) {
  return Boolean(task.quarantined || task.patches_judged_differently || task.grader_failures || task.controls.refuted
    || task.verification?.num_flaky || (task.verification && task.verification.verified !== "ok"));
}

function weakness({ verification }) {
  if (!verification || verification.weakness === null) return "–";
  const interval = verification.weakness_interval?.map(percent).join(" to ");
  return `${percent(verification.weakness)} of ${number(verification.num_partial_fixes)}${interval ? ` (${interval})` : ""}`;
}

function limited(tasks, draw) {
  const left = tasks.length - MOST_ROWS;
  return [draw(tasks.slice(0, MOST_ROWS)), left > 0 ? element("p", {}, `${number(left)} more tasks are not listed.`) : ""];
}

function link(run, task) {
  return element("a", { href: address("rollouts", run, "", { task: task.task_id }) }, task.task_id);
}

function ofAll(part, all) {
  return all ? `${number(part)} of ${number(all)}` : "–";
}

function sum(tasks, name) {
  return tasks.reduce((total, task) => total + task[name], 0);
}

/** One cell per bucket of versions, the darker the more often solved. */
function byVersion(task) {
  const cells = (task.by_version ?? []).filter((one) => one.num_episodes).map((one) => {
    const range = one.from === one.to ? `version ${one.from}` : `versions ${one.from} to ${one.to}`;
    const heat = one.success === null ? "" : `heat${Math.round(4 * one.success)}`;
    return element("li", { class: heat, title: `${range}: ${percent(one.success)} of ${one.num_episodes} episodes` },
      one.success === null ? "–" : Math.round(100 * one.success));
  });
  return element("ol", { class: "heat" }, cells);
}

export function tally(counts) {
  return Object.entries(counts ?? {}).sort((a, b) => b[1] - a[1]).map(([name, count]) => `${name} ${number(count)}`).join(", ");
}
