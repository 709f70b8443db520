// Workers and their state, asked for again and again.

import { info } from "./api.js";
import { make, table } from "./measures.js";

const PERIOD_MS = 2000;

function state(worker) {
  const is_ready = worker.state === "ready";
  const text = is_ready ? "● ready" : `○ ${worker.state === "connecting" ? "away" : worker.state}`;
  return make("span", text, { class: is_ready ? "state-ready" : "state-away", title: worker.detail });
}

function show(place, model) {
  const rows = model.workers.map((worker) => [
    make("span", worker.role, { title: [worker.worker_id, worker.address, worker.drafters.join(", ") || worker.dtype].filter(Boolean).join(", ") }),
    state(worker),
    worker.running,
    `${worker.free_pages} of ${worker.total_pages}`,
  ]);
  const focused = document.activeElement === place;
  place.replaceChildren(table([["role", "state", "runs", "free pages"], ...rows], "Workers"));
  if (focused) place.focus();
}

/** Keeps `place` up to date; `onModel` gets each description, null where there is none. */
export async function follow(place, keyOf, onModel) {
  for (;;) {
    if (!document.hidden) {
      try {
        const model = await info(keyOf());
        show(place, model);
        onModel(model, "");
      } catch (fault) {
        place.replaceChildren(make("p", `the router cannot be asked: ${fault.message}`, { class: "state-away" }));
        onModel(null, fault.message);
      }
    }
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
}
