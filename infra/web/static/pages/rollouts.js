// The table of a run's rollouts. Filters, order and page are in the address.

import { address, remember } from "../address.js";
import { get, ofRun } from "../api.js";
import { badge, element, redraw, table } from "../dom.js";
import { ago, number } from "../format.js";

const FILTERS = [
  { name: "task", label: "Task", hint: "django*" },
  { name: "reward", label: "Reward", hint: "0, 1, none", size: 6 },
  { name: "outcome", label: "Outcome", hint: "submitted*" },
  { name: "step", label: "Step", hint: "3 or 3-7", size: 6 },
  { name: "version", label: "Version", hint: "3 or 3-7", size: 6 },
  { name: "turns", label: "Turns", hint: "1-4", size: 6 },
  { name: "tokens", label: "Sampled tokens", hint: "500-", size: 8 },
  { name: "lag", label: "Lag", hint: "1-", size: 4 },
  { name: "failed", label: "Failed commands", hint: "1-", size: 4 },
  { name: "purpose", label: "Purpose", choices: ["", "train", "eval"] },
  { name: "fate", label: "Fate", hint: "trained" },
  { name: "worker", label: "Worker", hint: "host*", size: 10 },
  { name: "engine", label: "Engine", hint: "host*", size: 10 },
  { name: "group", label: "Group", hint: "id", size: 10 },
  { name: "text", label: "Text in it", hint: "searches bodies" },
];
const TYPING_MS = 400;
let listed = { run: "", ids: [] }; // the page of the table that was shown last

/** The rollouts before and after this one in the table that was shown last, undefined where there is none. */
export function neighbours(run, requestId) {
  const place = listed.run === run ? listed.ids.indexOf(requestId) : -1;
  return place < 0 ? [] : [listed.ids[place - 1], listed.ids[place + 1]];
}

export async function show(here) {
  const result = element("div", { "aria-live": "polite" });
  let wanted = 0;
  let timer = null;

  async function refresh() {
    const mine = (wanted += 1);
    const found = await get(ofRun(here.run, "rollouts"), here.query).catch((error) => ({ error }));
    if (mine !== wanted) return;
    if (found.error) return redraw(result, element("p", { class: "notice" }, found.error.message));
    listed = { run: here.run, ids: found.rows.map((row) => row.request_id) };
    redraw(result, count(found), rows(here.run, found, here.query, ask), pager(found, ask));
  }
  function ask(changes) {
    remember(here, { ...here.query, page: "", ...changes });
    return refresh();
  }
  const form = filters(here.query, () => {
    clearTimeout(timer);
    timer = setTimeout(() => ask(Object.fromEntries(new FormData(form))), TYPING_MS);
  });
  await refresh();
  const kinds = ["rollouts", "episodes"];
  // A text filter reads bodies for up to two seconds: it is not asked again by itself.
  return { title: "Rollouts", body: element("div", {}, form, result), kinds, refresh: () => (here.query.text ? null : refresh()) };
}

function filters(query, changed) {
  const fields = FILTERS.map(({ name, label, hint, size, choices }) => element("label", {}, label,
    choices
      ? element("select", { name }, choices.map((choice) =>
        element("option", { value: choice, selected: query[name] === choice }, choice || "any")))
      : element("input", { name, size: size ?? 14, placeholder: hint, value: query[name] ?? "", autocomplete: "off", spellcheck: "false" })));
  return element("form", { class: "filters", role: "search", input: changed,
    submit: (event) => event.preventDefault() }, fields);
}

function count(found) {
  const searched = found.text_complete === false ? ` The text was looked for in the newest ${number(found.text_searched)} only.` : "";
  const mean = found.reward && `, mean reward ${number(found.reward.value)} (${number(found.reward.low)} to ${number(found.reward.high)}, 95 %)`;
  return element("p", {}, `${number(found.total)} of ${number(found.num_rollouts)} rollouts${mean || ""}, found in ${number(found.took_ms)} ms.${searched}`);
}

function rows(run, found, query, ask) {
  const columns = [
    { name: "Finished", key: "finished_at", cell: (row) => ago(row.finished_at) },
    { name: "Task", key: "task_id", cell: (row) => element("a", { href: address("rollout", run, row.request_id) }, row.task_id) },
    { name: "Reward", key: "reward", number: true, cell: reward },
    { name: "Outcome", key: "outcome", cell: (row) => row.outcome },
    { name: "Turns", key: "num_turns", number: true, cell: (row) => number(row.num_turns) },
    { name: "Failed commands", key: "num_failed_commands", number: true, title: "commands that ended with another exit status than 0", cell: (row) => number(row.num_failed_commands) },
    { name: "Sampled", key: "sampled_tokens", number: true, cell: (row) => number(row.sampled_tokens) },
    { name: "Versions", key: "version_first", number: true, cell: versions },
    { name: "Lag", key: "lag", number: true, cell: (row) => number(row.lag) },
    { name: "Fate", key: "fate", cell: (row) => fate(run, row) },
    { name: "For", key: "purpose", cell: (row) => row.evaluation || row.purpose },
    { name: "Group", key: "group_id", cell: (row) => element("a", { href: address("rollouts", run, "", { group: row.group_id }) },
      `${row.group_id} ${row.member + 1}/${row.group_size}`) },
  ];
  const sorted = columns.map((column) => ({ ...column, name: order(column, query.sort ?? "-finished_at", ask) }));
  return table("Rollouts", sorted, found.rows, "No rollout matches.");
}

/** A heading that sorts by its column, and the other way at the second press. */
function order({ name, key }, sort, ask) {
  const [down, up] = [sort === `-${key}`, sort === key];
  return element("button", { type: "button", class: "order", click: () => ask({ sort: down ? key : `-${key}` }),
    "aria-label": `Sort by ${name}` }, name, down ? " ▾" : up ? " ▴" : "");
}

export function fate(run, row) {
  return row.step ? [`${row.fate} in `, element("a", { href: address("step", run, String(row.step)) }, `step ${row.step}`)] : row.fate || "open";
}

export function reward(row) {
  if (row.reward === null || row.reward === undefined) return badge("none");
  return badge(number(row.reward), row.reward >= 1 ? "good" : row.reward > 0 ? "warn" : "bad");
}

export function versions(row) {
  if (row.version_first === null) return "–";
  return row.version_last === null || row.version_first === row.version_last ? number(row.version_first) : `${row.version_first}–${row.version_last}`;
}

function pager(found, ask) {
  const last = Math.max(0, Math.ceil(found.total / found.page_size) - 1);
  if (!last) return "";
  const go = (text, page, possible) =>
    element("button", { type: "button", disabled: !possible, click: () => ask({ page: String(page) }) }, text);
  return element("p", { class: "pager" }, go("Previous page", found.page - 1, found.page > 0),
    ` page ${found.page + 1} of ${number(last + 1)} `,
    go("Next page", found.page + 1, found.page < last));
}
