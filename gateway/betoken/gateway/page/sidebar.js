// The list of stored conversations.

import { button, make } from "./dom.js";
import { conversations } from "./store.js";

const DAY = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });

/** Show the stored conversations; `on` has `open(id)` and `remove(id)`. */
export function showConversations(place, openId, on) {
  const items = conversations().map((conversation) => {
    const isOpen = conversation.id === openId;
    const title = conversation.title || "Untitled";
    const open = button([make("span", title), make("small", DAY.format(conversation.updated_ms))], () => on.open(conversation.id), { class: "open", ...(isOpen ? { "aria-current": "true" } : {}) });
    const drop = button("✕", () => {
      if (confirm(`Delete “${title}”?`)) on.remove(conversation.id);
    }, { class: "delete", "aria-label": `Delete ${title}` });
    return make("li", [open, drop]);
  });
  place.replaceChildren(...items);
}
