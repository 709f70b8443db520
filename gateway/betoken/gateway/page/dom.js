// Builds elements and tables.

export const field = (id) => document.getElementById(id);

/** Return an element with text or children. */
export function make(name, content = [], attributes = {}) {
  const element = document.createElement(name);
  element.append(...[content].flat());
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** Return a small button. */
export function button(text, onClick, attributes = {}) {
  const made = make("button", text, { type: "button", ...attributes });
  made.addEventListener("click", onClick);
  return made;
}

/** Return a table of rows, of which the first is the head. Numbers are aligned right. */
export function table(rows, caption) {
  const cell = (tag, value) => make(tag, value instanceof Node ? value : String(value), typeof value === "number" ? { class: "number" } : {});
  const [head, ...body] = rows;
  const made = make("table", [
    make("thead", make("tr", head.map((value) => make("th", String(value), { scope: "col" })))),
    make("tbody", body.map((row) => make("tr", row.map((value) => cell("td", value))))),
  ]);
  if (caption) made.setAttribute("aria-label", caption);
  return made;
}

/** Copy `text`; browsers offer the clipboard API only on localhost and over HTTPS. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", text, { class: "hidden" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Return a button that copies the current value of `textOf()`. */
export function copyButton(textOf, name) {
  const made = button("Copy", async () => {
    await copy(textOf());
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = "Copy"), 1500);
  }, { class: "copy", "aria-label": name });
  return made;
}
