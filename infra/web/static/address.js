// Addresses of pages. All of one is in the URL's hash, so that it can be bookmarked: #/PAGE/RUN/MORE?name=value.

export function address(page, run, more, query = {}) {
  const path = [page, run, more].filter((part) => part !== undefined && part !== "").map(encodeURIComponent);
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString();
  return `#/${path.join("/")}${search ? `?${search}` : ""}`;
}

/** {page, run, more, query} of a hash. */
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [page = "", run = "", more = ""] = path.split("/").map(decoded);
  return { page, run, more, query: Object.fromEntries(new URLSearchParams(search)) };
}

/** Change the query of the page that is shown, without loading it again. */
export function remember(here, query) {
  here.query = query;
  history.replaceState(null, "", address(here.page, here.run, here.more, query));
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
