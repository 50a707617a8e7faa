// Dead letters of a run, and what may be done with them where the server was started with --allow-actions.

import { act, get, ofRun } from "./api.js";
import { address } from "./address.js";
import { badge, element, notice, section, table } from "./dom.js";
import { ago, number } from "./format.js";

const AT_ONCE = 500;
const ACTIONS = {
  requeue: { verb: "Requeue", all: "Requeue all", says: "They get a fresh budget of tries and are played again." },
  drop: { verb: "Drop", all: "Drop all", says: "The requests and the evidence of their failures are deleted. This cannot be undone." },
};

/** The section about dead letters; null if there are none. `changed` is called after an action. */
export async function deadLetters(run, changed) {
  const found = await get(ofRun(run, "dead"));
  if (!found.dead?.length) return null;
  const told = element("div", { "aria-live": "polite" });
  const button = (action, text, ids) => element("button", { type: "button", click: () => carryOut(run, action, ids, told, changed) }, text);
  const columns = [
    { name: "Request", cell: (one) => element("a", { href: address("rollout", run, one.request_id) }, one.request_id) },
    { name: "Kind", cell: (one) => one.kind },
    { name: "Class", cell: (one) => badge(one.class, "bad") },
    { name: "Task", cell: (one) => one.task_id },
    { name: "Tries", number: true, cell: (one) => number(one.failures.length) },
    { name: "Died", number: true, cell: (one) => ago(one.died_at) },
    { name: "Last failure", cell: (one) => one.failures.at(-1)?.message ?? "" },
  ];
  if (found.allows_actions)
    columns.push({ name: "Action", cell: (one) => Object.entries(ACTIONS).map(([action, { verb }]) => button(action, verb, [one.request_id])) });
  const ids = [...new Set(found.dead.map((one) => one.request_id))];
  return section("Dead letters", table("Dead letters, newest first", columns, found.dead.slice(0, AT_ONCE)),
    found.allows_actions ? element("p", {}, Object.entries(ACTIONS).map(([action, { all }]) => button(action, `${all} ${number(ids.length)}`, ids))) : null,
    told);
}

async function carryOut(run, action, ids, told, changed) {
  const { verb, says } = ACTIONS[action];
  const what = ids.length === 1 ? `request ${ids[0]}` : `${number(ids.length)} requests`;
  if (!(await agreed(`${verb} ${what} of run ${run}?`, says, verb))) return;
  try {
    const left = [];
    for (let first = 0; first < ids.length; first += AT_ONCE) {
      const { changed: rows } = await act(ofRun(run, "dead", action), { request_ids: ids.slice(first, first + AT_ONCE) });
      left.push(...rows.filter((row) => row.reason));
    }
    if (left.length) told.replaceChildren(notice(`${number(left.length)} left as they were: ${left[0].reason}`));
    else await changed();
  } catch (error) {
    told.replaceChildren(notice(error.message));
  }
}

/** Ask in a dialog. Resolves to whether the reader agreed; Escape and Cancel are no. */
function agreed(question, says, verb) {
  return new Promise((resolve) => {
    const answer = (value) => () => dialog.close(value);
    const heading = element("h2", { id: "question" }, question);
    const dialog = element("dialog", { "aria-labelledby": "question", close: () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    } }, heading, element("p", {}, says), element("p", { class: "answers" },
      element("button", { type: "button", autofocus: true, click: answer("") }, "Cancel"),
      element("button", { type: "button", click: answer("yes") }, verb)));
    document.body.append(dialog);
    dialog.showModal();
  });
}
