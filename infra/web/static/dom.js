// Makes elements. Text enters the document as text nodes only, so what a rollout says is never read as HTML.

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
      made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

/** Replace the children of an element that is shown. The keyboard's focus stays on what had it, or on what stands in its place. */
export function redraw(parent, ...children) {
  const before = parent.contains(document.activeElement) ? document.activeElement : null;
  const path = [];
  for (let one = before; one && one !== parent; one = one.parentElement) path.unshift([...one.parentElement.children].indexOf(one));
  parent.replaceChildren(...children);
  if (!path.length) return;
  const inPlace = path.reduce((one, index) => one?.children[index], parent);
  const alike = [inPlace, ...parent.querySelectorAll(before.tagName)].find((one) => one?.isEqualNode(before));
  (alike ?? (inPlace?.tagName === before.tagName ? inPlace : null))?.focus({ preventScroll: true });
}

/** A table with a header row. A column is {name, cell(row), number, title}. It scrolls by itself where it is too wide. */
export function table(caption, columns, rows, empty = "Nothing yet.") {
  if (!rows.length) return element("p", { class: "empty" }, empty);
  const head = columns.map((one) =>
    element("th", { scope: "col", class: one.number && "number", title: one.title }, one.name));
  const body = rows.map((row) =>
    element("tr", {}, columns.map((one) => element("td", { class: one.number && "number" }, one.cell(row)))));
  const drawn = element("table", {}, element("caption", {}, caption),
    element("thead", {}, element("tr", {}, head)), element("tbody", {}, body));
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, drawn);
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

/** What stands where a part cannot be shown. */
export function notice(text) {
  return element("p", { class: "notice", role: "alert" }, text);
}
