// One rollout: what it was for, its reward, its conversation and its life; and all rollouts of its task, by the weight version that began
// them: did the policy learn it?

import { address, remember } from "../address.js";
import { get, ofRun } from "../api.js";
import { conversation, folded, TURNS_AT_ONCE } from "../conversation.js";
import { badge, block, element, facts, notice, redraw, section, table } from "../dom.js";
import { duration, moment, number, percent } from "../format.js";
import { lifeline, turnsOnTheClock } from "../lifeline.js";
import { fate as fateOf, neighbours, reward as rewardBadge, versions } from "./rollouts.js";

const MOST = 500;
const MOST_OF_VERSION = 32;

/** A list of versions with the reward of each rollout, which is a link to it. */
async function sameTask(run, rollout) {
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

export async function show(here) {
  const body = element("div");
  let rollout = null;
  async function draw() {
    const turn = Math.max(0, Number.parseInt(here.query.turn, 10) - 1 || 0);
    rollout = await get(ofRun(here.run, "rollouts", here.more), { turns: turn - (turn % TURNS_AT_ONCE) });
    const others = await sameTask(here.run, rollout);
    redraw(body, ...parts(here, rollout, others).filter(Boolean));
  }
  await draw();
  // What is finished stays as it is, and as the reader has unfolded it.
  const refresh = () => (rollout.finished_at ? null : draw());
  const place = here.query.turn ? body.querySelector(`#turn-${Number.parseInt(here.query.turn, 10) - 1}`) : null;
  return { title: rollout.task_id, body, place, kinds: ["status", "rollouts", "episodes"], refresh };
}

function parts(here, rollout, others) {
  const { body, open } = conversation(here.run, rollout, (index) => remember(here, { ...here.query, turn: String(index + 1) }));
  const turns = turnsOnTheClock(rollout, open);
  return [
    beside(here, rollout),
    head(here.run, rollout),
    rollout.unreadable ? notice(`Its body cannot be shown: ${rollout.unreadable}`) : null,
    section("What became of it", verdict(rollout), lifeline(rollout), turns ? folded(`${number(rollout.outline.length)} turns on the clock`, turns) : null, life(rollout)),
    section("Reward", reward(rollout)),
    section("Its group", group(here, rollout)),
    section("The same task over versions", others),
    section("Conversation", rollout.problem ? folded("The task", block(rollout.problem)) : null, body),
    rollout.patch ? section("Patch", fromTree(rollout), patch(rollout.patch)) : null,
  ];
}

/** Links to the rollouts before and after this one: in its group, and in the table from which the reader came. */
function beside(here, rollout) {
  const group = (rollout.group ?? []).map((row) => row.request_id);
  const place = group.indexOf(rollout.request_id);
  const ways = [["In its group", [group[place - 1], place < 0 ? undefined : group[place + 1]]], ["In the table", neighbours(here.run, rollout.request_id)]];
  const link = (id, text) => (id ? element("a", { href: address("rollout", here.run, id) }, text) : "");
  const shown = ways.filter(([, ids]) => ids.some(Boolean)).map(([about, [before, after]]) =>
    element("span", {}, `${about}: `, link(before, "← previous"), before && after ? " · " : "", link(after, "next →"), " "));
  return shown.length ? element("p", { class: "pager" }, shown) : null;
}

const MOST_LINES = 3000; // a longer patch is shown without colours

/** A patch, with colours for what it adds and takes away. */
function patch(text) {
  const lines = text.split("\n");
  if (lines.length > MOST_LINES) return block(text, "output");
  const kind = (line) => (/^(\+\+\+|---|diff |index )/.test(line) ? "file" : line.startsWith("@@") ? "hunk" : line.startsWith("+") ? "added"
    : line.startsWith("-") ? "removed" : undefined);
  return element("pre", { class: "output diff", tabindex: 0 }, lines.map((line) => element("span", { class: kind(line) }, `${line}\n`)));
}

function fromTree(rollout) {
  const why = rollout.outcome?.from_tree;
  return why ? notice(`From the tree: its difference to the start was graded, because ${why}.`) : null;
}

/** The line of facts at the top; also of the page that compares two. */
export function head(run, rollout) {
  const row = rollout.head ?? {};
  const outcome = rollout.outcome?.message ?? "";
  return facts([
    ["Request", rollout.request_id],
    ["Reward", rewardBadge({ reward: rollout.reward?.value })],
    ["Outcome", [row.outcome ?? rollout.state, outcome && `: ${outcome}`].filter(Boolean).join("")],
    ["Fate", row.fate && fateOf(run, row)],
    ["Versions", row.version_first === undefined ? "" : versions(row)],
    ["Lag", row.lag === undefined || row.lag === null ? "" : `${number(row.lag)} versions`],
    ["Turns", number(row.num_turns)],
    ["Sampled tokens", number(row.sampled_tokens)],
    ["Took", rollout.started_at ? duration(rollout.finished_at - rollout.started_at) : ""],
    ["Worker", rollout.worker],
    ["Attempt", rollout.attempt > 1 ? number(rollout.attempt) : ""],
    ["Judge", rollout.judge],
  ]);
}

function verdict(rollout) {
  const said = [[rollout.verdict, ""], [rollout.judging, "Its judgement: "]].filter(([text]) => text);
  return said.map(([text, about]) => element("p", {}, `${about}${text}`));
}

function life(rollout) {
  const first = rollout.life?.[0]?.at;
  const events = (rollout.life ?? []).map((event) => element("li", {},
    element("time", { datetime: new Date(1000 * event.at).toISOString(), title: moment(event.at) }, `+${duration(event.at - first)}`), " ",
    element("strong", {}, event.kind === "judge" ? `judging ${event.what}` : event.what), event.detail ? ` ${event.detail}` : "", event.worker ? ` (${event.worker})` : ""));
  const failures = (rollout.failures ?? []).map((failure) => element("li", {},
    badge(`attempt ${failure.attempt}`, "bad"), ` ${failure.boundary}: ${failure.message}`,
    failure.detail ? folded("Its log", block(failure.detail, "output")) : ""));
  return [events.length ? element("ol", { class: "life" }, events) : null, failures.length ? element("ul", {}, failures) : null];
}

function reward(rollout) {
  const found = rollout.reward;
  if (!found) return element("p", { class: "empty" }, "No grader finished, so it has no reward.");
  const share = (tally) => (tally ? `${number(tally.passed)} of ${number(tally.total)} pass` : "");
  const tests = Object.entries(found.tests ?? {});
  return [
    facts([["Value", number(found.value)], ["Decided by", found.decided_by], ["Tests that must turn to pass", share(found.fail_to_pass)],
      ["Tests that must stay passing", share(found.pass_to_pass)], ["Patch applied by", found.applied_by],
      ["Control", found.control], ["Grading took", duration(found.grade_s)]]),
    tests.length ? folded(`${tests.length} tests`, table("Tests", [
      { name: "Test", cell: ([name]) => name },
      { name: "Outcome", cell: ([, outcome]) => badge(outcome || "not in the log", /pass/i.test(outcome) ? "good" : "bad") },
    ], tests)) : null,
    found.log_tail ? folded("End of the grader's log", block(found.log_tail, "output")) : null,
  ];
}

function group(here, rollout) {
  const beside = (row) => (row.request_id === rollout.request_id ? "this one"
    : element("a", { href: address("compare", here.run, "", { left: rollout.request_id, right: row.request_id }) }, "compare"));
  return table("Rollouts of the group", [
    { name: "Member", number: true, cell: (row) => number(row.member + 1) },
    { name: "Rollout", cell: (row) => element("a", { href: address("rollout", here.run, row.request_id) }, row.request_id) },
    { name: "Reward", number: true, cell: rewardBadge },
    { name: "Outcome", cell: (row) => row.outcome },
    { name: "Fate", cell: (row) => row.fate },
    { name: "Side by side", cell: beside },
  ], rollout.group ?? []);
}
