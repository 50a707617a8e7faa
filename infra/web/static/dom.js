// Makes elements. Text enters the document here only, and as text nodes only: what a rollout says is never read as HTML, and no name of a
// task, group or worker hides or reorders what is beside it. Long text stays in its place, and is shown whole when asked for.
//
// `pipeline/screen.py` makes visible for terminals what `visible` does here, and a test holds that both know the same characters.

// Controls, formats, surrogates, private and unassigned characters, separators of lines and paragraphs; then letters and marks that show
// as nothing although their category does not say so: fillers and joiners.
const UNSEEN = /[\p{C}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\uffa0]/gu;

/** Control characters as their symbols, invisible and reordering ones by their number; line ends and tabs stay. */
export function visible(text) {
  return text.replaceAll("\r\n", "\n").replace(UNSEEN, shown);
}

function shown(character) {
  if (character === "\n" || character === "\t") return character;
  const code = character.codePointAt(0);
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  if (code === 127) return "\u2421";
  return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
}

const READ = ["title", "aria-label", "placeholder"]; // attributes that a person reads
const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes that are undefined, null or false are left out; functions are event listeners. */
export function element(tag, attributes = {}, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, tag), attributes, children);
}

function furnish(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== undefined && value !== null && value !== false)
      made.setAttribute(name, value === true ? "" : READ.includes(name) ? visible(String(value)) : String(value));
  }
  made.append(...nodes(children));
  return made;
}

/** Children without those that are empty, and with texts as they may be shown. */
function nodes(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== "")
    .map((child) => (child instanceof Node ? child : visible(String(child))));
}

/** Replace what an element says. */
export function say(parent, ...children) {
  parent.replaceChildren(...nodes(children));
}

/** Name the tab. */
export function entitle(text) {
  document.title = visible(text);
}

/** Replace the children of an element that is shown. The keyboard's focus stays on what had it, or on what replaces it; what was unfolded
 * stays so, and what was scrolled stays where it was.
 */
export function redraw(parent, ...children) {
  const kept = new Map(named(parent).map(([name, one]) => [name, { open: one.open, left: one.scrollLeft, top: one.scrollTop }]));
  const before = parent.contains(document.activeElement) ? document.activeElement : null;
  const path = [];
  for (let one = before; one && one !== parent; one = one.parentElement) path.unshift([...one.parentElement.children].indexOf(one));
  say(parent, ...children);
  for (const [name, one] of named(parent)) {
    const { open, left, top } = kept.get(name) ?? {};
    if (open !== undefined && one.open !== open) one.open = open;
    if (left || top) one.scrollTo(left, top);
  }
  if (!path.length) return;
  const inPlace = path.reduce((one, index) => one?.children[index], parent);
  const alike = [inPlace, ...parent.querySelectorAll(before.tagName)].find((one) => one?.isEqualNode(before));
  (alike ?? (inPlace?.tagName === before.tagName ? inPlace : null))?.focus({ preventScroll: true });
}

/** What can be unfolded or scrolled in an element, each with a name that it keeps when the element is drawn again. */
function named(parent) {
  const counts = new Map();
  return [...parent.querySelectorAll("details, .scroll, pre")].map((one) => {
    const about = one.querySelector(":scope > summary")?.textContent ?? one.getAttribute("aria-label") ?? one.className;
    const name = `${one.tagName} ${about}`;
    counts.set(name, (counts.get(name) ?? 0) + 1);
    return [`${name} ${counts.get(name)}`, one];
  });
}

/** A table with a header row. A column is {name, cell(row), number, title}. It scrolls by itself where it is too wide. */
export function table(caption, columns, rows, empty = "Nothing yet.") {
  if (!rows.length) return element("p", { class: "empty" }, empty);
  const head = columns.map((one) =>
    element("th", { scope: "col", class: one.number && "number", title: one.title }, one.name));
  const body = rows.map((row) =>
    element("tr", {}, columns.map((one) => element("td", { class: one.number && "number" }, one.cell(row)))));
  const drawn = element("table", {}, element("caption", {}, caption, " ",
    element("button", { type: "button", class: "csv", "aria-label": `Save as CSV: ${caption}`, click: () => saveText(`${caption}.csv`, tableAsCsv(drawn)) }, "CSV")),
    element("thead", {}, element("tr", {}, head)), element("tbody", {}, body));
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, drawn);
}

/** The texts of a table's cells. A text that a spreadsheet would calculate is marked as text. */
function tableAsCsv(drawn) {
  const cell = (text) => `"${(/^[=+@]|^-(?![\d.])/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  return [...drawn.rows].map((row) => [...row.cells].map((one) => cell(one.textContent.trim().replace(/ [▾▴]$/, ""))).join(",")).join("\r\n");
}

/** Give the reader a file. */
export function saveText(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  element("a", { href: url, download: visible(name) }).click();
  URL.revokeObjectURL(url);
}

/** A list of names and values. Pairs whose value is empty are left out. */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return element("dl", { class: "facts" }, shown.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

/** A word in a coloured frame: "good", "bad", "warn" or "plain". */
export function badge(text, kind = "plain") {
  return element("span", { class: `badge ${kind}` }, text);
}

/** A section with its heading. */
export function section(title, ...children) {
  return element("section", {}, element("h2", {}, title), ...children);
}

/** What is wrong at the moment, above all else; nothing if nothing is. */
export function unwell({ complaints, pauses }) {
  const said = [...(complaints ?? []), ...(pauses ?? [])].map((text) => element("li", {}, text));
  return said.length ? element("ul", { class: "notice", "aria-label": "What is wrong" }, said) : "";
}

/** The notice in place of a part that cannot be shown. */
export function notice(text) {
  return element("p", { class: "notice", role: "alert" }, text);
}

const SHOWN_CHARS = 6000;
const LINE_CHARS = 2000;

/** A block of text. Of a long one the beginning and the end are shown, and a button shows the rest. */
export function block(text, kind = "") {
  const box = element("pre", { class: kind, tabindex: text.length > LINE_CHARS ? 0 : undefined });
  if (text.length <= SHOWN_CHARS) {
    say(box, text);
    return box;
  }
  const half = SHOWN_CHARS / 2;
  const rest = element("button", { type: "button", click: () => say(box, text) },
    `Show the ${(text.length - SHOWN_CHARS).toLocaleString("en")} characters between`);
  say(box, text.slice(0, half), element("span", { class: "between" }, rest), text.slice(-half));
  return box;
}
