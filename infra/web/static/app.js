// Which page is shown, and when it is drawn again.
//
// A page is a module with `show(address)`, which resolves to {title, body, kinds, refresh, place}. `refresh` is called after an event of one of
// these kinds of the page's run; a page without it does not change. `place` is the element that the address leads to, if it leads to one.

import { address, parse } from "./address.js";
import { listen, onReading } from "./api.js";
import { element, entitle, notice, say } from "./dom.js";
import { bytes } from "./format.js";
import * as compare from "./pages/compare.js";
import * as fleet from "./pages/fleet.js";
import * as recipe from "./pages/recipe.js";
import * as rollout from "./pages/rollout.js";
import * as rollouts from "./pages/rollouts.js";
import * as run from "./pages/run.js";
import * as runs from "./pages/runs.js";
import * as step from "./pages/step.js";
import * as tasks from "./pages/tasks.js";
import * as trained from "./pages/trained.js";
import * as where from "./pages/where.js";

const PAGES = { "": runs, run, fleet, step, rollouts, rollout, compare, tasks, trained, where, recipe };
const NAVIGATION = [["run", "Run"], ["fleet", "Fleet"], ["rollouts", "Rollouts"], ["tasks", "Tasks"],
  ["trained", "Who gets trained"], ["where", "Where time went"], ["recipe", "Recipe and logs"]];
const PARENT = { step: "run", rollout: "rollouts", compare: "rollouts" };
const REFRESH_MS = 2000;
const REST = 30; // a page that takes long to draw is drawn less often: it works for a thirtieth of the time
const LONGEST_REST_MS = 60000;

const main = document.getElementById("main");
const connection = document.getElementById("connection");
let here = parse("");
let page = null;
let visits = 0;
let timer = null;
let rest = REFRESH_MS; // before the page is drawn again

async function visit() {
  const mine = (visits += 1);
  rest = REFRESH_MS;
  here = parse(location.hash);
  navigate();
  main.setAttribute("aria-busy", "true");
  const shown = await load(here);
  if (mine !== visits) return;
  page = shown;
  main.removeAttribute("aria-busy");
  say(main, element("h1", {}, page.title), page.body);
  entitle(`${page.title} – Swerve`);
  if (page.place) page.place.scrollIntoView();
  else window.scrollTo(0, 0);
}

async function load(where) {
  const module = PAGES[where.page];
  if (!module || (where.page && !where.run)) return { title: "No such page", body: notice("Choose a run first.") };
  try {
    return await module.show(where);
  } catch (error) {
    return { title: "This page cannot be shown", body: notice(error.message) };
  }
}

function navigate() {
  const links = [["", "Runs"], ...(here.run ? NAVIGATION : [])].map(([name, text]) =>
    element("a", { href: address(name, name && here.run),
      "aria-current": (PARENT[here.page] ?? here.page) === name && "page" }, text));
  say(document.getElementById("pages"), links);
}

/** Draw the page again soon; later while the reader points at a chart or has selected text. A page that shows what is outdated says so by
 * returning true, and is drawn again. */
function schedule() {
  timer ??= setTimeout(async () => {
    timer = null;
    let isAgain = false;
    const selection = window.getSelection();
    const isSelected = !selection.isCollapsed && main.contains(selection.anchorNode);
    const waitsFor = isSelected ? "text is selected" : main.querySelector("svg:hover, svg:focus") && "a chart is read";
    if (connection.className) say(connection, waitsFor ? `not updated while ${waitsFor}` : "live");
    if (waitsFor) return schedule();
    const [refreshed, began] = [page, performance.now()];
    try {
      isAgain = await refreshed?.refresh?.();
      main.querySelector(":scope > .notice")?.remove();
    } catch (error) {
      if (refreshed === page && !main.querySelector(":scope > .notice")) main.prepend(notice(error.message));
    }
    await new Promise((painted) => requestAnimationFrame(() => setTimeout(painted)));
    rest = Math.min(LONGEST_REST_MS, Math.max(REFRESH_MS, REST * (performance.now() - began)));
    if (isAgain === true && refreshed === page) schedule();
  }, rest);
}

/** A page that shows a part of what there is changes as more is read. */
function isShown(kind) {
  return page?.kinds?.includes(kind) || (kind === "reading" && page?.refresh);
}

onReading((reading) => {
  const told = reading && `reading ${bytes(reading.read_bytes)} of ${bytes(reading.total_bytes)} …`;
  say(document.getElementById("reading"), told);
});
listen(
  (event) => {
    if ((!here.run || event.run === here.run) && isShown(event.kind)) schedule();
  },
  (connected) => {
    say(connection, connected ? "live" : "reconnecting …");
    connection.className = connected ? "live" : "";
    if (connected && page?.refresh) schedule();
  },
);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", visit);
visit();
