// The panels at the sides. Wide windows show all, medium ones the list and one panel, narrow ones one as a drawer.

import { field } from "./dom.js";
import { keepSetting, setting } from "./store.js";

const PANELS = { list: "show-list", measures: "show-measures", settings: "show-settings" };
const narrow = matchMedia("(max-width: 60rem)");
const wide = matchMedia("(min-width: 100rem)");

const isShown = (name) => document.body.dataset.panel === name;

/** Show one panel; an empty name shows none. */
export function show(name) {
  document.body.dataset.panel = name;
  for (const [panel, id] of Object.entries(PANELS)) field(id).setAttribute("aria-expanded", String(panel === name));
  const isDrawer = narrow.matches && name !== "";
  field("backdrop").hidden = !isDrawer;
  field("talk").inert = isDrawer;
  if (isDrawer) field(name).querySelector("button").focus();
}

/** Show a panel because its content is wanted now. */
export function reveal(name) {
  if (!wide.matches) show(name);
  field(name).scrollTop = 0;
}

function toggle(name) {
  show(isShown(name) ? "" : name);
  if (!narrow.matches) keepSetting("panel", document.body.dataset.panel);
}

/** Close a drawer and return the focus to its button. */
export function closeDrawer() {
  const name = document.body.dataset.panel;
  if (!narrow.matches || !name) return;
  show("");
  field(PANELS[name]).focus();
}

const fit = () => show(narrow.matches ? "" : setting("panel", "measures"));

export function begin() {
  for (const [name, id] of Object.entries(PANELS)) field(id).addEventListener("click", () => toggle(name));
  for (const close of document.querySelectorAll(".close")) {
    close.addEventListener("click", () => (narrow.matches ? closeDrawer() : toggle(document.body.dataset.panel)));
  }
  field("backdrop").addEventListener("click", closeDrawer);
  addEventListener("keydown", (event) => event.key === "Escape" && closeDrawer());
  narrow.addEventListener("change", fit);
  fit();
}

/** Follow the choice between light and dark. */
export function beginTheme() {
  const root = document.documentElement;
  root.dataset.theme = setting("theme", "");
  field("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    keepSetting("theme", root.dataset.theme);
  });
}
