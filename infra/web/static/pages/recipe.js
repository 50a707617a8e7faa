// What the run was told to do: its recipe, with what differs from the defaults, from the process before and from another run; the commands
// that started it; and the logs of its processes, read from their ends.

import { remember } from "../address.js";
import { get, ofRun } from "../api.js";
import { block, element, redraw, say, section, table } from "../dom.js";
import { bytes, clock, moment, number } from "../format.js";

export async function show(here) {
  const drawn = element("div");
  const log = element("div");
  const others = (await get("/api/runs")).runs.filter((run) => run.id !== here.run && run.directory);

  async function refresh() {
    const found = await get(ofRun(here.run, "recipe"), { with: here.query.with });
    redraw(drawn, section("How it was started", launches(found.launches)),
      section("What differs from the defaults", set(found.launches)),
      others.length ? section("What differs from another run", chooser(here, others, refresh), differences(here, found)) : "",
      section("The whole recipe", found.text ? block(found.text, "output") : element("p", { class: "empty" }, "Its directory has no recipe.")),
      section("Logs", logs(found.logs, (name) => {
        remember(here, { ...here.query, log: name });
        return read(name);
      })));
  }
  async function read(name) {
    let piece = await get(ofRun(here.run, "logs", name));
    let text = piece.text;
    const earlier = async () => {
      piece = await get(ofRun(here.run, "logs", name), { before: String(piece.start) });
      text = piece.text + text;
      draw();
    };
    function draw() {
      redraw(log, section(name, element("p", {}, `${bytes(piece.num_bytes)}, shown from byte ${number(piece.start)} on. `,
        piece.start > 0 ? element("button", { type: "button", click: earlier }, "Earlier lines") : "", " ",
        element("button", { type: "button", click: () => read(name) }, "Read the end again")),
        element("pre", { class: "log", tabindex: 0 }, text || "It is empty.")));
      const box = log.querySelector("pre");
      if (text === piece.text) box.scrollTop = box.scrollHeight;
    }
    draw();
  }
  await refresh();
  if (here.query.log) await read(here.query.log).catch(() => {});
  return { title: "Recipe and logs", body: element("div", {}, drawn, log), refresh, kinds: ["starts"] };
}

function launches(found) {
  return table("Processes of the trainer, newest first", [
    { name: "At", cell: (one) => element("time", { title: moment(one.at) }, clock(one.at)) },
    { name: "Command", cell: (one) => element("code", {}, one.command) },
    { name: "To copy", cell: (one) => copier(`cd ${quoted(one.directory)} && ${one.command}`) },
    { name: "In", cell: (one) => one.directory },
    { name: "On", cell: (one) => `${one.host}, process ${one.pid}` },
    { name: "Changed since the process before", cell: (one) => (one.changed.length ? element("ul", {}, one.changed.map((text) => element("li", {}, text))) : "") },
  ], [...found].reverse(), "The run does not say how it was started.");
}

/** A button that copies a command. Where the browser does not allow it, it says so. */
function copier(text) {
  const said = element("span", { role: "status" });
  return [element("button", { type: "button", click: () => {
    const done = navigator.clipboard?.writeText(text) ?? Promise.reject(new Error("no clipboard"));
    done.then(() => say(said, " copied"), () => say(said, " select it and copy it: the browser gives no access to the clipboard"));
  } }, "Copy"), said];
}

function quoted(path) {
  return /^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`;
}

function set(found) {
  const keys = found.at(-1)?.set ?? [];
  return table("Keys that do not have their default", [
    { name: "Key", cell: ([key]) => element("code", {}, key) },
    { name: "Value", cell: ([, value]) => value },
  ], keys.map((text) => [text.slice(0, text.indexOf(": ")), text.slice(text.indexOf(": ") + 2)]), "The run does not say what its defaults were.");
}

function chooser(here, others, changed) {
  return element("p", {}, element("label", {}, "Compare with ", element("select", { name: "with", change: (event) => {
    remember(here, { ...here.query, with: event.target.value });
    changed();
  } }, ["", ...others.map((run) => run.id)].map((id) => element("option", { value: id, selected: id === (here.query.with ?? "") }, id || "no run")))));
}

function differences(here, found) {
  if (!found.differences) return "";
  return table(`Keys on which the recipes of ${here.run} and ${here.query.with} differ`, [
    { name: "Key", cell: (row) => element("code", {}, row.key) },
    { name: "Here", cell: (row) => row.here ?? "not there" },
    { name: "There", cell: (row) => row.there ?? "not there" },
  ], found.differences, "The two recipes are equal.");
}

function logs(found, read) {
  return table("Logs of its processes on this machine", [
    { name: "Log", cell: (one) => element("button", { type: "button", class: "link", click: () => read(one.name) }, one.name) },
    { name: "Size", number: true, cell: (one) => bytes(one.num_bytes) },
    { name: "Changed", cell: (one) => element("time", { title: moment(one.changed_at) }, clock(one.changed_at)) },
  ], found, "Its directory has no logs. Workers and engines on other machines write theirs there.");
}
